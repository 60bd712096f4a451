"""``batch.advance`` as one Triton kernel: a program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mars.integrations.vllm.batch import Forward, Next


@triton.jit(do_not_specialize=["mask", "masks"])
def _advance(
    fed,
    starts,
    best,
    slots,
    sampled,
    emitted,
    rejected,
    places,
    dials,
    sure,
    keep,
    counts,
    mask,
    masks,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GREEDY: tl.constexpr,
    DIALS: tl.constexpr,
    SURE: tl.constexpr,
    KEEP: tl.constexpr,
):
    row = tl.program_id(0)
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start - 1
    columns = tl.arange(0, BLOCK)
    inside = columns < length
    said = tl.load(best + start + columns, mask=columns <= length, other=-1).to(tl.int32)
    mine = tl.load(fed + start + 1 + columns, mask=inside, other=0).to(tl.int32)
    known = tl.min(tl.where(inside & (mine == mask), columns, length), 0)
    ours = (known < length) & (tl.sum((inside & (mine < 0)).to(tl.int32), 0) == 0)
    if GREEDY:
        wrong = inside & (mine != said)
        if KEEP:
            wrong = wrong & (tl.load(keep + start + columns, mask=inside, other=0).to(tl.int32) == 0)
        written = tl.min(tl.where(wrong, columns, length), 0) + 1
        tokens = tl.where(columns < written - 1, mine, tl.where(columns < written, said, -1))
        tl.store(sampled + row * (WIDTH + 1) + columns, tokens.to(tl.int64), mask=columns <= WIDTH)
        tl.store(emitted + row, written)
        tl.store(rejected + row, length + 1 - written)
    else:
        written = tl.load(emitted + row).to(tl.int32)
        tokens = tl.load(sampled + row * (WIDTH + 1) + columns, mask=columns < written, other=-1).to(tl.int32)
    drafts = tl.where(ours & (written == known + 1), tl.minimum(length - known, masks), 0)
    kept = tl.maximum(written - 1, 0)
    agreed = kept
    if DIALS:
        slot = tl.load(slots + row)
        least = tl.load(dials + 2 * slot + 1)
        if SURE:
            trust = tl.load(sure + start + known + 1 + columns, mask=columns < drafts, other=0.0)
            drafts = tl.min(tl.where((columns < drafts) & (trust < least), columns, drafts), 0)
        else:
            drafts = tl.where(least <= 1.0, drafts, 0)
        same = tl.sum(((tokens == said) & (columns < kept)).to(tl.int32), 0)
        agreed = tl.where(tl.load(dials + 2 * slot) < float("inf"), same, kept)
    behind = tl.load(best + start + known + 1 + columns, mask=columns < drafts, other=0)
    behind = tl.where(columns < drafts, behind, mask)
    tl.store(places + row * WIDTH + columns, behind, mask=columns < WIDTH)
    spoke = written > 0
    tl.atomic_add(counts, spoke.to(tl.int64))
    tl.atomic_add(counts + 1, written.to(tl.int64))
    tl.atomic_add(counts + 2, tl.where(spoke & ours, known, 0).to(tl.int64))
    tl.atomic_add(counts + 3, kept.to(tl.int64))
    tl.atomic_add(counts + 4, agreed.to(tl.int64))


def advance(forward: Forward, *, mask: int, masks: int, width: int) -> Next:
    """Accept, count, and lay out the next windows: at most ``masks`` drafts, ``width`` places in all."""
    rows, device = len(forward.slots), forward.fed.device
    greedy = forward.emitted is None
    sampled, emitted, rejected = forward.sampled, forward.emitted, forward.emitted
    if sampled is None or emitted is None:
        sampled = torch.empty((rows, width + 1), dtype=torch.int64, device=device)
        emitted = torch.empty(rows, dtype=torch.int32, device=device)
        rejected = torch.empty_like(emitted)  # not a part of the other: a kernel is compiled anew for odd addresses
    assert rejected is not None
    places = torch.empty((rows, width), dtype=torch.int64, device=device)
    _advance[(rows,)](
        forward.fed,
        forward.starts,
        forward.best,
        forward.slots,
        sampled,
        emitted,
        rejected,
        places,
        forward.dials,
        forward.sure,
        forward.keep,
        forward.counts,
        mask,
        masks,
        WIDTH=width,
        BLOCK=max(16, triton.next_power_of_2(width + 1)),
        GREEDY=greedy,
        DIALS=forward.dials is not None,
        SURE=forward.sure is not None,
        KEEP=forward.keep is not None,
        num_warps=1,
    )
    return Next(sampled, emitted, rejected, places)
