"""Windows as vLLM feeds them, and what is fed next."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from mars.integrations.vllm.step import COUNTED, KINDS, StepInputs, StepOutputs, step
from mars.integrations.vllm.window import read_windows
from mars.method.acceptance import Dial, DialTensors
from mars.method.sampling import SamplingParams, SamplingTensors
from mars.method.visibility import visibility_table
from mars.method.windows import NO_GROUP

M, VOCABULARY, WIDTH = 9, 10, 4
"""The mask token, and a full window for two masks"""


def run(fed: list[int], choices: list[int], dial: str = "exact", sure: float = 20.0, masks: int = 2) -> StepOutputs:
    """One greedy sequence; ``choices`` are the argmax behind the last token and each token of the window."""
    logits = torch.zeros(len(fed) + 1, VOCABULARY)
    logits[torch.arange(len(choices)), torch.tensor(choices)] = sure
    logits[:, M] = -torch.inf
    dials = [Dial.parse(dial)]
    inputs = StepInputs(
        tokens=torch.tensor([0, *fed]),
        starts=torch.tensor([0, *accumulate([len(fed) + 1])]),
        slots=torch.zeros(1, dtype=torch.long),
        kinds=torch.tensor([KINDS.index(each.kind) for each in dials]),
        prefilling=None,
        counts=torch.zeros(len(COUNTED), dtype=torch.long),
        mask_token=M,
        masks=masks,
        width=WIDTH,
    )
    sampling = SamplingTensors.of([SamplingParams()], VOCABULARY)
    return step(inputs, logits, DialTensors.of(dials), sampling, torch.zeros(1, dtype=torch.long))


def after(fed: list[int], choices: list[int], dial: str = "exact", sure: float = 20.0) -> list[int]:
    return list(run(fed, choices, dial, sure).windows[0].tolist())


def test_masks_alone_after_the_prompt() -> None:
    assert after([], [5]) == [M, M, M, M]


def test_predictions_of_the_masks_become_the_drafts() -> None:
    assert after([M, M, M, M], [1, 2, 3, 4, 5]) == [2, 3, M, M]


def test_accepted_drafts_are_followed_by_predictions_of_the_masks_behind_them() -> None:
    outputs = run([7, 8, M, M], [7, 8, 1, 2, 3])
    assert outputs.sampled[0].tolist() == [7, 8, 1, -1, -1]
    assert outputs.emitted.tolist() == [3] and outputs.rejected.tolist() == [2]
    assert outputs.windows[0].tolist() == [2, 3, M, M]


@pytest.mark.parametrize("accepted", [0, 1])
def test_after_a_miss_there_are_masks_alone(accepted: int) -> None:
    outputs = run([7, 8, M, M], [7 if accepted else 6, 6, 1, 2, 3])
    assert outputs.emitted.tolist() == [accepted + 1]
    assert outputs.windows[0].tolist() == [M, M, M, M]


def test_a_window_that_was_cut_has_fewer_drafts() -> None:
    assert after([7, 8, M], [7, 8, 1, 2]) == [2, M, M, M]
    assert after([7, 8], [7, 8, 1]) == [M, M, M, M]  # no mask was left


def test_shorter_windows_have_fewer_drafts() -> None:
    assert run([M, M, M, M], [1, 2, 3, 4, 5], masks=1).windows[0].tolist() == [2, M, M, M]
    assert run([M, M, M, M], [1, 2, 3, 4, 5], masks=0).windows[0].tolist() == [M, M, M, M]


def test_padding_is_no_draft() -> None:
    assert run([7, -1, -1, -1], [7, 1, 2, 3, 4]).sampled[0].tolist() == [7, 1, -1, -1, -1]
    assert after([7, -1, -1, -1], [7, 1, 2, 3, 4]) == [M, M, M, M]


def test_threshold_emits_what_it_is_confident_of() -> None:
    assert after([M, M, M, M], [1, 2, 3, 4, 5], "threshold=0.9") == [2, 3, M, M]
    assert after([M, M, M, M], [1, 2, 3, 4, 5], "threshold=0.9", sure=1.0) == [M, M, M, M]
    assert run([7, 8, M, M], [6, 6, 1, 2, 3], "threshold=0.9").sampled[0].tolist() == [7, 8, 1, -1, -1]


@pytest.mark.parametrize("measure", ["probability", "entropy", "margin"])
def test_every_measure_is_known(measure: str) -> None:
    assert after([M, M, M, M], [1, 2, 3, 4, 5], f"threshold:{measure}=0.9") == [2, 3, M, M]
    assert after([M, M, M, M], [1, 2, 3, 4, 5], f"threshold:{measure}=0.9", sure=1.0) == [M, M, M, M]


def test_one_token_has_no_drafts() -> None:
    assert after([M, M, M, M], [1, 2, 3, 4, 5], "one-token") == [M, M, M, M]


def test_windows_are_chains() -> None:
    windows = read_windows(torch.tensor([0, 7, M, M, M, 0]), torch.tensor([0, 5, 6]), mask_token=M, width=4, masks=2)
    assert windows.draft_count.tolist() == [1, 0]
    assert windows.groups.tolist() == [[NO_GROUP, 2, NO_GROUP], [NO_GROUP] * 3]
    assert windows.mask_count.tolist() == [2, 0]
    table = visibility_table(windows.visibility, windows.visibility)
    assert torch.equal(table[0], torch.ones(5, 5).tril().bool())
