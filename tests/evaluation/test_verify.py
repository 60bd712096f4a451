"""``mars verify``: texts under load against those of one-token alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rich.progress import Progress

from mars.evaluation.verify import Check, Difference, sentences, table, verify
from mars.models import Checkpoint
from tests.conftest import gated_checkpoint, tiny_checkpoint

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1, 2, 3, 3], [0]]


def checks(checkpoint: Checkpoint, dials: list[str], rows: list[int], **options: object) -> list[Check]:
    return verify(checkpoint, PROMPTS, dials, rows, Progress(disable=True), max_new_tokens=24, **options)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_lossless_dials_write_one_tokens_text_at_any_load(sampling: dict[str, object]) -> None:
    found = checks(gated_checkpoint("llama"), ["one-token", "exact chain", "exact tree"], [1, 3], **sampling)
    assert [(each.dial, each.requests) for each in found] == [
        (dial, rows) for rows in (1, 3) for dial in ("one-token", "exact chain", "exact tree")
    ]
    assert all(each.is_promised and each.identical == each.answers == len(PROMPTS) for each in found)
    assert found[2].tokens_per_forward > found[0].tokens_per_forward == 1
    assert sentences(found) == ["What is promised holds: the same text in all 30 answers."]


def test_a_lossy_dial_is_shown_with_its_first_difference() -> None:
    (found,) = checks(tiny_checkpoint("llama"), ["threshold=0"], [2])
    assert not found.is_promised and not found.is_broken and found.differences
    for each in found.differences:
        expected, other = each.logprobs
        assert expected is not None and (other is None or expected >= other)  # greedy: one-token took the likeliest
        assert each.expected != each.found
    *shown, last = sentences([found])
    assert shown and "where one-token alone has" in shown[0] and "not promised" in last


def test_bfloat16_through_pytorch_promises_nothing() -> None:
    checkpoint = tiny_checkpoint("gemma")  # has no compiled step
    assert checks(checkpoint, ["exact"], [2])[0].is_promised
    low = replace(checkpoint, module=checkpoint.module.to(torch.bfloat16))
    assert not checks(low, ["exact"], [2])[0].is_promised


def test_logits_that_depend_on_the_load_are_found() -> None:
    checkpoint = tiny_checkpoint("gemma")
    noise = 3 * torch.randn(checkpoint.vocabulary, generator=torch.Generator().manual_seed(0))

    def disturb(_module: object, _inputs: object, logits: torch.Tensor) -> torch.Tensor:
        return logits if logits.shape[-2] == 1 else logits + noise

    checkpoint.module.lm_head.register_forward_hook(disturb)
    alone, loaded = checks(checkpoint, ["one-token"], [1, 3])
    assert alone.identical == alone.answers and not alone.is_broken
    assert loaded.is_broken and loaded.differences[0].expected != loaded.differences[0].found


def test_a_broken_promise_is_told() -> None:
    difference = Difference(4, 11, " the", "", (-0.25, None))
    broken = Check("exact tree", 8, 16, 2.5, is_promised=True, differences=[difference])
    fine = Check("exact", 8, 16, 2.0, is_promised=True, differences=[])
    assert broken.is_broken and not fine.is_broken
    first, last = sentences([fine, broken])
    assert "prompt 5, token 12" in first and "' the' (log-probability -0.2500)" in first
    assert last == "What is promised does not hold: 1 of 2 checks have other texts."
    assert table([broken])[1] == ["exact tree", "8", "15 of 16", "2.50", "yes"]
