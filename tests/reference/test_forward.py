"""One forward of windows over a cache gives the logits of the plain model on each path, for every family."""

from __future__ import annotations

import pytest
import torch

from mars.method.visibility import visibility_table
from mars.method.windows import Window, WindowBatch
from mars.models import Checkpoint
from mars.models.attention import own_attention
from mars.reference.cache import Cache, forward_windows, prefill, windows_of
from tests.conftest import FAMILIES, tiny_checkpoint
from tests.reference.test_exactness import prompts

PREFIXES = prompts(4, seed=2, longest=30)
ROWS = dict(enumerate(PREFIXES))
DRAFTS = [[3, 4, 5], [], [3, 4], [5]]
GROUPS = [4, 2, 1, 3]


def plain_logits(checkpoint: Checkpoint, tokens: list[int]) -> torch.Tensor:
    with own_attention(checkpoint.module) as model:
        return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


def build(checkpoint: Checkpoint, groups: list[int]) -> WindowBatch:
    texts = [(7, drafts) for drafts in DRAFTS]
    return windows_of(checkpoint, Window(3, max(groups), 3), texts, emitted=[False] * 4, groups=groups)


@torch.inference_mode()
def window_logits(checkpoint: Checkpoint, windows: WindowBatch) -> torch.Tensor:
    """Logits behind cached prefixes, with garbage past every cursor."""
    cache = Cache(len(ROWS), 64)
    prefill(checkpoint, cache, dict.fromkeys(ROWS, [9] * 60), dict.fromkeys(ROWS, 0))
    prefill(checkpoint, cache, ROWS, dict.fromkeys(ROWS, 0))
    cursors = torch.tensor([len(prefix) for prefix in PREFIXES])
    logits = forward_windows(checkpoint, cache, torch.arange(len(ROWS)), cursors, windows)
    return logits.view(*windows.tokens.shape, -1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("groups", [[1] * 4, GROUPS], ids=["chains", "trees"])
def test_every_path_sees_what_the_plain_model_sees(family: str, groups: list[int]) -> None:
    check_paths(tiny_checkpoint(family), groups)


def test_a_sliding_window_shorter_than_a_group_counts_positions_not_columns() -> None:
    check_paths(tiny_checkpoint("mistral", sliding_window=2), GROUPS)


@torch.inference_mode()
def check_paths(checkpoint: Checkpoint, groups: list[int]) -> None:
    windows = build(checkpoint, groups)
    logits = window_logits(checkpoint, windows)
    visible = visibility_table(windows.visibility, windows.visibility)
    assert logits.isfinite().all(), "padding must not turn into NaN"
    for row, drafts in enumerate(DRAFTS):
        starts = [start for start in windows.groups[row].tolist() if start >= 0]
        columns = [*range(len(drafts) + 1), *(start + mask for start in starts for mask in range(3))]
        for column in columns:
            path = windows.tokens[row, visible[row, column]].tolist()
            expected = plain_logits(checkpoint, PREFIXES[row] + path)
            torch.testing.assert_close(logits[row, column], expected, atol=2e-4, rtol=1e-4)


def test_a_chain_beside_trees_is_a_chain_alone() -> None:
    checkpoint = tiny_checkpoint("gemma2")
    alone = window_logits(checkpoint, build(checkpoint, [1] * 4))
    mixed = window_logits(checkpoint, build(checkpoint, [4, 1, 1, 4]))
    torch.testing.assert_close(mixed[1:3, :7], alone[1:3], atol=1e-5, rtol=1e-5)
