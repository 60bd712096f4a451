"""What users ask for: the plugin's options, which ``additional_config`` carries to all processes, and requests' own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mars.errors import MarsError
from mars.method.acceptance import Dial
from mars.method.sampling import LARGEST, SamplingParams
from mars.models.adapter_files import AdapterFiles, find_adapter

METHOD = "mars"  # the method's name in ``--speculative-config``, and the key of its options in ``additional_config``


@dataclass(frozen=True, slots=True)
class Options:
    """The mask token, the most masks per window, the dial of requests without one, masks by the load, the adapter.

    All of it is part of the key of vLLM's compile cache, and so is the adapter's shape by ``adapter_digest``.
    """

    mask: int
    masks: int
    dial: str
    windows: dict[int, int]  # masks per window from so many running sequences on
    measures: bool = False  # are those only the first guess, until it is known what is fastest?
    adapter: str | None = None  # folder or hub id of a gated adapter
    adapter_revision: str | None = None
    adapter_digest: str | None = None  # of the adapter's config

    @classmethod
    def read(cls, vllm_config: Any) -> Options:
        stored = vllm_config.additional_config[METHOD]
        return cls(**stored | {"windows": {int(fewest): masks for fewest, masks in stored["windows"].items()}})

    def find_adapter(self) -> AdapterFiles | None:
        """The files of the gated adapter."""
        if self.adapter is None:
            return None
        if (files := find_adapter(self.adapter, self.adapter_revision)) is None:
            raise MarsError(f"{self.adapter} has no gated adapter on this machine")
        return files

    def masks_for(self, sequences: int) -> int:
        """Masks per window while so many sequences are running."""
        reached = [fewest for fewest in self.windows if fewest <= sequences]
        return self.windows[max(reached)] if reached else self.masks


def is_used(vllm_config: Any) -> bool:
    """Was the engine started with the method?"""
    return METHOD in (vllm_config.additional_config or {})


def parse_dial(text: Any) -> Dial:
    """A dial that came with a request, and may be anything that JSON can say."""
    if not isinstance(text, str):
        raise MarsError(f"a dial is text such as relaxed=0.3, not {text!r}")
    return _parse(text)


_parse = lru_cache(maxsize=1024)(Dial.parse)  # the synchronous path asks for every sequence in every step


def own_dial(sampling_params: Any) -> Dial | None:
    """The dial that a request has in ``extra_args``, if any."""
    text = (getattr(sampling_params, "extra_args", None) or {}).get("dial")
    return None if text is None else parse_dial(text)


def own_sampling(params: Any, seed: int) -> SamplingParams:
    """How a request samples from logits that vLLM has adjusted: penalties, bans and bias are done."""
    if params.temperature == 0:
        return SamplingParams(seed=0)
    top_k, seed = max(params.top_k, 0), seed & (2**63 - 1)
    return SamplingParams(min(params.temperature, LARGEST), top_k, params.top_p, params.min_p, seed=seed)


def has_seed(params: Any) -> bool:
    """Such a request samples with our noise in every step: its text must not depend on which steps have windows."""
    scored = getattr(params, "logprob_token_ids", None)  # vLLM's sampler alone reports these
    return params.temperature > 0 and params.seed is not None and not scored


def log(level: str, message: str) -> None:
    """To vLLM's own log."""
    from vllm.logger import init_logger

    getattr(init_logger("vllm.mars"), level)(message)
