"""All rows at once, in torch and in the kernel, as one row at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from mars.integrations.vllm import batch
from mars.integrations.vllm.batch import COUNTED, Forward, Next
from mars.integrations.vllm.windows import drafts_in, next_window

MASK, WORDS, WIDTH = 9, 4, 8
"""Few enough words that drafts are right now and then"""
TOLD = {
    "exact": (torch.inf, 0.0),
    "relaxed": (-1.0, 0.0),
    "threshold": (-torch.inf, 0.5),
    "one-token": (torch.inf,) * 2,
}
"""Dials as the kernel knows them"""
Advance = Callable[..., Next]


def in_torch() -> Advance:
    return batch.advance


def in_triton() -> Advance:
    pytest.importorskip("triton")
    from mars.integrations.vllm.kernel import advance

    return advance


@some.composite
def rows(draw: Any) -> list[dict[str, Any]]:
    """What rows fed, what was likeliest behind each place, how many drafts were taken, or which are kept; dials."""
    word = some.integers(0, WORDS - 1)
    found = []
    for _ in range(draw(some.integers(1, 5))):
        drafts = draw(some.lists(word, max_size=4))
        fed = drafts + draw(some.sampled_from([[], [MASK] * 2, [MASK] * 4, [-1, -1], [MASK, -1]]))
        row = {
            "fed": fed,
            "best": draw(some.lists(word, min_size=len(fed) + 1, max_size=len(fed) + 1)),
            "taken": draw(some.integers(-1, len(drafts))),
            "dial": draw(some.sampled_from(list(TOLD))),
            "sure": [draw(some.sampled_from([0.2, 0.9])) for _ in range(len(fed) + 1)],
            "keep": [draw(some.booleans()) and 0 <= place != MASK for place in (*fed, -1)],
        }
        found.append(row)
    return found


def forward(found: list[dict[str, Any]], written: list[list[int]], *, greedy: bool, device: str) -> Forward:
    """Rows whose dials lie in slots in the other direction."""
    thresholds = any(row["dial"] == "threshold" for row in found)
    lenient = greedy and any(any(row["keep"]) for row in found)
    dials = torch.tensor([TOLD[row["dial"]] for row in reversed(found)], device=device)
    tokens = torch.tensor([each + [-1] * (WIDTH + 1 - len(each)) for each in written], device=device)
    return Forward(
        fed=torch.tensor([place for row in found for place in (7, *row["fed"])], dtype=torch.int32, device=device),
        starts=torch.tensor([0, *accumulate(len(row["best"]) for row in found)], dtype=torch.int32, device=device),
        best=torch.tensor([word for row in found for word in row["best"]], device=device),
        slots=torch.arange(len(found) - 1, -1, -1, dtype=torch.int32, device=device),
        emitted=None if greedy else torch.tensor(list(map(len, written)), dtype=torch.int32, device=device),
        sampled=None if greedy else tokens,
        dials=None if greedy and not lenient else dials,
        sure=torch.tensor([p for row in found for p in row["sure"]], device=device) if thresholds else None,
        counts=torch.zeros(len(COUNTED), dtype=torch.int64, device=device),
        keep=torch.tensor([k for row in found for k in row["keep"]], device=device).view(torch.uint8)
        if lenient
        else None,
    )


def greedily(row: dict[str, Any]) -> list[int]:
    """What the AR model would write, or what is kept all the same, for as long as the window goes along."""
    tokens = [row["best"][0]]
    for place, keep, word in zip(row["fed"], row["keep"], row["best"][1:], strict=False):
        if place != tokens[-1] and not keep:
            break
        tokens[-1:] = [place, word]
    return tokens


def check(advance: Advance, found: list[dict[str, Any]], masks: int, *, greedy: bool, device: str = "cpu") -> None:
    """Not ``greedy``: drafts were taken in any other way, or a prompt is still being read."""
    written = [
        greedily(row) if greedy else [*row["fed"][: row["taken"]], 1] if row["taken"] >= 0 else [] for row in found
    ]
    told = forward(found, written, greedy=greedy, device=device)
    after = advance(told, mask=MASK, masks=masks, width=WIDTH)
    counts = dict.fromkeys(COUNTED, 0)
    for number, (row, tokens) in enumerate(zip(found, written, strict=True)):
        fed, best, dial = row["fed"], row["best"], "exact" if told.dials is None else row["dial"]
        known = drafts_in(fed, MASK)
        trusted = 0 if dial == "one-token" else None
        if dial == "threshold":
            sure = [p >= 0.5 for p in row["sure"][(known or 0) + 1 :]]
            trusted = [*sure, False].index(False)
        window = next_window(fed, len(tokens), best, mask=MASK, masks=masks, trusted=trusted)
        assert after.places[number].tolist() == window + [MASK] * (WIDTH - len(window))
        assert after.sampled[number].tolist() == tokens + [-1] * (WIDTH + 1 - len(tokens))
        assert after.emitted[number] == len(tokens)
        if greedy:
            assert after.rejected[number] == len(fed) + 1 - len(tokens)
        if tokens:
            lenient = dial in ("relaxed", "threshold")
            counts["forwards"] += 1
            counts["tokens"] += len(tokens)
            counts["drafts"] += known or 0
            counts["accepted"] += len(tokens) - 1
            counts["agreed"] += sum(map(int.__eq__, tokens[:-1], best)) if lenient else len(tokens) - 1
    assert dict(zip(COUNTED, told.counts.tolist(), strict=True)) == counts


@pytest.mark.parametrize("made", [in_torch, in_triton])
@pytest.mark.parametrize("greedy", [True, False])
def test_rows_do_as_one_does(made: Callable[[], Advance], greedy: bool) -> None:
    """On the device where there is one; elsewhere the kernel is interpreted."""
    advance = made()
    device = "cuda" if made is in_triton and torch.cuda.is_available() else "cpu"

    @settings(max_examples=60, deadline=None)
    @given(rows(), some.integers(0, 4))
    def holds(found: list[dict[str, Any]], masks: int) -> None:
        check(advance, found, masks, greedy=greedy, device=device)

    holds()


COMPILE = """
import itertools, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mars.integrations.vllm.kernel import _advance

pointers = {"fed": "*i32", "starts": "*i32", "best": "*i64", "slots": None, "sampled": "*i64", "emitted": "*i32"}
pointers |= {"rejected": "*i32", "places": "*i64", "dials": "*fp32", "sure": "*fp32", "keep": "*u8", "counts": "*i64"}
for slots, greedy, dials, sure, keep in itertools.product(["*i32", "*i64"], *[[True, False]] * 4):
    if (sure and not dials) or (keep and not (greedy and dials)):
        continue
    given = {"dials": dials, "sure": sure, "keep": keep}
    constants = {"WIDTH": 6, "BLOCK": 16, "GREEDY": greedy, "DIALS": dials, "SURE": sure, "KEEP": keep}
    constants |= {name: None for name, there in given.items() if not there}
    signature = {name: kind for name, kind in (pointers | {"slots": slots}).items() if given.get(name, True)}
    signature |= {"mask": "i32", "masks": "i32"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(_advance, signature, constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["cubin"]
"""


def test_the_kernel_compiles_for_a_gpu() -> None:
    """Without one: interpreted, a kernel may do what it cannot do when compiled."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True, timeout=300)
