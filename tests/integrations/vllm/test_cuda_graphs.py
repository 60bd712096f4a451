"""Graphs for windows shorter than a full one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from mars.integrations.vllm.cuda_graphs import capture, init_candidates, plain_counts, sequence_counts
from mars.integrations.vllm.gated import step


@dataclass(frozen=True)
class Graph:
    """As vLLM describes one."""

    num_tokens: int
    num_reqs: int
    uniform_token_count: int | None
    num_active_loras: int = 0


def manager(windows: dict[int, int] | None, sequences: int = 16) -> Any:
    """With full graphs for windows of seven tokens."""
    graphs = [Graph(7 * count, count, 7) for count in reversed(sequence_counts(sequences))]
    made = SimpleNamespace(
        vllm_config=SimpleNamespace(
            additional_config=None
            if windows is None
            else {"mars": {"mask": 9, "masks": 3, "dial": "exact", "windows": windows}}
        ),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=7 * sequences),
        cudagraph_mode=SimpleNamespace(decode_mode=lambda: "full", separate_routine=lambda: True),
        decode_query_len=7,
        max_num_reqs=sequences,
        lora_capture_cases=[0],
        _capture_descs={"full": list(graphs)},
        _candidates={
            (n, 0): [next(each for each in reversed(graphs) if each.num_tokens >= n)] for n in range(1, 7 * sequences)
        },
    )
    init_candidates(lambda _: None, made)
    return made


def found(made: Any, sequences: int, length: int) -> Graph:
    fits = (each for each in made._candidates[sequences * length, 0] if each.uniform_token_count == length)
    return next(each for each in fits if each.num_reqs >= sequences)


def test_single_tokens_and_shorter_windows_have_graphs_too() -> None:
    made = manager({4: 2, 9: 0})
    assert found(made, 3, 7) == Graph(21, 3, 7)
    assert found(made, 5, 1) == Graph(8, 8, 1)
    assert found(made, 5, 5) == Graph(30, 6, 5)
    assert found(made, 16, 1) == Graph(16, 16, 1)
    sizes = [each.num_tokens for each in made._capture_descs["full"]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(made._capture_descs["full"]) == len(set(made._capture_descs["full"]))


def test_padding_is_small() -> None:
    counts = sequence_counts(256)
    assert counts[:6] == [1, 2, 3, 4, 6, 8] and counts[-1] == 256
    assert max((high - low - 1) / high for low, high in pairwise(counts) if low >= 32) < 0.13


def test_without_the_method_nothing_changes() -> None:
    assert {each.uniform_token_count for each in manager(None)._capture_descs["full"]} == {7}


def test_graphs_of_single_tokens_have_no_low_rank_products() -> None:
    made = manager({4: 2, 9: 0})
    seen: dict[int, set[bool]] = {}

    def create(graph: Graph, warmup: bool) -> None:
        seen.setdefault(graph.uniform_token_count or 0, set()).add(step.masks)

    def original(_: Any, create: Any) -> None:
        for graph in made._capture_descs["full"]:
            create(graph, warmup=True)

    capture(original, made, create)
    assert seen == {7: {True}, 5: {True}, 1: {False}} and step.masks


def test_counts() -> None:
    assert sequence_counts(5) == [1, 2, 3, 4, 5]
    assert sequence_counts(256)[-5:] == [192, 208, 224, 240, 256]
    assert plain_counts(20) == [1, 2, 4, 8, 16]
    assert plain_counts(256)[-1] == 256
