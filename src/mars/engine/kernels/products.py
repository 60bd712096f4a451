"""Products of tokens with weights as Triton kernels, where cuBLAS will not do.

The inputs of a token are summed in an order that does not depend on how many tokens there are. `product` also divides
them into parts for layers with so few outputs that they would keep few multiprocessors busy.

Masks of a gated adapter use other weights than the tokens of the text, and stand behind them: see
`mars.engine.packing`. Two forms of the same product:

`product` with two sets
    A second set of weights has the change added in. A program takes rows of one kind and reads that kind's set.
`expand`
    For large models, whose time is that of reading weights. The base product also yields the low-rank projections, and
    a second kernel adds their expansions to the rows of masks.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from mars.engine.packing import NUM_TEXT


class Tile(NamedTuple):
    """What a program computes, and how."""

    tokens: int
    outputs: int
    warps: int
    stages: int


TILES: tuple[tuple[int, int, Tile], ...] = (
    (16, 1 << 30, Tile(16, 64, 4, 6)),
    (32, 1024, Tile(16, 64, 4, 6)),
    (32, 1 << 30, Tile(32, 64, 4, 6)),
    (64, 1 << 30, Tile(32, 64, 4, 6)),
    (1 << 30, 1024, Tile(32, 64, 4, 6)),
    (1 << 30, 1 << 30, Tile(64, 128, 8, 6)),
)
"""Of `product`, for up to so many tokens of a kind and outputs; ``benchmarks/adapter_speed.py --tune`` finds them."""
EXPANSION = Tile(16, 64, 4, 2)
MOST_TOKENS = 64  # of a program of `expand`
PROGRAMS = 128  # of a product: with fewer, parts are summed by programs of their own
MOST_PARTS = 4
LEAST_INPUTS = 256  # of a part


def tile_for(tokens: int, outputs: int) -> Tile:
    return next(tile for most, widest, tile in TILES if tokens <= most and outputs <= widest)


def inputs_at_once(inputs: int, dtype: torch.dtype) -> int:
    """Inputs that are summed at once, the same for any number of tokens."""
    wide = 64 if dtype.itemsize > 2 or inputs % 128 else 128
    return max(16, min(wide, triton.next_power_of_2(inputs)))


def num_parts(outputs: int, inputs: int) -> int:
    """In how many parts a layer's inputs are summed: the same for any number of tokens, and on any device."""
    parts = min(MOST_PARTS, PROGRAMS // triton.cdiv(outputs, 64), inputs // LEAST_INPUTS)
    return 1 << max(1, parts).bit_length() - 1


def _options(tile: Tile, step: int, x: Tensor) -> dict[str, Any]:
    """Of a launch: as many stages as the device has room for."""
    stage = (tile.tokens + tile.outputs) * step * x.dtype.itemsize
    return {"num_warps": tile.warps, "num_stages": max(2, min(tile.stages, _shared_memory(x.device) // stage))}


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may use for its stages."""
    if device.type != "cuda":
        return 1 << 30
    device_index = torch.cuda.current_device() if device.index is None else device.index
    most: int = triton.runtime.driver.active.utils.get_device_properties(device_index)["max_shared_mem"]
    return most - 4096


@triton.jit
def _sum(weights, x, total, first, last, inputs, INPUTS: tl.constexpr, EVEN: tl.constexpr, PRECISE: tl.constexpr):
    """The sum over some inputs, ``first`` a multiple of ``INPUTS``, in their order."""
    for start in range(first, last, INPUTS):
        index = start + tl.arange(0, INPUTS)
        if EVEN:
            weight = tl.load(weights + index[None, :])
            given = tl.load(x + index[:, None])
        else:
            weight = tl.load(weights + index[None, :], mask=index[None, :] < inputs, other=0.0)
            given = tl.load(x + index[:, None], mask=index[:, None] < inputs, other=0.0)
        total = tl.dot(weight, given, total, input_precision="ieee" if PRECISE else "tf32")
    return total


@triton.jit(do_not_specialize=["num_tokens", "num_text"])
def _product(
    x, weights, bias, out, num_text, num_tokens, outputs, inputs, set_size, part_size,
    SETS: tl.constexpr, KNOWN: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, ALONE: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """A program sums all ``PARTS`` or, if it is not ``ALONE``, one of them, which has ``PART`` inputs.

    Of two sets, the second one is for the rows from ``num_text`` on, which is a pointer if it is not ``KNOWN``.
    """
    begin, end = tl.program_id(0) * TOKENS, num_tokens
    if SETS > 1:
        text = num_text if KNOWN else tl.load(num_text).to(tl.int32)
        text_tiles = tl.cdiv(text, TOKENS)
        is_mask = tl.program_id(0) >= text_tiles
        begin = tl.where(is_mask, text + begin - text_tiles * TOKENS, begin)
        end = tl.where(is_mask, num_tokens, text)
        if begin >= end:
            return
        weights += is_mask.to(tl.int64) * set_size
    row = (begin + tl.arange(0, TOKENS)).to(tl.int64)
    real = row < end
    row = tl.where(real, row, 0)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = column < outputs
    weights += tl.where(there, column, 0).to(tl.int64)[:, None] * inputs
    x += row[None, :] * inputs
    total = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    if ALONE and PARTS > 1:
        for first in range(0, inputs, PART):
            last = tl.minimum(first + PART, inputs)
            part = tl.zeros([OUTPUTS, TOKENS], tl.float32)
            total += _sum(weights, x, part, first, last, inputs, INPUTS, EVEN, PRECISE)
    else:
        first = tl.program_id(2) * PART
        last = tl.minimum(first + PART, inputs)
        total = _sum(weights, x, total, first, last, inputs, INPUTS, EVEN, PRECISE)
    if BIAS:
        total += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[:, None]
    at = tl.program_id(2).to(tl.int64) * part_size + row[None, :] * outputs + column[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there[:, None] & real[None, :])


def product(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    num_text: int | Tensor | None = None,
    parts: int = 1,
    tile: Tile | None = None,
) -> Tensor:
    """(tokens, inputs) to (tokens, outputs) by ``weights`` (outputs, inputs), summed in so many ``parts``.

    With two sets of weights (2, outputs, inputs) the rows from ``num_text`` on use the second one.

    Where there are few tokens, the parts (parts, tokens, outputs) are left in float32: whoever reads them adds them up
    in their order, then the bias, and rounds. That is what is done here otherwise, so the bits are the same.
    """
    x = x.contiguous()
    outputs, inputs = weights.shape[-2:]
    sets = weights.ndim - 1
    kinds = (num_text, len(x) - num_text) if isinstance(num_text, int) else None
    tile = tile or tile_for(max(kinds) if kinds else triton.cdiv(len(x), sets), outputs)
    step = inputs_at_once(inputs, x.dtype)
    most = triton.cdiv(len(x), tile.tokens) + sets - 1  # tiles, wherever masks begin
    tiles = sum(triton.cdiv(each, tile.tokens) for each in kinds) if kinds else most
    grid = (tiles, triton.cdiv(outputs, tile.outputs))
    alone = parts == 1 or grid[0] * grid[1] >= PROGRAMS
    out = x.new_empty(len(x), outputs) if alone else x.new_empty(parts, len(x), outputs, dtype=torch.float32)
    _product[*grid, 1 if alone else parts](
        *(x, weights, x if bias is None else bias, out, x if num_text is None else num_text),
        *(len(x), outputs, inputs, outputs * inputs, len(x) * outputs),
        SETS=sets,
        KNOWN=kinds is not None,
        TOKENS=tile.tokens,
        OUTPUTS=tile.outputs,
        INPUTS=step,
        PARTS=parts,
        PART=triton.cdiv(triton.cdiv(inputs, parts), step) * step,
        ALONE=alone,
        EVEN=inputs % step == 0,
        BIAS=bias is not None and alone,
        PRECISE=x.dtype == torch.float32,
        **_options(tile, step, x),
    )
    return out


@triton.jit
def add_parts(values, mask, PARTS: tl.constexpr, part_size):
    """Outputs of `product` in float32, its parts added up. ``values``: pointers into the first part."""
    total = tl.load(values, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(values + part * part_size, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["num_tokens", "num_text"])
def _expand(
    y, b, num_text, num_tokens, rank, stride, part_size,
    KNOWN: tl.constexpr, PARTS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, RANK: tl.constexpr, EVEN: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Columns of ``y``: outputs of up to three layers, then projections of each. A program has one layer's outputs."""
    begin_row = (num_text if KNOWN else tl.load(num_text).to(tl.int32)) + tl.program_id(0) * TOKENS
    if begin_row >= num_tokens:
        return
    row = (begin_row + tl.arange(0, TOKENS)).to(tl.int64)
    real = row < num_tokens
    row = tl.where(real, row, 0)
    tile = tl.program_id(1)
    first_tiles: tl.constexpr = (FIRST + OUTPUTS - 1) // OUTPUTS
    second_tiles: tl.constexpr = (SECOND + OUTPUTS - 1) // OUTPUTS
    layer = (tile >= first_tiles).to(tl.int32) + (tile >= first_tiles + second_tiles).to(tl.int32)
    begin = tl.where(layer == 0, 0, tl.where(layer == 1, FIRST, FIRST + SECOND))
    end = tl.where(layer == 0, FIRST, tl.where(layer == 1, FIRST + SECOND, FIRST + SECOND + THIRD))
    tile -= tl.where(layer == 0, 0, tl.where(layer == 1, first_tiles, first_tiles + second_tiles))
    column = begin + tile * OUTPUTS + tl.arange(0, OUTPUTS)
    there = column < end
    b += tl.where(there, column, 0).to(tl.int64)[:, None] * rank
    y += row[None, :] * stride
    projections = y + FIRST + SECOND + THIRD + layer * rank
    total = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for start in range(0, rank, RANK):
        index = start + tl.arange(0, RANK)
        if EVEN:
            expansion = tl.load(b + index[None, :])
        else:
            expansion = tl.load(b + index[None, :], mask=index[None, :] < rank, other=0.0)
        given = (index[:, None] < rank) & real[None, :]
        projected = add_parts(projections + index[:, None], given, PARTS, part_size)
        projected = projected.to(b.dtype.element_ty)
        total = tl.dot(expansion, projected, total, input_precision="ieee" if PRECISE else "tf32")
    some = there[:, None] & real[None, :]
    total += tl.load(y + column[:, None], mask=some, other=0.0).to(tl.float32)
    tl.store(y + column[:, None], total.to(y.dtype.element_ty), mask=some)


def expand(y: Tensor, b: Tensor, sizes: list[int], num_text: int | Tensor, tile: Tile | None = None) -> None:
    """Add the changes to the rows from ``num_text`` on, in place.

    ``y`` (tokens, columns), or its parts, has the outputs of layers of ``sizes``, then the projections of each of them;
    ``b`` (outputs, rank).
    """
    first, second, third = [*sizes, 0, 0][:3]
    parts, tokens = (1, *y.shape)[-3:-1]
    known = isinstance(num_text, int)
    masks = tokens - num_text if isinstance(num_text, int) else tokens
    if masks == 0:
        return
    if tile is None:
        wide = masks if known else tokens // 2
        tile = EXPANSION._replace(tokens=max(16, min(MOST_TOKENS, triton.next_power_of_2(wide))))
    rank = b.shape[1]
    step = max(16, min(128, triton.next_power_of_2(rank)))
    grid = (triton.cdiv(masks, tile.tokens), sum(triton.cdiv(each, tile.outputs) for each in sizes))
    _expand[grid](
        *(y, b, num_text, tokens, rank, y.stride(-2), tokens * y.stride(-2)),
        KNOWN=known,
        PARTS=parts,
        FIRST=first,
        SECOND=second,
        THIRD=third,
        TOKENS=tile.tokens,
        OUTPUTS=tile.outputs,
        RANK=step,
        EVEN=rank % step == 0,
        PRECISE=b.dtype == torch.float32,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@torch.library.custom_op("mars::two_sets", mutates_args=())
def two_sets_op(x: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    """`product` with two sets of weights; in float32 by cuBLAS, since Triton multiplies without tensor cores there."""
    rows, num_text = x.flatten(0, -2), NUM_TEXT.get()
    if x.dtype == torch.float32 and isinstance(num_text, int):
        kinds = zip(rows.tensor_split([num_text]), weights, strict=True)
        y = torch.cat([linear(each, weight, bias) for each, weight in kinds])
    else:
        y = product(rows, weights, bias, num_text)
    return y.view(*x.shape[:-1], weights.shape[1])


@two_sets_op.register_fake
def _(x: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG001
    return x.new_empty(*x.shape[:-1], weights.shape[1])


@torch.library.custom_op("mars::low_rank", mutates_args=())
def low_rank_op(x: Tensor, weight: Tensor, b: Tensor, bias: Tensor | None, sizes: list[int]) -> Tensor:
    """The product with ``weight``, which ends in the rows of the projections, and `expand` of it."""
    y = linear(x.flatten(0, -2), weight, bias)
    expand(y, b, sizes, NUM_TEXT.get())
    return y.view(*x.shape[:-1], len(weight))


@low_rank_op.register_fake
def _(x: Tensor, weight: Tensor, b: Tensor, bias: Tensor | None, sizes: list[int]) -> Tensor:  # noqa: ARG001
    return x.new_empty(*x.shape[:-1], weight.shape[0])
