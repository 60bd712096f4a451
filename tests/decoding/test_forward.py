"""One forward of ragged windows over a cache gives the logits of the plain model on each path, for every family."""

from __future__ import annotations

import pytest
import torch

from mars.decoding.attention import NAME, own_attention
from mars.decoding.cache import Cache
from mars.decoding.forward import forward
from mars.method.windows import NOWHERE, Window, lay_out
from mars.models import Checkpoint
from tests.conftest import FAMILIES, MASK, tiny_checkpoint
from tests.decoding.test_exactness import prompts

PREFIXES = prompts(4, seed=2, longest=30)
TREES = [lay_out([1, 2], [3, 4, 5], mask=MASK, masks=3, points=points) for points in ({0, 1, 2, 3}, {0, 3}, {3}, {1})]
CHAINS = [lay_out([7], list(range(claims)), mask=MASK, masks=3, points={claims}) for claims in (0, 3, 1, 2)]


def plain_logits(checkpoint: Checkpoint, tokens: list[int]) -> torch.Tensor:
    with own_attention(checkpoint.module) as model:
        return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


def path(window: Window, index: int) -> list[int]:
    return [] if index == NOWHERE else [*path(window, window.parents[index]), window.tokens[index]]


@torch.inference_mode()
def window_logits(checkpoint: Checkpoint, windows: list[Window]) -> torch.Tensor:
    """Logits behind cached prefixes, with garbage in the slots past every cursor."""
    checkpoint.module.set_attn_implementation(NAME)
    cache = Cache(len(windows), 64)
    forward(checkpoint, cache, [0] * len(windows), [lay_out([9] * 60)] * len(windows))
    forward(checkpoint, cache, [0] * len(windows), [lay_out(prefix) for prefix in PREFIXES])
    cursors = [len(prefix) for prefix in PREFIXES]
    return forward(checkpoint, cache, cursors, windows)[1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("windows", [CHAINS, TREES], ids=["chains", "trees"])
@torch.inference_mode()
def test_every_path_sees_what_the_plain_model_sees(family: str, windows: list[Window]) -> None:
    check_paths(tiny_checkpoint(family), windows)


@torch.inference_mode()
def test_a_sliding_window_shorter_than_a_group_counts_positions_not_slots() -> None:
    check_paths(tiny_checkpoint("mistral", sliding_window=2), TREES)


def check_paths(checkpoint: Checkpoint, windows: list[Window]) -> None:
    logits = window_logits(checkpoint, windows)
    assert logits.isfinite().all(), "padding must not turn into NaN"
    for row, window in enumerate(windows):
        for index in range(window.anchor, len(window.tokens)):
            expected = plain_logits(checkpoint, PREFIXES[row] + path(window, index))
            found = logits[row, logits.shape[1] - len(window.tokens) + index]
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_explicit_visibility_of_a_chain_is_causal_attention() -> None:
    """A batch with one tree takes the explicit path for all rows: the chains in it must not notice."""
    checkpoint = tiny_checkpoint("gemma2")
    alone = window_logits(checkpoint, CHAINS)
    mixed = window_logits(checkpoint, [*CHAINS[:3], TREES[0]])
    for row, window in enumerate(CHAINS[:3]):
        kept = len(window.tokens) - window.anchor
        torch.testing.assert_close(mixed[row, -kept:], alone[row, -kept:], atol=1e-5, rtol=1e-5)
