"""What a Llama-like layer does between its products, as Triton kernels: a program takes one token.

They read what `mars.engine.kernels.products.product` leaves, be it in parts or whole. What they compute of a token does
not depend on the other tokens: sums have one order, and multiplications are not fused with additions, which a compiler
may do in one variant of a kernel and not in another.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mars.engine.kernels.products import add_parts

UNFUSED = {"enable_fp_fusion": False}
"""Option of every launch whose bits must be those of another variant"""


@triton.jit
def _output(values, bias, at, column, mask, PARTS: tl.constexpr, part_size, BIAS: tl.constexpr, dtype: tl.constexpr):
    """Outputs of a product as the layer gives them: rounded, then in float32 again."""
    total = add_parts(values + at, mask, PARTS, part_size)
    if BIAS:
        total += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    return total.to(dtype).to(tl.float32)


@triton.jit
def _rms_norm(x, weight, epsilon, count, dtype: tl.constexpr):
    """``x`` (…, count) in float32."""
    mean = tl.sum(x * x, 0) / count
    return weight * (x * tl.rsqrt(mean + epsilon)).to(dtype)


@triton.jit
def _embed(
    tokens, embedding, mask_row, norm, hidden, normed, mask_token, epsilon,
    SIZE: tl.constexpr, SIZE_UP: tl.constexpr,
):  # fmt: skip
    """The embedding of a token or of the mask, and its norm."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    column = tl.arange(0, SIZE_UP)
    inside = column < SIZE
    source = embedding + tl.where(token == mask_token, 0, token) * SIZE
    x = tl.load(source + column, mask=inside, other=0.0)
    x = tl.where(token == mask_token, tl.load(mask_row + column, mask=inside, other=0.0), x)
    tl.store(hidden + row * SIZE + column, x, mask=inside)
    weight = tl.load(norm + column, mask=inside, other=0.0)
    y = _rms_norm(x.to(tl.float32), weight, epsilon, SIZE, normed.dtype.element_ty)
    tl.store(normed + row * SIZE + column, y, mask=inside)


@triton.jit
def _add_and_norm(
    hidden, values, bias, norm, normed, stride, part_size, epsilon,
    SIZE: tl.constexpr, SIZE_UP: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_UP)
    inside = column < SIZE
    dtype: tl.constexpr = normed.dtype.element_ty
    x = tl.load(hidden + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    x += _output(values, bias, row * stride + column, column, inside, PARTS, part_size, BIAS, dtype)
    x = x.to(dtype)
    tl.store(hidden + row * SIZE + column, x, mask=inside)
    weight = tl.load(norm + column, mask=inside, other=0.0)
    tl.store(normed + row * SIZE + column, _rms_norm(x.to(tl.float32), weight, epsilon, SIZE, dtype), mask=inside)


@triton.jit
def _activate(
    values, bias, out, stride, part_size,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """silu(gate) · up, of which ``values`` has both, one behind the other."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    dtype: tl.constexpr = out.dtype.element_ty
    at = row * stride + column
    gate = _output(values, bias, at, column, inside, PARTS, part_size, BIAS, dtype)
    up = _output(values, bias, at + SIZE, column + SIZE, inside, PARTS, part_size, BIAS, dtype)
    active = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(out + row * SIZE + column, (active * up).to(dtype), mask=inside)


@triton.jit
def _head_norm(x, query_norm, key_norm, is_query, inside, dtype: tl.constexpr):
    """Weights of queries' and keys' norms times what they belong to."""
    query_weight = tl.load(query_norm, mask=inside & is_query, other=0.0)
    key_weight = tl.load(key_norm, mask=inside & ~is_query, other=0.0)
    return ((query_weight + key_weight) * x.to(dtype)).to(tl.float32)


@triton.jit
def _rotate_and_store(
    values, bias, query_norm, key_norm, cosine, sine, query, keys, values_out,
    items, positions, cursors, lengths, slots, table, stride, part_size, table_slot, last_position, epsilon,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, SHARED: tl.constexpr, ALL_UP: tl.constexpr, SIZE: tl.constexpr,
    HALF_UP: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Turn queries and keys by their position; queries go to ``query``, keys and values into the sequence's pages."""
    row = tl.program_id(0).to(tl.int64)
    item = tl.load(items + row)
    if item < 0:
        return
    sequence, column = item // WIDTH, item % WIDTH
    head = tl.arange(0, ALL_UP)[:, None]
    dim = tl.arange(0, HALF_UP)[None, :]
    half: tl.constexpr = SIZE // 2
    inside = (head < HEADS + 2 * SHARED) & (dim < half)
    dtype: tl.constexpr = query.dtype.element_ty
    at = row * stride + head * SIZE + dim
    low = _output(values, bias, at, head * SIZE + dim, inside, PARTS, part_size, BIAS, dtype)
    high = _output(values, bias, at + half, head * SIZE + dim + half, inside, PARTS, part_size, BIAS, dtype)
    turns = head < HEADS + SHARED
    if NORMS:
        scale = tl.rsqrt((tl.sum(low * low + high * high, 1) / SIZE)[:, None] + epsilon)
        is_query = head < HEADS
        low = tl.where(turns, _head_norm(low * scale, query_norm + dim, key_norm + dim, is_query, inside, dtype), low)
        past = dim + half
        high = tl.where(
            turns, _head_norm(high * scale, query_norm + past, key_norm + past, is_query, inside, dtype), high
        )

    cursor = tl.load(cursors + sequence)
    position = tl.minimum(cursor + tl.load(positions + item), last_position)
    angle = position * SIZE + dim
    cos = tl.load(cosine + angle, mask=dim < half, other=0.0).to(tl.float32)
    sin = tl.load(sine + angle, mask=dim < half, other=0.0).to(tl.float32)
    turned_low = tl.where(turns, low * cos - high * sin, low).to(dtype)
    turned_high = tl.where(turns, high * cos + low * sin, high).to(dtype)

    out = query + (row * HEADS + head) * SIZE + dim
    is_query = inside & (head < HEADS)
    tl.store(out, turned_low, mask=is_query)
    tl.store(out + half, turned_high, mask=is_query)
    kept = column < tl.load(lengths + sequence)
    page = tl.load(table + tl.load(slots + sequence) * table_slot + (cursor + column) // PAGE, mask=kept, other=0)
    key_head = head - HEADS
    where = ((page * SHARED + key_head % SHARED) * PAGE + (cursor + column) % PAGE) * SIZE + dim
    stored = tl.where(kept, HEADS + 2 * SHARED, 0)  # nothing of padding
    is_key = inside & (head < stored) & (key_head >= 0) & (key_head < SHARED)
    tl.store(keys + where, turned_low, mask=is_key)
    tl.store(keys + where + half, turned_high, mask=is_key)
    is_value = inside & (head < stored) & (key_head >= SHARED)
    tl.store(values_out + where, turned_low, mask=is_value)
    tl.store(values_out + where + half, turned_high, mask=is_value)


def embed(
    tokens: Tensor, embedding: Tensor, mask_token: int, mask_row: Tensor, norm: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Embeddings of tokens (tokens,) and their norms. ``mask_token``: -1 if there is no row of its own for it."""
    size = embedding.shape[1]
    hidden, normed = (embedding.new_empty(len(tokens), size) for _ in range(2))
    given = (tokens, embedding, mask_row, norm, hidden, normed, mask_token, epsilon)
    _embed[(len(tokens),)](*given, **_row(size), **UNFUSED)
    return hidden, normed


def add_and_norm(hidden: Tensor, values: Tensor, bias: Tensor | None, norm: Tensor, epsilon: float) -> Tensor:
    """Add a product to ``hidden``, in place, and return the norm of that."""
    normed = torch.empty_like(hidden)
    parts, options = _parts(values, bias)
    given = (hidden, values, hidden if bias is None else bias, norm, normed, *parts, epsilon)
    _add_and_norm[(len(hidden),)](*given, **_row(hidden.shape[1]), **options, **UNFUSED)
    return normed


def activate(values: Tensor, bias: Tensor | None, size: int, dtype: torch.dtype) -> Tensor:
    """(tokens, size) from gate and up."""
    out = torch.empty(values.shape[-2], size, dtype=dtype, device=values.device)
    parts, options = _parts(values, bias)
    block = min(1024, triton.next_power_of_2(size))
    grid = (len(out), triton.cdiv(size, block))
    _activate[grid](values, out if bias is None else bias, out, *parts, SIZE=size, BLOCK=block, **options, **UNFUSED)
    return out


def rotate_and_store(
    values: Tensor,
    bias: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    rotary: tuple[Tensor, Tensor],
    pages: tuple[Tensor, Tensor],
    *,
    heads: int,
    items: Tensor,
    positions: Tensor,
    cursors: Tensor,
    lengths: Tensor,
    slots: Tensor,
    page_table: Tensor,
    epsilon: float,
) -> Tensor:
    """Queries (tokens, heads, size) of windows, ``positions`` (sequences, width) of their tokens behind the cursors.

    ``items`` (tokens,) says which of these each one is, counted through all windows; -1: none.
    ``rotary``: cosines and sines (context, size). ``norms``: of queries and keys, if the model has them.
    """
    keys = pages[0]
    shared, page, size = keys.shape[1:]
    query = keys.new_empty(values.shape[-2], heads, size)
    parts, options = _parts(values, bias)
    spare = query  # a pointer that is not read
    sizes: dict[str, Any] = {"HEADS": heads, "SHARED": shared, "SIZE": size, "PAGE": page}
    sizes |= {"ALL_UP": triton.next_power_of_2(heads + 2 * shared), "HALF_UP": triton.next_power_of_2(size // 2)}
    _rotate_and_store[(len(query),)](
        *(values, spare if bias is None else bias, *(norms or (spare, spare)), *rotary, query, *pages),
        *(items, positions, cursors, lengths, slots, page_table),
        *(*parts, page_table.stride(0), len(rotary[0]) - 1, epsilon),
        WIDTH=positions.shape[1],
        NORMS=norms is not None,
        **sizes,
        **options,
        **UNFUSED,
    )
    return query


def _parts(values: Tensor, bias: Tensor | None) -> tuple[tuple[int, int], dict[str, Any]]:
    """How the kernels find the outputs of a product. Where it has no parts, it has added its bias itself."""
    is_parted = values.ndim == 3
    stride = values.stride(-2)
    options = {"PARTS": len(values) if is_parted else 1, "BIAS": is_parted and bias is not None}
    return (stride, values.shape[-2] * stride), options


def _row(size: int) -> dict[str, int]:
    """One program for a row: always with the same number of warps, since that decides how it is summed."""
    return {"SIZE": size, "SIZE_UP": triton.next_power_of_2(size), "num_warps": 4 if size <= 2048 else 8}
