"""From logits to a token: penalties, temperature, truncation, and a draw that needs no generator.

Two things matter for a position. *Beliefs* are what the model says: its logits after penalties and bias. *Scores* are
what a token is drawn by: beliefs after temperature and truncation. A draw adds noise to the scores and takes the best
(the Gumbel trick); greedy is a draw without noise.

The noise is a function of (seed, position, token) alone. So a request draws the same tokens whatever else is in its
batch and however many of them a forward emits; and a guess, drawn for a position with the noise that the AR model will
draw with there, is right as often as the two distributions allow.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mars.errors import MarsError
from mars.method.tensors import send

GOLDEN = 0x9E3779B97F4A7C15
"""The step between two states of SplitMix64"""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request draws its tokens; the default is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    min_position: int = 0
    """Of the text: no end token is drawn before it"""

    def __post_init__(self) -> None:
        _require(0 <= self.temperature < math.inf, "temperature must be 0 (greedy) or more", self.temperature)
        _require(self.top_k >= 0, "top_k must be 0 (off) or more", self.top_k)
        _require(0 < self.top_p <= 1, "top_p must be above 0 and at most 1", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p must be between 0 and 1", self.min_p)
        _require(0 < self.repetition_penalty < math.inf, "repetition_penalty must be above 0", self.repetition_penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            _require(math.isfinite(getattr(self, name)), f"{name} must be a finite number", getattr(self, name))
        for token, bias in self.logit_bias.items():
            valid = isinstance(token, int) and math.isfinite(bias)
            _require(valid, "logit_bias must map token ids to finite numbers", {token: bias})

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def numbers(self, vocabulary: int) -> list[float]:
        """The row as numbers for `SamplingBatch`; the seed in two halves, which a float64 holds."""
        seed = (self.seeded().seed or 0) & (2**63 - 1)
        limits = (self.temperature, min(self.top_k or vocabulary, vocabulary), self.top_p, self.min_p)
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return [*limits, *penalties, seed >> 32, seed & (2**32 - 1), self.min_position]

    def seeded(self) -> Sampling:
        """The same with a seed; a fresh one if none was given."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


def _require(condition: bool, rule: str, value: object) -> None:
    if not condition:
        raise MarsError(f"{rule}, not {value}")


@dataclass(frozen=True, slots=True)
class Features:
    """What the rows of a batch make necessary; the rest is left out of the computation."""

    greedy: bool = True
    truncates: bool = False
    penalises: bool = False
    biases: bool = False
    delays: bool = False
    """Does some row keep from ending?"""
    likelihoods: bool = False
    """Does some row want to know how likely its tokens were?"""
    restricts: bool = False
    """Does some row follow a grammar?"""

    @classmethod
    def of(cls, rows: Sequence[Sampling]) -> Features:
        return cls(
            greedy=all(row.greedy for row in rows),
            truncates=any(row.truncates for row in rows),
            penalises=any(row.penalises for row in rows),
            biases=any(row.logit_bias for row in rows),
            delays=any(row.min_position for row in rows),
        )


class SamplingBatch:
    """The sampling of several rows as tensors, each with one entry per row."""

    NUMBERS = 10

    def __init__(self, numbers: Tensor, bias: Tensor, features: Features, ends: Tensor | None = None) -> None:
        """``numbers`` (rows, NUMBERS) are `Sampling.numbers`, ``bias`` (rows or 1, vocabulary) is added to logits,
        ``ends`` (vocabulary) marks the end tokens."""
        temperature, top_k, self.top_p, self.min_p, *penalties, high, low, self.min_position = numbers.unbind(1)
        self.features = features
        self.bias = bias
        self.ends = ends
        self.top_k = top_k
        self.repetition, self.presence, self.frequency = (each.float() for each in penalties)
        self.is_greedy = temperature == 0
        self.temperature = torch.where(self.is_greedy, 1.0, temperature).float()
        self.is_truncating = ~self.is_greedy & ((top_k < bias.shape[1]) | (self.top_p < 1) | (self.min_p > 0))
        self.seeds = (high.long() << 32) + low.long()

    @classmethod
    def of(
        cls,
        rows: Sequence[Sampling],
        vocabulary: int,
        banned: int | None = None,
        device: torch.device | str = "cpu",
        ends: Collection[int] = (),
    ) -> SamplingBatch:
        """``banned`` is a token never drawn, ``ends`` are those that end a text."""
        numbers = torch.tensor([row.numbers(vocabulary) for row in rows], dtype=torch.float64).view(-1, cls.NUMBERS)
        bias, features = send(token_bias(rows, vocabulary, banned), device), Features.of(rows)
        return cls(send(numbers, device), bias, features, send(mark(ends, vocabulary), device))

    def adjust(self, logits: Tensor, seen: Tensor | None = None, counts: Tensor | None = None) -> Tensor:
        """Logits (rows, positions, vocabulary) after bias, ban and penalties, as float32.

        ``seen`` marks tokens of the prompt and the answer, ``counts`` counts those of the answer; both are
        (rows, positions or 1, vocabulary).
        """
        logits = logits.float() + self.bias[:, None]
        if seen is not None and counts is not None:
            repetition = self.repetition[:, None, None]
            punished = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits = torch.where(seen, punished, logits)
            logits = logits - self.frequency[:, None, None] * counts - self.presence[:, None, None] * (counts > 0)
        return logits

    def hold(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Logits without end tokens, where the token at its position (rows, positions) must not be one."""
        if not self.features.delays or self.ends is None:
            return logits
        early = positions < self.min_position[:, None]
        return torch.where(early[:, :, None] & self.ends, -torch.inf, logits)

    def scores(self, logits: Tensor) -> Tensor:
        """What tokens are drawn by: adjusted logits after temperature and truncation (rows, positions, vocabulary)."""
        if self.features.greedy:
            return logits
        scores = logits / self.temperature[:, None, None]
        if self.features.truncates:
            cut = truncate(scores, self.top_k, self.top_p, self.min_p)
            scores = torch.where(self.is_truncating[:, None, None], cut, scores)
        return scores

    def draw(self, scores: Tensor, positions: Tensor) -> Tensor:
        """Tokens (rows, positions); ``positions`` (rows, positions) say where in the text they stand."""
        if not self.features.greedy:
            noise = gumbel(self.seeds, positions, scores.shape[2])
            scores = torch.where(self.is_greedy[:, None, None], scores, scores + noise)
        return first_best(scores)


def first_best(scores: Tensor) -> Tensor:
    """The first of the best tokens (rows, positions): of equal scores, common in bfloat16, always the same one.

    The best of each of 64 stretches, then the best of those: a GPU goes through the stretches at the same time.
    """
    parts = scores.unflatten(2, (math.gcd(scores.shape[2], 64), -1))
    values, places = parts.max(3)
    stretch = values.argmax(2, keepdim=True)
    return (stretch * parts.shape[3] + places.gather(2, stretch))[:, :, 0]


def token_bias(rows: Sequence[Sampling], vocabulary: int, banned: int | None) -> Tensor:
    """What is added to the logits (rows, vocabulary), or (1, vocabulary) where it is the same for all rows."""
    biased = any(row.logit_bias for row in rows)
    bias = torch.zeros(len(rows) if biased else 1, vocabulary)
    for index, row in enumerate(rows):
        for token, value in row.logit_bias.items():
            if not 0 <= token < vocabulary:
                raise MarsError(f"logit_bias names token {token}, but the vocabulary has {vocabulary} tokens")
            bias[index, token] = value
    if banned is not None:
        bias[:, banned] = -math.inf
    return bias


def mark(tokens: Collection[int], vocabulary: int) -> Tensor:
    """(vocabulary,): is it one of these?"""
    marks = torch.zeros(vocabulary, dtype=torch.bool)
    marks[[token for token in tokens if token < vocabulary]] = True
    return marks


def truncate(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Keep the ``top_k`` best, of those the fewest that hold ``top_p`` of the mass, of those the ones with at least
    ``min_p`` times the best one's probability; the limits have one entry per row."""
    ranked, order = scores.sort(dim=2, descending=True, stable=True)
    ranks = torch.arange(ranked.shape[2], device=ranked.device)
    mass = torch.where(ranks < top_k[:, None, None], ranked, -torch.inf).softmax(2)
    mass_before = mass.cumsum(2) - mass
    keep = (mass_before < top_p[:, None, None]) & (mass >= min_p[:, None, None] * mass[:, :, :1]) & (mass > 0)
    ranked = torch.where(keep | (ranks == 0), ranked, -torch.inf)
    return torch.zeros_like(ranked).scatter_(2, order, ranked)


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise (rows, n, vocabulary) for ``seeds`` (rows,) and ``positions`` (rows, n)."""
    state = _scramble(seeds[:, None] + _scramble(positions))
    numbers = torch.arange(vocabulary, device=seeds.device) ^ 0  # as it is, a compiler would fold what must wrap
    tokens = numbers * _signed(GOLDEN)
    bits = _scramble(state[:, :, None] + tokens) >> 41 & (2**23 - 1)  # as many as a float32 holds with a half behind
    return -(-((bits.float() + 0.5) / 2**23).log()).log()


def _scramble(state: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64 tensors, whose arithmetic wraps around."""
    state = state + _signed(GOLDEN)
    state = (state ^ _shift_right(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shift_right(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shift_right(state, 31)


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant


def _shift_right(state: Tensor, bits: int) -> Tensor:
    return (state >> bits) & ((1 << (64 - bits)) - 1)
