"""CUDA graphs for steps whose rows have fewer places than a full window.

vLLM takes full graphs of steps in which every row has as many tokens as speculation may give it. Under load rows have
fewer, down to one; such steps are to be as fast as they are without speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from typing import Any

from mars.integrations.vllm.arguments import METHOD

Method = Callable[..., Any]


AMONG_WINDOWS = 512
"""Tokens of prompts that a full house of windows may be joined by in a step that still has a graph"""


def row_counts(most: int) -> list[int]:
    """How many rows graphs of windows are taken for: padding is at most a third, and a ninth among many."""
    steps = ((1, 4), (2, 16), (4, 48), (8, 128), (16, 256), (64, 1024))
    counts: list[int] = []
    for step, end in steps:
        counts += range((counts[-1] if counts else 0) + step, end + 1, step)
    return sorted({*(count for count in counts if count < most), most})


def capture_sizes(most: int, length: int) -> list[int]:
    """Tokens of the steps that graphs are taken of: windows of so many rows, then some with prompts among them.

    vLLM wants multiples of a window's length, and takes no graph of anything above the largest, single tokens included.
    """
    full = most * length
    step = -(-64 // length) * length
    return [*(rows * length for rows in row_counts(most)), *range(full + step, full + AMONG_WINDOWS + step, step)]


def plain_counts(most: int) -> list[int]:
    """How many rows graphs of single tokens are taken for: as vLLM does without speculation."""
    counts = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return [count for count in counts if count <= most]


def also_for_other_lengths(init: Method) -> Method:
    """Let vLLM's graph manager know rows of one token, and of as many as the setting ``windows`` names."""

    @wraps(init)
    def _init_candidates(self: Any) -> None:
        init(self)
        settings = (self.vllm_config.additional_config or {}).get(METHOD)
        mode = self.cudagraph_mode.decode_mode()
        if settings is None or not self.cudagraph_mode.separate_routine() or not self._capture_descs.get(mode):
            return
        lengths = {1, *(1 + 2 * masks for masks in settings["windows"].values())} - {self.decode_query_len}
        for length in sorted(lengths):
            counts = plain_counts(self.max_num_reqs) if length == 1 else row_counts(self.max_num_reqs)
            _add(self, mode, length, counts)

    return _init_candidates


def _add(manager: Any, mode: Any, length: int, counts: Iterable[int]) -> None:
    descriptions = manager._capture_descs[mode]
    largest = manager.compilation_config.max_cudagraph_capture_size
    for loras in manager.lora_capture_cases:
        like = next(each for each in descriptions if each.num_active_loras == loras)
        reached = 0
        for rows in counts:
            tokens = rows * length
            if tokens > largest:
                break
            graph = replace(like, num_tokens=tokens, num_reqs=rows, uniform_token_count=length)
            descriptions.append(graph)
            for count in range(reached + 1, tokens + 1):
                manager._candidates[count, loras] = [graph, *manager._candidates.get((count, loras), ())]
            reached = tokens
    descriptions.sort(key=lambda each: each.num_tokens, reverse=True)
