"""The attention of windows over the paged cache as a Triton kernel.

A program takes the queries of one sequence that share a key head, all tokens of the window together, so that the cached
prefix is read once for all of them. A prefix may be divided among several programs; the last of them also attends to
the window itself, straight from the new keys and values, and stores these in the sequence's pages on the way. A second
kernel then combines the parts.

Where windows follow one another in the same text, as the chunks of a prompt do, a kernel of its own stores all of them
first, and each then finds those before it in the pages.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mars.method.windows import Window

BLOCK_M = 64  # most queries of a program
BLOCK_N = 64  # cached keys read at a time
PROGRAMS = 264  # enough to keep a large GPU busy: prefixes are divided until there are about this many
MOST_SPLITS = 16
COMBINED = 4096  # numbers that a program combines


LOG2E = tl.constexpr(1.4426950408889634)  # Softmax is computed with powers of two


@triton.jit
def _accumulate(queries, keys, values, visible, most, total, mixed, CAP: tl.constexpr, PRECISE: tl.constexpr):
    """Add a block of keys and values to a running softmax."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee" if PRECISE else "tf32")
    if CAP > 0:
        scores = CAP * LOG2E * (2 * tl.sigmoid(2 * scores / (CAP * LOG2E)) - 1)
    scores = tl.where(visible, scores, float("-inf"))
    peak = tl.maximum(most, tl.max(scores, 1))
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(scores - safe[:, None])
    fade = tl.exp2(most - safe)
    total = total * fade + tl.sum(weights, 1)
    mixed = mixed * fade[:, None]
    mixed += tl.dot(weights.to(values.dtype), values, input_precision="ieee" if PRECISE else "tf32")
    return peak, total, mixed


@triton.jit(do_not_specialize=["splits"])
def _attend(
    query,
    new_keys,
    new_values,
    keys,
    values,
    table,
    slots,
    cursors,
    reach,
    lengths,
    positions,
    rows,
    sinks,
    out,
    part_mixed,
    part_most,
    part_total,
    scale,
    query_head,
    query_token,
    key_head,
    key_token,
    value_head,
    value_token,
    table_slot,
    splits,
    HEADS: tl.constexpr,
    FOLDS: tl.constexpr,
    WIDTH: tl.constexpr,
    VERIFIED: tl.constexpr,
    MASKS: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_UP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALONE: tl.constexpr,
    STORES: tl.constexpr,
    SLIDING: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISE: tl.constexpr,
):
    sequence, head, split = tl.program_id(0), tl.program_id(1) % HEADS, tl.program_id(2)
    tile = tl.program_id(1) // HEADS
    item = tile * QUERIES + tl.arange(0, QUERIES)  # queries of all heads that share these keys, token by token
    fold, column = item // WIDTH, item % WIDTH
    row = tl.load(rows + sequence * WIDTH + column, mask=fold < FOLDS, other=-1)
    real = row >= 0
    dim = tl.arange(0, SIZE_UP)
    inside = dim < SIZE
    at = (head * FOLDS + fold) * query_head + row * query_token
    queries = tl.load(query + at[:, None] + dim, mask=real[:, None] & inside, other=0.0)
    queries = (queries * (scale * LOG2E)).to(new_keys.dtype.element_ty)

    most = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, SIZE_UP], tl.float32)
    cursor = tl.load(cursors + sequence)
    pages = table + tl.load(slots + sequence) * table_slot
    position = tl.load(positions + sequence * WIDTH + column, mask=real, other=0)  # behind the cursor
    if SINKS and split == splits - 1:  # one more score, which attends to nothing
        most = tl.load(sinks + head * FOLDS + fold, mask=real, other=0.0).to(tl.float32) * LOG2E
        total += 1.0

    share = tl.cdiv(tl.cdiv(cursor, splits), KEYS) * KEYS
    first = split * share
    last = tl.minimum(first + share, cursor)
    for start in range(first, last, KEYS):
        token = start + tl.arange(0, KEYS)
        there = token < last
        page = tl.load(pages + token // PAGE, mask=there, other=0)
        where = ((page * HEADS + head) * PAGE + token % PAGE) * SIZE
        block = where[:, None] + dim
        some = there[:, None] & inside
        old_keys = tl.load(keys + block, mask=some, other=0.0)
        old_values = tl.load(values + block, mask=some, other=0.0)
        visible = there[None, :] & real[:, None]
        if SLIDING > 0:
            visible = visible & (position[:, None] - (token - cursor)[None, :] < SLIDING)
        most, total, mixed = _accumulate(queries, old_keys, old_values, visible, most, total, mixed, CAP, PRECISE)

    if split == splits - 1:
        sees = tl.load(reach + sequence * WIDTH + column, mask=real, other=-1)
        length = tl.load(lengths + sequence)
        seen = WIDTH if STORES else tl.max(tl.where(real, column, 0)) + 1  # nothing behind these can be visible
        for begin in range(0, seen, COLUMNS):
            other = begin + tl.arange(0, COLUMNS)
            other_row = tl.load(rows + sequence * WIDTH + other, mask=other < WIDTH, other=-1)
            known = other_row >= 0
            known_block = known[:, None] & inside
            fresh_keys = tl.load(
                new_keys + head * key_head + other_row[:, None] * key_token + dim, mask=known_block, other=0.0
            )
            fresh_values = tl.load(
                new_values + head * value_head + other_row[:, None] * value_token + dim, mask=known_block, other=0.0
            )
            if STORES and tile == 0:
                kept = known & (other < length)
                kept_page = tl.load(pages + (cursor + other) // PAGE, mask=kept, other=0)
                kept_at = ((kept_page * HEADS + head) * PAGE + (cursor + other) % PAGE) * SIZE
                kept_block = kept_at[:, None] + dim
                tl.store(keys + kept_block, fresh_keys, mask=kept[:, None] & inside)
                tl.store(values + kept_block, fresh_values, mask=kept[:, None] & inside)
            shown = (other[None, :] < VERIFIED) & (other[None, :] <= sees[:, None])
            if MASKS > 0:
                mine, group_of = (column - VERIFIED) // MASKS, (other - VERIFIED) // MASKS
                group = (
                    (mine[:, None] == group_of[None, :]) & (column >= VERIFIED)[:, None] & (other >= VERIFIED)[None, :]
                )
                shown = shown | (group & (other[None, :] <= column[:, None]))
            shown = shown & known[None, :] & real[:, None]
            if SLIDING > 0:
                theirs = tl.load(positions + sequence * WIDTH + other, mask=known, other=0)
                shown = shown & (position[:, None] - theirs[None, :] < SLIDING)
            most, total, mixed = _accumulate(queries, fresh_keys, fresh_values, shown, most, total, mixed, CAP, PRECISE)

    if ALONE:
        result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        target = (row * (HEADS * FOLDS) + head * FOLDS + fold) * SIZE
        tl.store(out + target[:, None] + dim, result.to(out.dtype.element_ty), mask=real[:, None] & inside)
    else:
        part = ((sequence * HEADS + head) * splits + split) * (FOLDS * WIDTH) + item
        tl.store(part_most + part, most, mask=real)
        tl.store(part_total + part, total, mask=real)
        tl.store(part_mixed + part[:, None] * SIZE + dim, mixed, mask=real[:, None] & inside)


@triton.jit
def _combine(
    part_mixed,
    part_most,
    part_total,
    rows,
    out,
    HEADS: tl.constexpr,
    FOLDS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_UP: tl.constexpr,
    SPLITS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Add up the parts of some queries, weighted by the share of the softmax that each part has."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    item = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    row = tl.load(rows + sequence * WIDTH + item % WIDTH, mask=item < FOLDS * WIDTH, other=-1)
    real = row >= 0
    dim = tl.arange(0, SIZE_UP)
    part = ((sequence * HEADS + head) * SPLITS + tl.arange(0, SPLITS))[:, None] * (FOLDS * WIDTH) + item
    most = tl.load(part_most + part, mask=real[None, :], other=0.0)
    total = tl.load(part_total + part, mask=real[None, :], other=1.0)
    inside = real[:, None] & (dim < SIZE)
    mixed = tl.load(part_mixed + part[:, :, None] * SIZE + dim, mask=inside[None, :, :], other=0.0)
    weight = tl.exp2(most - tl.max(most, 0)[None, :])
    result = tl.sum(mixed * weight[:, :, None], 0) / tl.sum(total * weight, 0)[:, None]
    at = (row * (HEADS * FOLDS) + head * FOLDS + item // WIDTH) * SIZE
    tl.store(out + at[:, None] + dim, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _store(
    new,
    store,
    table,
    slots,
    cursors,
    lengths,
    rows,
    new_head,
    new_token,
    table_slot,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_UP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store some tokens of a window in the sequence's pages."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    dim = tl.arange(0, SIZE_UP)
    kept = column < tl.load(lengths + sequence)
    some = kept[:, None] & (dim < SIZE)
    row = tl.load(rows + sequence * WIDTH + column, mask=kept, other=0)
    fresh = tl.load(new + head * new_head + row[:, None] * new_token + dim, mask=some, other=0.0)
    token = tl.load(cursors + sequence) + column
    page = tl.load(table + tl.load(slots + sequence) * table_slot + token // PAGE, mask=kept, other=0)
    where = ((page * HEADS + head) * PAGE + token % PAGE) * SIZE
    tl.store(store + where[:, None] + dim, fresh, mask=some)


def attend_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    store: tuple[Tensor, Tensor],
    *,
    window: Window,
    page_table: Tensor,
    slots: Tensor,
    cursors: Tensor,
    positions: Tensor,
    reach: Tensor,
    lengths: Tensor,
    rows: Tensor,
    chained: bool,
    scale: float,
    sliding: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attend (heads, tokens, size) queries of windows to pages and windows, and store the windows in the pages.

    ``rows`` (sequences, width) says which of the tokens belong to each window, in their order.
    """
    if not all(each.is_contiguous() for each in (slots, cursors, positions, reach, lengths, rows)):
        raise ValueError("the tensors that describe the windows must be contiguous")
    keys, values = store
    heads, tokens, size = query.shape
    sequences, width = rows.shape
    shared, page = keys.shape[1:3]
    folds = heads // shared
    queries = max(16, min(BLOCK_M, triton.next_power_of_2(folds * width)))
    tiles = triton.cdiv(folds * width, queries)
    if splits is None:
        splits = min(
            MOST_SPLITS, 1 << (PROGRAMS // (sequences * shared * tiles) | 1).bit_length() - 1
        )  # a power of two
    out = torch.empty(tokens, heads, size, dtype=query.dtype, device=query.device)
    part_shape = (sequences, shared, splits, folds * width) if splits > 1 else (1,)
    part_most, part_total = (torch.empty(part_shape, device=query.device) for _ in range(2))
    parts = (torch.empty((*part_shape, size), device=query.device), part_most, part_total)
    size_up = max(16, triton.next_power_of_2(size))
    sizes: dict[str, Any] = {"HEADS": shared, "SIZE": size, "SIZE_UP": size_up}
    columns = max(16, min(64, triton.next_power_of_2(width)))
    if chained:
        for new, pages in ((key, keys), (value, values)):
            where = (page_table, slots, cursors, lengths, rows, *new.stride()[:2], page_table.stride(0))
            grid = (sequences, shared, triton.cdiv(width, columns))
            _store[grid](new, pages, *where, **sizes, WIDTH=width, PAGE=page, COLUMNS=columns)
    _attend[(sequences, shared * tiles, splits)](
        *(query, key, value, keys, values, page_table, slots, cursors, reach, lengths, positions),
        *(rows, query if sinks is None else sinks, out, *parts, scale),
        *(*query.stride()[:2], *key.stride()[:2], *value.stride()[:2], page_table.stride(0), splits),
        **sizes,
        FOLDS=folds,
        WIDTH=width,
        ALONE=splits == 1,
        VERIFIED=window.verified,
        MASKS=window.masks,
        PAGE=page,
        QUERIES=queries,
        KEYS=BLOCK_N,
        COLUMNS=columns,
        STORES=not chained,
        SLIDING=sliding or 0,
        CAP=softcap or 0.0,
        SINKS=sinks is not None,
        PRECISE=query.dtype == torch.float32,
    )
    if splits > 1:
        together = max(1, COMBINED // (splits * size_up))
        grid = (sequences, shared, triton.cdiv(folds * width, together))
        _combine[grid](*parts, rows, out, **sizes, FOLDS=folds, WIDTH=width, SPLITS=splits, QUERIES=together)
    return out
