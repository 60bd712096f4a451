"""The plugin's options, as ``additional_config`` carries them to all of vLLM's processes, and requests' dials."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from mars.errors import MarsError
from mars.method.acceptance import Dial

METHOD = "mars"
"""The method's name in ``--speculative-config``, and the key of its options in ``additional_config``"""


@dataclass(frozen=True, slots=True)
class Options:
    mask: int
    """The mask token"""
    masks: int
    """Masks per window, at most"""
    dial: str
    """The dial of requests that have none of their own"""
    windows: dict[int, int]
    """Masks per window from so many running sequences on"""

    @classmethod
    def read(cls, vllm_config: Any) -> Options | None:
        """None: the engine was started without the method."""
        stored = (vllm_config.additional_config or {}).get(METHOD)
        if stored is None:
            return None
        windows = {int(fewest): masks for fewest, masks in stored["windows"].items()}
        return cls(stored["mask"], stored["masks"], stored["dial"], windows)

    def masks_for(self, sequences: int) -> int:
        """Masks per window while so many sequences are running."""
        reached = [fewest for fewest in self.windows if fewest <= sequences]
        return self.windows[max(reached)] if reached else self.masks


def parse_dial(text: Any) -> Dial:
    """A dial that came with a request, and may be anything that JSON can say."""
    if not isinstance(text, str):
        raise MarsError(f"a dial is text such as relaxed=0.3, not {text!r}")
    return _parse(text)


_parse = cache(Dial.parse)
"""The synchronous path asks for every sequence in every step"""


def own_dial(sampling_params: Any) -> Dial | None:
    """The dial that a request has in ``extra_args``, if any."""
    text = (getattr(sampling_params, "extra_args", None) or {}).get("dial")
    return None if text is None else parse_dial(text)
