"""A step of greedy sequences as one Triton kernel: the same as `step.step` with greedy sampling."""

import torch
import triton
import triton.language as tl

from mars.integrations.vllm.step import ONE_TOKEN, THRESHOLD, GreedyChoices, StepInputs, StepOutputs


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
    """One program per sequence. ``kinds``, ``prefilling``, ``tolerated`` and ``confident`` may be None."""
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
    if confident is not None:
        enough = tl.load(confident + start + before + 1 + column, mask=column < drafts, other=0) != 0
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
    predicted = tl.load(argmax + start + before + 1 + column, mask=column < drafts, other=0)
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
