"""Attention whose bits depend on a token and those it sees, and on nothing else.

All keys come from the sequence's pages, those of the window too, which have to be stored before. A program takes some
queries of one sequence that share a key head. Keys are divided into parts, and these into blocks, both at fixed
positions: a softmax goes through the blocks of a part in their order, and the results of the parts are merged in
theirs. Keys that a token does not see add an exact zero. So it makes no difference whether one program takes all parts
or several share them, as few sequences need it, nor what else the window holds.

A program always has the same number of queries: the shape of a product decides how its sums are divided among threads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mars.engine.kernels.attention import LOG2E, PROGRAMS, _accumulate
from mars.engine.kernels.layers import UNFUSED
from mars.method.windows import Window

QUERIES = 32  # of a program
KEYS = 64  # of a block
FIRST_PART: tl.constexpr = tl.constexpr(128)  # keys of the first parts: a multiple of `KEYS`
SAME: tl.constexpr = tl.constexpr(8)  # so many parts have one length, the next ones twice that
COMBINED = 1024  # numbers that a program merges


@triton.jit
def _part_start(part):
    level = part // SAME
    return (((1 << level) - 1) * SAME + (part % SAME) * (1 << level)) * FIRST_PART


def parts_of(length: int) -> int:
    """Parts that so many keys have."""
    part, start, first, same = 0, 0, FIRST_PART.value, SAME.value
    while start < length:
        start += first << part // same
        part += 1
    return part


def num_stages(dtype: torch.dtype) -> int:
    """Of `_attend`: of five, the page table takes one, so that keys and values are loaded a block ahead."""
    return 5 if dtype.itemsize == 2 else 3


@triton.jit
def _merge(most, total, mixed, other_most, other_total, other_mixed):
    """Two softmaxes over different keys as one."""
    peak = tl.maximum(most, other_most)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    mine, theirs = tl.exp2(most - safe), tl.exp2(other_most - safe)
    mixed = mixed * mine[:, None] + other_mixed * theirs[:, None]
    return peak, total * mine + other_total * theirs, mixed


@triton.jit
def _queries(rows, sequence, item, WIDTH: tl.constexpr, FOLDS: tl.constexpr):
    """Column, head and row of queries that share a key head, token by token; a row below zero does not exist."""
    column = item // FOLDS
    return column, item % FOLDS, tl.load(rows + sequence * WIDTH + column, mask=column < WIDTH, other=-1)


@triton.jit
def _attend_part(
    queries, keys, values, pages, positions, begin, end, cursor, head, column, real, position, sees,
    HEADS: tl.constexpr, VERIFIED: tl.constexpr, MASKS: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
    SIZE_UP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, SLIDING: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """The softmax over keys from ``begin``, where a block begins, to ``end``."""
    most = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, SIZE_UP], tl.float32)
    dim = tl.arange(0, SIZE_UP)
    for start in range(begin, end, KEYS):
        token = start + tl.arange(0, KEYS)
        there = token < end
        page = tl.load(pages + token // PAGE, mask=there, other=0)
        block = (((page * HEADS + head) * PAGE + token % PAGE) * SIZE)[:, None] + dim
        some = there[:, None] & (dim < SIZE)
        other = token - cursor  # behind the cursor: columns of the window
        visible = (other[None, :] < VERIFIED) & (other[None, :] <= sees[:, None])
        if MASKS > 0:
            is_mask = (column >= VERIFIED)[:, None] & (other >= VERIFIED)[None, :]
            same = ((column - VERIFIED) // MASKS)[:, None] == ((other - VERIFIED) // MASKS)[None, :]
            visible = visible | (is_mask & same & (other[None, :] <= column[:, None]))
        if SLIDING > 0:
            theirs = tl.load(positions + other, mask=there & (other >= 0), other=0)
            theirs = tl.where(other >= 0, theirs, other)
            visible = visible & (position[:, None] - theirs[None, :] < SLIDING)
        visible = visible & there[None, :] & real[:, None]
        old_keys = tl.load(keys + block, mask=some, other=0.0)
        old_values = tl.load(values + block, mask=some, other=0.0)
        most, total, mixed = _accumulate(queries, old_keys, old_values, visible, most, total, mixed, 0.0, PRECISE)
    return most, total, mixed


@triton.jit(do_not_specialize=["splits", "most_parts"])
def _attend(
    query, keys, values, table, slots, cursors, lengths, reach, positions, rows, out, part_mixed, part_most, part_total,
    scale, table_slot, splits, most_parts,
    HEADS: tl.constexpr, FOLDS: tl.constexpr, WIDTH: tl.constexpr, VERIFIED: tl.constexpr, MASKS: tl.constexpr,
    PAGE: tl.constexpr, SIZE: tl.constexpr, SIZE_UP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SLIDING: tl.constexpr, PRECISE: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """A program takes all parts or, if it is not ``ALONE``, one of every ``splits``, whose results it leaves."""
    sequence, head, tile = tl.program_id(0), tl.program_id(1) % HEADS, tl.program_id(1) // HEADS
    item = tile * QUERIES + tl.arange(0, QUERIES)
    column, fold, row = _queries(rows, sequence, item, WIDTH, FOLDS)
    real = row >= 0
    dim = tl.arange(0, SIZE_UP)
    target = (row * (HEADS * FOLDS) + head * FOLDS + fold) * SIZE
    inside = real[:, None] & (dim < SIZE)
    queries = tl.load(query + target[:, None] + dim, mask=inside, other=0.0)
    queries = (queries * (scale * LOG2E)).to(query.dtype.element_ty)
    cursor = tl.load(cursors + sequence)
    pages = table + tl.load(slots + sequence) * table_slot
    positions += sequence * WIDTH
    position = tl.load(positions + column, mask=real, other=0)
    sees = tl.load(reach + sequence * WIDTH + column, mask=real, other=-1)
    seen = tl.max(tl.where(real, column, 0)) + 1  # no query sees a key behind its own
    end = cursor + tl.minimum(seen, tl.load(lengths + sequence))

    most = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, SIZE_UP], tl.float32)
    part = tl.program_id(2)
    begin = _part_start(part).to(tl.int64)
    while begin < end:
        last = tl.minimum(_part_start(part + 1), end)
        part_result = _attend_part(
            queries, keys, values, pages, positions, begin, last, cursor, head, column, real, position, sees,
            HEADS, VERIFIED, MASKS, PAGE, SIZE, SIZE_UP, QUERIES, KEYS, SLIDING, PRECISE,
        )  # fmt: skip
        if ALONE:
            most, total, mixed = _merge(most, total, mixed, part_result[0], part_result[1], part_result[2])
        else:
            place = ((sequence * HEADS + head) * most_parts + part).to(tl.int64) * (FOLDS * WIDTH) + item
            tl.store(part_most + place, part_result[0], mask=real)
            tl.store(part_total + place, part_result[1], mask=real)
            tl.store(part_mixed + place[:, None] * SIZE + dim, part_result[2], mask=inside)
        part += splits
        begin = _part_start(part).to(tl.int64)
    if ALONE:
        result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + target[:, None] + dim, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["most_parts"])
def _combine(
    part_mixed, part_most, part_total, cursors, lengths, rows, out, most_parts,
    HEADS: tl.constexpr, FOLDS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, SIZE_UP: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """Merge the parts of some queries, of each of them those that begin before its own key ends."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    item = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    column, fold, row = _queries(rows, sequence, item, WIDTH, FOLDS)
    real = row >= 0
    dim = tl.arange(0, SIZE_UP)
    inside = real[:, None] & (dim < SIZE)
    length = tl.load(lengths + sequence)
    end = tl.where(real, tl.load(cursors + sequence) + tl.minimum(column + 1, length), 0)
    longest = tl.max(end)
    count = 0
    while _part_start(count) < longest:
        count += 1
    most = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, SIZE_UP], tl.float32)
    for index in tl.range(0, count, num_stages=4):
        part = tl.zeros([], tl.int32) + index  # interpreted, it would not be a tensor
        known = _part_start(part) < end
        place = ((sequence * HEADS + head) * most_parts + part).to(tl.int64) * (FOLDS * WIDTH) + item
        other_most = tl.load(part_most + place, mask=known, other=float("-inf"))
        other_total = tl.load(part_total + place, mask=known, other=0.0)
        other_mixed = tl.load(part_mixed + place[:, None] * SIZE + dim, mask=inside & known[:, None], other=0.0)
        most, total, mixed = _merge(most, total, mixed, other_most, other_total, other_mixed)
    result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    at = (row * (HEADS * FOLDS) + head * FOLDS + fold) * SIZE
    tl.store(out + at[:, None] + dim, result.to(out.dtype.element_ty), mask=inside)


def attend(
    query: Tensor,
    store: tuple[Tensor, Tensor],
    *,
    window: Window,
    page_table: Tensor,
    slots: Tensor,
    cursors: Tensor,
    lengths: Tensor,
    positions: Tensor,
    reach: Tensor,
    rows: Tensor,
    scale: float,
    sliding: int | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attend (tokens, heads, size) queries of windows to the pages, which hold the windows already.

    ``rows`` (sequences, width) says which of the tokens belong to each window, in their order.
    """
    keys, values = store
    sequences, width = positions.shape
    heads, size = query.shape[1:]
    shared, page = keys.shape[1:3]
    folds = heads // shared
    tiles = triton.cdiv(folds * width, QUERIES)
    most_parts = parts_of(page_table.shape[1] * page)
    if splits is None:
        splits = min(most_parts, max(1, PROGRAMS // (sequences * shared * tiles)))
    out = torch.empty_like(query)
    left = (sequences, shared, most_parts, folds * width) if splits > 1 else (1,)
    part_most, part_total = (torch.empty(left, device=query.device) for _ in range(2))
    parts = (torch.empty((*left, size), device=query.device), part_most, part_total)
    size_up = max(16, triton.next_power_of_2(size))
    sizes = {"HEADS": shared, "FOLDS": folds, "WIDTH": width, "SIZE": size, "SIZE_UP": size_up}
    _attend[(sequences, shared * tiles, splits)](
        *(query, keys, values, page_table, slots, cursors, lengths, reach, positions, rows, out, *parts),
        *(scale, page_table.stride(0), splits, most_parts),
        **sizes,
        VERIFIED=window.verified,
        MASKS=window.masks,
        PAGE=page,
        QUERIES=QUERIES,
        KEYS=KEYS,
        SLIDING=sliding or 0,
        PRECISE=query.dtype == torch.float32,
        ALONE=splits == 1,
        num_stages=num_stages(query.dtype),
        **UNFUSED,
    )
    if splits > 1:
        together = max(1, COMBINED // size_up)
        grid = (sequences, shared, triton.cdiv(folds * width, together))
        _combine[grid](*parts, cursors, lengths, rows, out, most_parts, **sizes, QUERIES=together, **UNFUSED)
    return out
