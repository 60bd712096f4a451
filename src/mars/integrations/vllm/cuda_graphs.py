"""CUDA graphs for steps whose windows are shorter than a full one.

vLLM captures full graphs of steps in which every sequence has as many tokens as speculation may give it. Under load
sequences have fewer, down to one, and such steps should be as fast as they are without speculation.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from mars.integrations.vllm import gated
from mars.integrations.vllm.hooks import Method
from mars.integrations.vllm.options import Options, is_used

AMONG_WINDOWS = 512
"""Tokens of prompts that a step may have besides the largest number of windows and still use a CUDA graph"""


def sequence_counts(most: int) -> list[int]:
    """Numbers of sequences whose windows graphs are captured for: padding is at most a third, a ninth among many."""
    steps = ((1, 4), (2, 16), (4, 48), (8, 128), (16, 256), (64, 1024))
    counts: list[int] = []
    for step, end in steps:
        counts += range((counts[-1] if counts else 0) + step, end + 1, step)
    return sorted({*(count for count in counts if count < most), most})


def capture_sizes(most: int, length: int) -> list[int]:
    """Sizes in tokens for which graphs are captured: windows alone, then windows and prompts.

    vLLM wants multiples of a window's length, and captures nothing above the largest size, single tokens included.
    """
    full, step = most * length, -(-64 // length) * length
    windows = [count * length for count in sequence_counts(most)]
    return [*windows, *range(full + step, full + AMONG_WINDOWS + step, step)]


def plain_counts(most: int) -> list[int]:
    """Numbers of sequences with single tokens that graphs are captured for, as by vLLM without speculation."""
    counts = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return [count for count in counts if count <= most]


def init_candidates(original: Method, self: Any) -> None:
    """Hook of vLLM's graph manager: graphs of single tokens, and of windows as the option ``windows`` names them."""
    original(self)
    mode, used = self.cudagraph_mode.decode_mode(), is_used(self.vllm_config)
    if not used or not self.cudagraph_mode.separate_routine() or not self._capture_descs.get(mode):
        return
    options = Options.read(self.vllm_config)
    lengths = {1, *(1 + 2 * masks for masks in options.windows.values())} - {self.decode_query_len}
    for length in sorted(lengths):
        counts = plain_counts(self.max_num_reqs) if length == 1 else sequence_counts(self.max_num_reqs)
        _add(self, mode, length, counts)


def capture(original: Method, self: Any, create_forward: Method, *args: Any, **kwargs: Any) -> Any:
    """Hook of vLLM's graph manager: a step in which all sequences have one token feeds no masks."""

    def create(graph: Any, *others: Any, **options: Any) -> Any:
        gated.step.masks = graph.uniform_token_count != 1  # until the next graph is prepared
        return create_forward(graph, *others, **options)

    try:
        return original(self, create, *args, **kwargs)
    finally:
        gated.step.masks = True


def _add(manager: Any, mode: Any, length: int, counts: Iterable[int]) -> None:
    descriptions = manager._capture_descs[mode]
    largest = manager.compilation_config.max_cudagraph_capture_size
    for loras in manager.lora_capture_cases:
        like = next(each for each in descriptions if each.num_active_loras == loras)
        reached = 0
        for sequences in counts:
            tokens = sequences * length
            if tokens > largest:
                break
            graph = replace(like, num_tokens=tokens, num_reqs=sequences, uniform_token_count=length)
            descriptions.append(graph)
            for size in range(reached + 1, tokens + 1):
                manager._candidates[size, loras] = [graph, *manager._candidates.get((size, loras), ())]
            reached = tokens
    descriptions.sort(key=lambda each: each.num_tokens, reverse=True)
