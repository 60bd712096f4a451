"""Reading tokens off logits as Triton kernels: `mars.method.acceptance.LogitsChoices` with every option a value.

A program reads one row of logits, in blocks, as many times as its sequence's options need: once for greedy decoding,
some forty times for top-k or top-p, which are found by bisection instead of sorting. For masks with a Markov head, of
greedy sequences without further options, it reads what `mars.engine.kernels.markov` has left of each part instead.
Options that a sequence does not use cost a branch, so one captured graph serves all combinations of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mars.engine.device_state import DeviceState
from mars.engine.kernels import markov, products  # noqa: F401, they define operators
from mars.engine.step import BIASED, FLOATS, GRAMMAR, INTEGERS, LOGPROBS, StepInputs
from mars.method.acceptance import MEASURES, TOP_LOGPROBS, Predictions
from mars.method.markov import MarkovHead

READ = (  # what the kernel reads of a step's inputs
    *("measure", "options", "top_k", "seed", "min_position", "tolerance", "trust", "temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
BLOCK, WARPS = 8192, 16  # logits that a program reads at a time, and the warps that share them
GOLDEN: tl.constexpr = tl.constexpr(-0x61C8864680B583EB)  # 0x9E3779B97F4A7C15 and the next two as signed numbers
FIRST: tl.constexpr = tl.constexpr(-0x40A7B892E31B1A47)
SECOND: tl.constexpr = tl.constexpr(-0x6B2FB644ECCEEE15)
LOWEST: tl.constexpr = tl.constexpr(-(2**31))
_BIASED: tl.constexpr = tl.constexpr(BIASED)
_GRAMMAR: tl.constexpr = tl.constexpr(GRAMMAR)
_LOGPROBS: tl.constexpr = tl.constexpr(LOGPROBS)
_PART: tl.constexpr = tl.constexpr(markov.PART)
ENTROPY: tl.constexpr = tl.constexpr(MEASURES.index("entropy"))
MARGIN: tl.constexpr = tl.constexpr(MEASURES.index("margin"))


@triton.jit
def _scramble(state):
    """The finaliser of SplitMix64, as `mars.method.sampling` has it."""
    state = state + GOLDEN
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * FIRST
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * SECOND
    return state ^ ((state >> 31) & 0x1FFFFFFFF)


@triton.jit
def _noise(state, tokens):
    """Gumbel noise of these tokens."""
    bits = (_scramble(state + tokens.to(tl.int64) * GOLDEN) >> 41) & 0x7FFFFF
    return -tl.log(-tl.log((bits.to(tl.float32) + 0.5) / 8388608.0))


@triton.jit
def _key(x):
    """Integers in the order of these floats."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float(key):
    """The float of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _adjusted(source, tokens, VOCABULARY: tl.constexpr):
    """Logits of a block of tokens after bias, penalties, bans and grammar."""
    row, bias, seen, counts, allowed, ends, drafts, before, repetition, presence, frequency, options, banned, early = (
        source
    )
    inside = tokens < VOCABULARY
    x = tl.load(row + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    if options & _BIASED:
        x += tl.load(bias + tokens, mask=inside, other=0.0)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        count = tl.load(counts + tokens, mask=inside, other=0.0)
        known = tl.load(seen + tokens, mask=inside, other=0) != 0
        for index in range(before):
            is_draft = tokens == tl.load(drafts + index)
            count += is_draft.to(tl.float32)
            known = known | is_draft
        penalised = tl.where(x > 0, x / repetition, x * repetition)
        x = tl.where(known, penalised, x) - frequency * count - tl.where(count > 0, presence, 0.0)
    if early:
        x = tl.where(tl.load(ends + tokens, mask=inside, other=0) != 0, float("-inf"), x)
    if options & _GRAMMAR:
        words = tl.load(allowed + tokens // 32, mask=inside, other=0)
        x = tl.where((words >> (tokens % 32)) & 1 != 0, x, float("-inf"))
    return tl.where(tokens == banned, float("-inf"), x)


@triton.jit
def _above(source, scale, top, limit, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens have a score above the limit, and their mass, the top token's being 1."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        score = _adjusted(source, tokens, VOCABULARY) / scale
        is_above = (_key(score) > limit) & (tokens < VOCABULARY)
        count += is_above.to(tl.int32)
        mass += tl.where(is_above, tl.exp(score - top), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _truncation(source, scale, top, top_k, top_p, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """The score that top-k and top-p cut at, as a key: tokens above it stay, and the first so many of those at it."""
    limit = tl.full([], LOWEST, tl.int64)
    ties = tl.full([], VOCABULARY, tl.int64)
    if top_k < VOCABULARY:
        high = _key(top).to(tl.int64) + 1
        while high - limit > 1:  # at least ``top_k`` tokens are not below the limit, fewer are not below ``high``
            middle = (limit + high) >> 1
            count, _ = _above(source, scale, top, middle - 1, VOCABULARY, BLOCK)
            limit = tl.where(count >= top_k, middle, limit)
            high = tl.where(count >= top_k, high, middle)
    if top_p < 1.0:
        count, total = _above(source, scale, top, limit, VOCABULARY, BLOCK)
        if top_k < VOCABULARY:
            ties = top_k - count
            total += ties.to(tl.float32) * tl.exp(_float(limit.to(tl.int32)) - top)
        wanted = (top_p * total).to(tl.float32)
        low, high = limit - 1, _key(top).to(tl.int64)
        while high - low > 1:  # the mass above ``high`` is less than what is wanted, that above ``low`` is not
            middle = (low + high) >> 1
            _, mass = _above(source, scale, top, middle, VOCABULARY, BLOCK)
            high = tl.where(mass < wanted, middle, high)
            low = tl.where(mass < wanted, low, middle)
        _, mass = _above(source, scale, top, high, VOCABULARY, BLOCK)
        share = tl.maximum(tl.exp(_float(high.to(tl.int32)) - top), 1e-38)
        fit = tl.minimum(tl.ceil((wanted - mass) / share), VOCABULARY).to(tl.int64)
        ties = tl.where(high == limit, tl.minimum(ties, fit), fit)
        limit = high
    elif top_k < VOCABULARY:
        count, _ = _above(source, scale, top, limit, VOCABULARY, BLOCK)
        ties = top_k - count
    return limit, ties


@triton.jit
def _confidence(source, top, top_token, measure, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """How sure a mask is of its token, by the measure of its sequence's dial."""
    mass = tl.zeros([BLOCK], tl.float32)
    spread = tl.zeros([BLOCK], tl.float32)
    second = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = _adjusted(source, tokens, VOCABULARY)
        share = tl.exp(x - top)
        mass += share
        spread += tl.where(share > 0, share * (x - top), 0.0)
        second = tl.maximum(second, tl.where(tokens == top_token, float("-inf"), x))
    total = tl.sum(mass, 0)
    result = 1.0 / total
    if measure == ENTROPY:
        result = tl.exp(tl.sum(spread, 0) / total - tl.log(total))
    if measure == MARGIN:
        result = (1.0 - tl.exp(tl.max(second, 0) - top)) / total
    return result


@triton.jit
def _noisy(
    source, tokens, scale, samples, state, top_token, top_score, cuts, limit, ties, tied, min_p,
    VOCABULARY: tl.constexpr,
):  # fmt: skip
    """A block of adjusted logits, which of them may be sampled, their scores with noise, and `tied` up to its end.

    ``tied`` counts those at the limit, as far as they were met.
    """
    x = _adjusted(source, tokens, VOCABULARY)
    score = x / scale
    stays = tokens < VOCABULARY
    noisy = score
    if cuts:
        key = _key(score)
        at_limit = ((key == limit) & stays).to(tl.int32)
        rank = tied + tl.cumsum(at_limit, 0) - at_limit
        tied += tl.sum(at_limit, 0)
        stays = stays & ((key > limit) | ((at_limit != 0) & (rank < ties)))
    if samples:
        share = tl.exp(score - top_score)
        whole = tl.where(cuts | (min_p > 0), 0, 1)  # nothing is cut: tokens without mass stay, too
        stays = stays & (share >= min_p) & ((share > 0) | (whole != 0))
        stays = stays | (tokens == top_token)
        noisy = tl.where(stays, score + _noise(state, tokens), float("-inf"))
    return x, stays, noisy, tied


@triton.jit
def _likeliest(
    row, peaks, masses, tokens_out, shares_out,
    RANKS: tl.constexpr, SHARES: tl.constexpr, VOCABULARY: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    ALL: tl.constexpr,
):  # fmt: skip
    """The tokens with the highest logits of a row, by what is known of its ``PARTS``; of equal ones the first."""
    part = tl.arange(0, ALL)
    highest = tl.load(peaks + part, mask=part < PARTS, other=float("-inf"))
    log_total = tl.zeros([], tl.float32)
    if SHARES:
        peak = tl.max(highest, 0)
        mass = tl.load(masses + part, mask=part < PARTS, other=0.0)
        log_total = peak + tl.log(tl.sum(mass * tl.exp(highest - peak), 0))
    last = tl.full([], float("inf"), tl.float32)
    last_token = tl.full([], -1, tl.int32)
    for rank in range(RANKS):
        top = tl.max(highest, 0)
        place = tl.min(tl.where(highest == top, part, ALL - 1), 0)
        tokens = place * PART + tl.arange(0, PART)
        x = tl.load(row + tokens, mask=tokens < VOCABULARY, other=float("-inf")).to(tl.float32)
        behind = (tokens < VOCABULARY) & ((x < last) | ((x == last) & (tokens > last_token)))
        token = tl.min(tl.where(behind & (x == top), tokens, VOCABULARY), 0)
        tl.store(tokens_out + rank, tl.where(token < VOCABULARY, token, 0).to(tl.int64))
        if SHARES:
            tl.store(shares_out + rank, top - log_total)
        left = behind & ((x < top) | (tokens > token))
        highest = tl.where(part == place, tl.max(tl.where(left, x, float("-inf")), 0), highest)
        last = top
        last_token = token


@triton.jit(do_not_specialize=["banned", "columns"])
def _choose(
    logits, peaks, masses, rows, at, drafts, accepted, slots, integers, floats, bias, seen, counts, grammar, ends,
    tokens_out, passes_out, shares_out, banned, columns,
    COUNT: tl.constexpr, MOST_DRAFTS: tl.constexpr, VERIFIES: tl.constexpr, POSITIONS: tl.constexpr,
    RANKS: tl.constexpr, SHARES: tl.constexpr, PARTS: tl.constexpr, ALL: tl.constexpr,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
    MEASURE: tl.constexpr, OPTIONS: tl.constexpr, TOP_K: tl.constexpr, SEED: tl.constexpr, MIN_POSITION: tl.constexpr,
    TOLERANCE: tl.constexpr, TRUST: tl.constexpr, TEMPERATURE: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
    REPETITION: tl.constexpr, PRESENCE: tl.constexpr, FREQUENCY: tl.constexpr,
):  # fmt: skip
    """The token of one row of logits, and whether its draft is tolerated (verified rows) or it is confident (masks).

    Besides the token, the next likeliest, ``RANKS`` in all, and if ``SHARES``, the logarithms of what they have of all
    tokens together.
    ``integers`` and ``floats`` are the matrices of `mars.engine.step.StepInputs` with ``columns`` columns; the
    constants from ``MEASURE`` on are their rows. ``peaks`` and ``masses`` are known of ``PARTS`` parts of each row,
    none if that is 0.
    """
    sequence, index = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + sequence)
    place = sequence * COUNT + index
    integers += sequence
    floats += sequence
    options = tl.load(integers + OPTIONS * columns)
    position = tl.load(at + place)
    drafts += sequence * MOST_DRAFTS
    words = (VOCABULARY + 31) // 32
    allowed = grammar + slot * (POSITIONS * words)
    before = index
    if VERIFIES:
        allowed += index * words
    else:
        before = tl.load(accepted + sequence).to(tl.int32)
        options = options & (_BIASED | _LOGPROBS)
    temperature = tl.load(floats + TEMPERATURE * columns)
    trust = tl.load(floats + TRUST * columns).to(tl.float32)
    repetition = tl.load(floats + REPETITION * columns).to(tl.float32)
    presence = tl.load(floats + PRESENCE * columns).to(tl.float32)
    frequency = tl.load(floats + FREQUENCY * columns).to(tl.float32)
    is_early = position < tl.load(integers + MIN_POSITION * columns)
    row = tl.load(rows + place)
    if PARTS > 0:
        is_plain = (temperature <= 0) & (trust == float("inf")) & (banned < 0) & (is_early == 0)
        is_plain = is_plain & ((options & _BIASED) == 0) & (repetition == 1.0) & (presence == 0.0) & (frequency == 0.0)
        if is_plain:
            known = peaks + row * PARTS, masses + row * PARTS
            found = tokens_out + place * RANKS, shares_out + place * RANKS
            _likeliest(logits + row * VOCABULARY, *known, *found, RANKS, SHARES, VOCABULARY, _PART, PARTS, ALL)
            tl.store(passes_out + place, ~is_plain)
            return
    source = (
        logits + row * VOCABULARY,
        bias + slot * VOCABULARY,
        seen + slot * VOCABULARY,
        counts + slot * VOCABULARY,
        allowed,
        ends,
        drafts,
        before,
        repetition,
        presence,
        frequency,
        options,
        banned,
        is_early,
    )

    best = tl.full([BLOCK], float("-inf"), tl.float32)
    first = tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCABULARY, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = _adjusted(source, tokens, VOCABULARY)
        first = tl.where(x > best, tokens, first)
        best = tl.maximum(best, x)
    top = tl.max(best, 0)
    top_token = tl.min(tl.where(best == top, first, VOCABULARY), 0)
    top_token = tl.where(top_token < VOCABULARY, top_token, 0)  # if all are NaN
    token = top_token

    samples = temperature > 0
    scale = tl.where(samples, temperature, 1.0).to(tl.float32)
    top_score = top / scale
    top_k = tl.load(integers + TOP_K * columns)
    top_p = tl.load(floats + TOP_P * columns)
    min_p = tl.load(floats + MIN_P * columns).to(tl.float32)
    cuts = samples & ((top_k < VOCABULARY) | (top_p < 1.0))
    limit = tl.full([], LOWEST, tl.int64)
    ties = tl.full([], VOCABULARY, tl.int64)
    if cuts:
        limit, ties = _truncation(source, scale, top_score, top_k, top_p, VOCABULARY, BLOCK)

    draft = tl.full([], -1, tl.int64)
    draft_x = tl.full([], float("-inf"), tl.float32)
    tolerance = tl.load(floats + TOLERANCE * columns).to(tl.float32)
    if VERIFIES & (index < MOST_DRAFTS) & (tolerance < 1.0):
        draft = tl.load(drafts + index)
    peak = top
    state = _scramble(tl.load(integers + SEED * columns) + _scramble(position))
    if samples | (draft >= 0):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        first = tl.zeros([BLOCK], tl.int32)
        tied = tl.zeros([], tl.int64)
        for start in range(0, VOCABULARY, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            x, stays, noisy, tied = _noisy(
                source, tokens, scale, samples, state, top_token, top_score, cuts, limit, ties, tied, min_p, VOCABULARY
            )
            if samples:
                first = tl.where(noisy > best, tokens, first)
                best = tl.maximum(best, noisy)
            draft_x = tl.maximum(draft_x, tl.max(tl.where((tokens == draft) & stays, x, float("-inf")), 0))
        if samples:
            peak = tl.max(best, 0)
            token = tl.min(tl.where(best == peak, first, VOCABULARY), 0)
            token = tl.where(token < VOCABULARY, token, top_token)
    passes = (draft_x > float("-inf")) & (tl.exp(draft_x - top) >= tolerance)
    if (not VERIFIES) & (trust < float("inf")):
        measure = tl.load(integers + MEASURE * columns)
        passes = _confidence(source, top, top_token, measure, VOCABULARY, BLOCK) >= trust
    tokens_out += place * RANKS
    tl.store(tokens_out, token.to(tl.int64))
    tl.store(passes_out + place, passes)
    if SHARES:
        mass = tl.zeros([BLOCK], tl.float32)
        tied = tl.zeros([], tl.int64)
        for start in range(0, VOCABULARY, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            _, _, noisy, tied = _noisy(
                source, tokens, scale, samples, state, top_token, top_score, cuts, limit, ties, tied, min_p, VOCABULARY
            )
            mass += tl.exp(noisy - peak)
        log_total = peak + tl.log(tl.sum(mass, 0))
        shares_out += place * RANKS
        tl.store(shares_out, peak - log_total)
        last = peak
        last_token = token
        for rank in range(1, RANKS):  # the highest of those behind the last one found, in order of score, then token
            best = tl.full([BLOCK], float("-inf"), tl.float32)
            first = tl.full([BLOCK], VOCABULARY, tl.int32)
            tied = tl.zeros([], tl.int64)
            for start in range(0, VOCABULARY, BLOCK):
                tokens = start + tl.arange(0, BLOCK)
                _, _, noisy, tied = _noisy(
                    *(source, tokens, scale, samples, state, top_token, top_score, cuts, limit, ties, tied, min_p),
                    VOCABULARY,
                )
                behind = (noisy < last) | ((noisy == last) & (tokens > last_token))
                better = behind & (tokens < VOCABULARY) & ((noisy > best) | (first == VOCABULARY))
                first = tl.where(better, tokens, first)
                best = tl.where(better, noisy, best)
            last = tl.max(best, 0)
            last_token = tl.min(tl.where(best == last, first, VOCABULARY), 0)
            tl.store(tokens_out + rank, tl.where(last_token < VOCABULARY, last_token, 0).to(tl.int64))
            tl.store(shares_out + rank, last - log_total)


@triton.jit(do_not_specialize=["banned", "columns"])
def _logprobs(
    logits, rows, chosen, integers, values_out, ids_out, banned, columns,
    COUNT: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """The model's log-probabilities of the token chosen in one row, and of the ``TOP`` likeliest."""
    sequence, index = tl.program_id(0), tl.program_id(1)
    if tl.load(integers + OPTIONS * columns + sequence) & _LOGPROBS:
        place = sequence * COUNT + index
        row = logits + tl.load(rows + place) * VOCABULARY
        token = tl.load(chosen + place)
        tokens = tl.arange(0, BLOCK)
        most = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, VOCABULARY, BLOCK):
            now = start + tokens
            x = tl.load(row + now, mask=(now < VOCABULARY) & (now != banned), other=float("-inf")).to(tl.float32)
            most = tl.maximum(most, x)
        peak = tl.max(most, 0)
        mass = tl.zeros([BLOCK], tl.float32)
        for start in range(0, VOCABULARY, BLOCK):
            now = start + tokens
            x = tl.load(row + now, mask=(now < VOCABULARY) & (now != banned), other=float("-inf")).to(tl.float32)
            mass += tl.exp(x - peak)
        log_total = peak + tl.log(tl.sum(mass, 0))
        values_out += place * (TOP + 1)
        ids_out += place * TOP
        written = tl.load(row + token).to(tl.float32)
        tl.store(values_out, tl.where(token == banned, float("-inf"), written) - log_total)
        last = tl.full([], float("inf"), tl.float32)
        last_token = tl.full([], -1, tl.int32)
        for rank in range(TOP):  # the highest of those behind the last one found, in order of logit, then token
            best = tl.full([BLOCK], float("-inf"), tl.float32)
            first = tl.full([BLOCK], VOCABULARY, tl.int32)
            for start in range(0, VOCABULARY, BLOCK):
                now = start + tokens
                inside = now < VOCABULARY
                x = tl.load(row + now, mask=inside & (now != banned), other=float("-inf")).to(tl.float32)
                behind = inside & ((x < last) | ((x == last) & (now > last_token)))
                better = behind & ((x > best) | (first == VOCABULARY))
                first = tl.where(better, now, first)
                best = tl.where(better, x, best)
            last = tl.max(best, 0)
            last_token = tl.min(tl.where(best == last, first, VOCABULARY), 0)
            tl.store(values_out + 1 + rank, last - log_total)
            tl.store(ids_out + rank, last_token.to(tl.int64))


def rows_read() -> dict[str, int]:
    """The rows of a step's inputs that the kernel reads, by the names it has for them."""
    rows = {name: INTEGERS.index(name) if name in INTEGERS else FLOATS.index(name) for name in READ}
    return {name.removesuffix("_penalty").upper(): row for name, row in rows.items()}


@dataclass(frozen=True, slots=True)
class KernelChoices:
    """`mars.method.acceptance.Choices` by the kernels."""

    logits: Tensor  # (tokens, vocabulary), contiguous
    drafts: Tensor  # (sequences, most drafts)
    inputs: StepInputs
    state: DeviceState
    ends: Tensor  # (vocabulary,): is it an end token?
    banned: int  # a token that is never sampled, or -1
    head: MarkovHead | None = None
    wants_shares: bool = False

    def verify(self, rows: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        tokens, _, tolerated = self._choose(self.logits, rows, at)
        return tokens[:, :, 0], tolerated[:, :-1]

    @property
    def has_head(self) -> bool:
        return self.head is not None

    def predict(
        self, rows: Tensor, at: Tensor, accepted: Tensor, before: Tensor | None = None, ranks: int = 1
    ) -> Predictions:
        if self.head is None or before is None:
            return self._choose(self.logits, rows, at, accepted, ranks)
        given = (each.flatten().contiguous() for each in (rows, before))
        logits, *known = torch.ops.mars.add_head(self.logits, *given, self.head.before, self.head.after)
        rows = torch.arange(len(logits), device=rows.device).view_as(rows)
        return self._choose(logits, rows, at, accepted, ranks, known)

    def logprobs(self, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What `mars.method.acceptance.logprobs` finds, for sequences that want it; others keep what was there."""
        top = min(TOP_LOGPROBS, self.logits.shape[1])
        values = torch.empty(*rows.shape, top + 1, device=rows.device)
        ids = torch.empty(*rows.shape, top, dtype=torch.long, device=rows.device)
        given = (self.logits, rows.contiguous(), tokens.contiguous(), self.inputs.integers, values, ids, self.banned)
        constants: dict[str, Any] = {"COUNT": rows.shape[1], "TOP": top, **self._sizes()}
        _logprobs[tuple(rows.shape)](*given, len(self.inputs), **constants, OPTIONS=INTEGERS.index("options"))
        return values, ids

    def _choose(
        self,
        logits: Tensor,
        rows: Tensor,
        at: Tensor,
        accepted: Tensor | None = None,
        ranks: int = 1,
        known: Sequence[Tensor] = (),
    ) -> Predictions:
        """``known``: of the parts of each row, their highest logit and their mass."""
        tokens = torch.empty(*at.shape, ranks, dtype=torch.long, device=at.device)
        log_shares = torch.empty(tokens.shape, device=at.device)
        passes = torch.empty_like(at, dtype=torch.bool)
        if not rows.numel():
            return Predictions(tokens, log_shares, passes)
        has_shares = accepted is not None and (ranks > 1 or self.wants_shares)
        inputs, state = self.inputs, self.state
        told = (inputs.slots.contiguous(), inputs.integers, inputs.floats)
        held = (state.bias, state.seen, state.counts, state.grammar, self.ends)
        where = (rows.contiguous(), at.contiguous(), self.drafts.contiguous(), rows if accepted is None else accepted)
        parts = known[0].shape[1] if known else 0
        _choose[tuple(rows.shape)](
            *(logits, *(known or (logits, logits)), *where, *told, *held, tokens, passes, log_shares, self.banned),
            len(inputs),
            PARTS=parts,
            ALL=triton.next_power_of_2(max(1, parts)),
            COUNT=rows.shape[1],
            MOST_DRAFTS=self.drafts.shape[1],
            VERIFIES=accepted is None,
            RANKS=ranks,
            SHARES=has_shares,
            POSITIONS=state.grammar.shape[1],
            **rows_read(),
            **self._sizes(),
        )
        return Predictions(tokens, log_shares, passes)

    def _sizes(self) -> dict[str, int]:
        vocabulary = self.logits.shape[1]
        block = min(BLOCK, max(128, triton.next_power_of_2(vocabulary)))
        return {"VOCABULARY": vocabulary, "BLOCK": block, "num_warps": WARPS}
