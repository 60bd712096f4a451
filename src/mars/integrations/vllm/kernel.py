"""Triton kernels: a step of greedy sequences, the same as `step.step` with greedy sampling; the Markov head's part in
it; and the low-rank changes of a gated adapter.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from mars.integrations.vllm.step import ONE_TOKEN, THRESHOLD, GreedyChoices, StepInputs, StepOutputs
from mars.method.acceptance import DialTensors, confidence
from mars.method.markov import MarkovHead

COLUMNS = 32  # outputs of a layer that a program changes


@triton.jit(do_not_specialize=["mask_token", "masks"])
def _step(
    tokens,
    starts,
    slots,
    kinds,
    prefilling,
    argmax,
    tolerated,
    confident,
    drafted,
    sampled,
    emitted,
    rejected,
    windows,
    counts,
    mask_token,
    masks,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    THRESHOLD: tl.constexpr,
):
    """One program per sequence. ``kinds``, ``prefilling``, ``tolerated``, ``confident`` and ``drafted`` may be None."""
    sequence = tl.program_id(0)
    start = tl.load(starts + sequence)
    length = tl.load(starts + sequence + 1) - start - 1
    column = tl.arange(0, BLOCK)
    inside = column < length
    choice = tl.load(argmax + start + column, mask=column <= length, other=-1).to(tl.int32)
    fed = tl.load(tokens + start + 1 + column, mask=inside, other=0).to(tl.int32)
    before = tl.min(tl.where(inside & (fed == mask_token), column, length), 0)
    padding = tl.min(tl.where(inside & (fed < 0), column, length), 0)
    draft_count = tl.minimum(before, padding)

    agrees = inside & (fed == choice)
    passes = agrees
    if tolerated is not None:
        passes = passes | (tl.load(tolerated + start + column, mask=inside, other=0) != 0)
    accepted = tl.min(tl.where((column >= draft_count) | (passes == 0), column, BLOCK), 0)
    accepted = tl.minimum(accepted, draft_count)
    drafts = tl.where((before < length) & (padding == length), tl.minimum(length - before, masks), 0)
    kind = -1
    if kinds is not None:
        kind = tl.load(kinds + tl.load(slots + sequence))
        accepted = tl.where(kind == THRESHOLD, draft_count, accepted)
        drafts = tl.where(kind == ONE_TOKEN, 0, drafts)
    drafts = tl.where(accepted == before, drafts, 0)
    predictions, mask = argmax, start + before + 1 + column  # where the masks' predictions are
    if drafted is not None:
        predictions, mask = drafted, sequence + column * tl.num_programs(0)
    if confident is not None:
        enough = tl.load(confident + mask, mask=column < drafts, other=0) != 0
        trusted = tl.min(tl.where(enough, BLOCK, column), 0)
        drafts = tl.where(kind == THRESHOLD, tl.minimum(trusted, drafts), drafts)
    written, left = accepted + 1, length - accepted
    if prefilling is not None:
        writes = tl.load(prefilling + sequence) == 0
        written, left, drafts = tl.where(writes, written, 0), tl.where(writes, left, 0), tl.where(writes, drafts, 0)

    text = tl.where(column < accepted, fed, choice)
    text = tl.where(column < written, text, -1)
    tl.store(sampled + sequence * (WIDTH + 1) + column, text.to(tl.int64), mask=column <= WIDTH)
    tl.store(emitted + sequence, written)
    tl.store(rejected + sequence, left)
    predicted = tl.load(predictions + mask, mask=column < drafts, other=0)
    following = tl.where(column < drafts, predicted, mask_token)
    tl.store(windows + sequence * WIDTH + column, following, mask=column < WIDTH)

    emits = written > 0
    agreed = tl.sum((agrees & (column < accepted)).to(tl.int32), 0)
    tl.atomic_add(counts, emits.to(tl.int64))
    tl.atomic_add(counts + 1, written.to(tl.int64))
    tl.atomic_add(counts + 2, tl.where(emits, draft_count, 0).to(tl.int64))
    tl.atomic_add(counts + 3, tl.where(emits, accepted, 0).to(tl.int64))
    tl.atomic_add(counts + 4, tl.where(emits, agreed, 0).to(tl.int64))


def greedy_step(inputs: StepInputs, choices: GreedyChoices) -> StepOutputs:
    """A step in which every sequence is greedy and no draft is banned."""
    sequences, device = len(inputs.slots), inputs.tokens.device
    results = StepOutputs(
        sampled=torch.empty((sequences, inputs.width + 1), dtype=torch.int64, device=device),
        emitted=torch.empty(sequences, dtype=torch.int32, device=device),
        rejected=torch.empty(sequences, dtype=torch.int32, device=device),
        windows=torch.empty((sequences, inputs.width), dtype=torch.int64, device=device),
    )
    fed = (inputs.tokens, inputs.starts, inputs.slots, inputs.kinds, inputs.prefilling)
    constants = {"WIDTH": inputs.width, "BLOCK": max(16, triton.next_power_of_2(inputs.width + 1))}
    constants |= {"ONE_TOKEN": ONE_TOKEN, "THRESHOLD": THRESHOLD, "num_warps": 1}
    _step[(sequences,)](*fed, *choices, *results, inputs.counts, inputs.mask_token, inputs.masks, **constants)
    return results


@triton.jit(do_not_specialize=["mask_token", "sequences", "index"])
def _add_head(
    tokens,
    starts,
    logits,
    stride,
    previous,
    before_weight,
    after_weight,
    output,
    mask_token,
    sequences,
    vocabulary,
    index,
    FIRST: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    SEQUENCES: tl.constexpr,
    WORDS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """The logits of mask ``index`` of every sequence, plus what the head says of the token before that mask.

    ``previous`` are those tokens (sequences,), for the first mask the argmax at all tokens that were fed. Sequences
    without such a mask get anything.
    """
    sequence = tl.program_id(1) * SEQUENCES + tl.arange(0, SEQUENCES)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    exists, known = sequence < sequences, word < vocabulary
    start = tl.load(starts + sequence, mask=exists, other=0).to(tl.int64)
    length = tl.load(starts + sequence + 1, mask=exists, other=1).to(tl.int64) - start - 1
    column = tl.arange(0, BLOCK)[None, :]
    inside = exists[:, None] & (column < length[:, None])
    fed = tl.load(tokens + start[:, None] + 1 + column, mask=inside, other=0).to(tl.int32)
    before = tl.min(tl.where(inside & (fed == mask_token), column, BLOCK), 1)
    before = tl.minimum(before.to(tl.int64), length)
    place = sequence
    if FIRST:
        place = start + before
    token = tl.load(previous + place, mask=exists, other=0).to(tl.int64)
    total = tl.zeros((SEQUENCES, WORDS), dtype=tl.float32)
    for begin in range(0, RANK, RANKS):
        rank = begin + tl.arange(0, RANKS)
        used = rank[None, :] < RANK
        left = tl.load(before_weight + token[:, None] * RANK + rank[None, :], mask=exists[:, None] & used, other=0.0)
        at = word.to(tl.int64)[:, None] * RANK + rank[None, :]
        right = tl.load(after_weight + at, mask=known[:, None] & used, other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    row = start + before + 1 + index
    has_mask = exists & (before + 1 + index <= length)
    some = has_mask[:, None] & known[None, :]
    own = tl.load(logits + row[:, None] * stride + word[None, :], mask=some, other=0.0).to(tl.float32)
    target = output + sequence.to(tl.int64)[:, None] * vocabulary + word[None, :]
    tl.store(target, own + total, mask=exists[:, None] & known[None, :])


def add_head(
    choices: GreedyChoices, inputs: StepInputs, logits: Tensor, head: MarkovHead, dials: DialTensors | None
) -> GreedyChoices:
    """Replace the masks' predictions: one after the other, each of them with the token before it.

    ``dials`` has an entry per sequence; None: all are exact.
    """
    sequences, vocabulary, rank = len(inputs.slots), logits.shape[1], head.after.shape[1]
    measured = dials is not None and bool(dials.features.measures)
    drafted = torch.empty((inputs.masks, sequences), dtype=torch.int64, device=logits.device)
    confident = torch.empty_like(drafted, dtype=torch.bool)
    output = torch.empty((sequences, vocabulary), dtype=torch.float32, device=logits.device)
    sizes = {"BLOCK": max(16, triton.next_power_of_2(inputs.width + 1)), "SEQUENCES": 16, "WORDS": 64}
    sizes |= {"RANK": rank, "RANKS": _rank_block(rank)}
    grid = (triton.cdiv(vocabulary, sizes["WORDS"]), triton.cdiv(sequences, sizes["SEQUENCES"]))
    previous = choices.argmax
    for index in range(inputs.masks):
        fed = (inputs.tokens, inputs.starts, logits, logits.stride(0), previous, head.before, head.after, output)
        _add_head[grid](*fed, inputs.mask_token, sequences, vocabulary, index, FIRST=index == 0, **sizes)
        previous = torch.argmax(output, 1, out=drafted[index])
        if dials is not None and measured:
            confident[index] = confidence(output[:, None], dials)[:, 0] >= dials.trust
    return choices._replace(drafted=drafted, confident=confident.view(torch.uint8) if measured else None)


@triton.jit(do_not_specialize=["rows"])
def _add_change(
    y,
    low,
    b,
    gate,
    tiles,
    rows,
    y_stride,
    low_stride,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Add ``low @ b.T`` to ``y`` at the rows that the gate marks; each part of the columns has its part of ``low``."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    marked = tl.load(gate + row, mask=row < rows, other=0) != 0
    if tl.max(marked.to(tl.int32), 0) > 0:
        tile = tiles + 3 * tl.program_id(0)
        begin, end, part = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        column = begin + tl.arange(0, COLUMNS)
        inside = column < end
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for first in range(0, RANK, RANKS):
            rank = first + tl.arange(0, RANKS)
            used = rank[None, :] < RANK
            from_low = low + row.to(tl.int64)[:, None] * low_stride + part * RANK + rank[None, :]
            left = tl.load(from_low, mask=marked[:, None] & used, other=0.0)
            right = tl.load(b + column[:, None] * RANK + rank[None, :], mask=inside[:, None] & used, other=0.0)
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
        place = y + row.to(tl.int64)[:, None] * y_stride + column[None, :]
        some = marked[:, None] & inside[None, :]
        plain = tl.load(place, mask=some, other=0.0)
        tl.store(place, plain + total.to(plain.dtype), mask=some)


def add_change(y: Tensor, low: Tensor, b: Tensor, gate: Tensor, sizes: list[int]) -> None:
    """``low`` (rows, parts · rank) is a layer's input times ``a``; ``b`` (outputs, rank) has parts of these sizes."""
    rows, rank = len(low), b.shape[1]
    assert y.stride(-1) == low.stride(-1) == 1 and rows <= len(gate)
    tiles = _tiles(tuple(sizes), b.device)
    block = min(64, max(16, triton.next_power_of_2(rows)))
    constants = {"RANK": rank, "ROWS": block, "COLUMNS": COLUMNS, "RANKS": _rank_block(rank)}
    grid = (len(tiles), triton.cdiv(rows, block))
    _add_change[grid](y, low, b, gate.view(torch.uint8), tiles, rows, y.stride(0), low.stride(0), **constants)


def _rank_block(rank: int) -> int:
    return min(64, max(16, triton.next_power_of_2(rank)))


@cache
def _tiles(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """(tiles, 3): first column, end of the columns, and part, for each program. Captured graphs read it: it stays."""
    found, begin = [], 0
    for part, size in enumerate(sizes):
        found += [(column, begin + size, part) for column in range(begin, begin + size, COLUMNS)]
        begin += size
    return torch.tensor(found, dtype=torch.int32, device=device)
