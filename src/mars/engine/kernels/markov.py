"""The Markov head as a Triton kernel: logits of masks, with what the head says of the tokens before them added.

Whoever looks for the likeliest tokens of a mask afterwards need not read its logits again: each program also leaves
their highest and their mass, of its part of the vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mars.method.acceptance import NO_TOKEN

PART = 64  # tokens of the vocabulary that a program computes logits of
MOST_MASKS = 64  # of a program
MOST_RANKS = 128  # that are summed at once
_NO_TOKEN: tl.constexpr = tl.constexpr(NO_TOKEN)


@triton.jit(do_not_specialize=["masks"])
def _add_head(
    logits, rows, before, first, second, out, peaks, masses, masks,
    VOCABULARY: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, MASKS: tl.constexpr, PART: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """The second factor stands where a tensor core takes the larger operand; ranks are summed in one order."""
    output = tl.program_id(0) * PART + tl.arange(0, PART)
    mask = tl.program_id(1) * MASKS + tl.arange(0, MASKS)
    known, exists = output < VOCABULARY, mask < masks
    row = tl.load(rows + mask, mask=exists, other=0)
    token = tl.load(before + mask, mask=exists, other=_NO_TOKEN)
    has_token = exists & (token != _NO_TOKEN)
    total = tl.zeros([PART, MASKS], tl.float32)
    for start in range(0, RANK, RANKS):
        rank = start + tl.arange(0, RANKS)
        used = rank < RANK
        weight = tl.load(
            second + output[:, None] * RANK + rank[None, :], mask=known[:, None] & used[None, :], other=0.0
        )
        given = tl.load(
            first + token[None, :] * RANK + rank[:, None], mask=has_token[None, :] & used[:, None], other=0.0
        )
        total = tl.dot(weight, given, total, input_precision="ieee" if PRECISE else "tf32")
    some = known[:, None] & exists[None, :]
    x = tl.load(logits + row[None, :] * VOCABULARY + output[:, None], mask=some, other=0.0)
    y = (x.to(tl.float32) + total).to(x.dtype)
    tl.store(out + mask.to(tl.int64)[None, :] * VOCABULARY + output[:, None], y, mask=some)
    y = tl.where(known[:, None], y.to(tl.float32), float("-inf"))
    peak = tl.max(y, 0)
    place = mask * tl.num_programs(0) + tl.program_id(0)
    tl.store(peaks + place, peak, mask=exists)
    tl.store(masses + place, tl.sum(tl.exp(y - peak[None, :]), 0), mask=exists)


@torch.library.custom_op("mars::add_head", mutates_args=())
def add_head(
    logits: Tensor, rows: Tensor, before: Tensor, first: Tensor, second: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The logits in these ``rows`` (masks,), each with what its token ``before`` (masks,) adds: (masks, vocabulary).

    Also, of each `PART` of them, the highest and the sum of exp(logit - highest): (masks, parts) both. ``first`` and
    ``second`` (vocabulary, rank) are the head's factors; `NO_TOKEN` adds nothing. The bits of a mask's logits do not
    depend on how many masks there are.
    """
    vocabulary, rank = second.shape
    out, peaks, masses = _empty(logits, len(rows))
    masks = max(16, min(MOST_MASKS, triton.next_power_of_2(len(rows))))
    _add_head[peaks.shape[1], triton.cdiv(len(rows), masks)](
        *(logits, rows, before, first, second, out, peaks, masses, len(rows)),
        VOCABULARY=vocabulary,
        RANK=rank,
        RANKS=max(16, min(MOST_RANKS, triton.next_power_of_2(rank))),
        MASKS=masks,
        PART=PART,
        PRECISE=logits.dtype == torch.float32,
    )
    return out, peaks, masses


@add_head.register_fake
def _(logits: Tensor, rows: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(logits, rows.shape[0])  # len() would make the size static


def _empty(logits: Tensor, masks: int) -> tuple[Tensor, Tensor, Tensor]:
    parts = (masks, triton.cdiv(logits.shape[1], PART))
    peaks, masses = (logits.new_empty(parts, dtype=torch.float32) for _ in range(2))
    return logits.new_empty(masks, logits.shape[1]), peaks, masses
