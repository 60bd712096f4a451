"""From logits to a token: bias, penalties, temperature, truncation, and sampling without a generator.

*Adjusted logits* are the model's logits after bias and penalties. *Scores* are adjusted logits after temperature and
truncation. A token is sampled as the argmax of the scores plus Gumbel noise; greedy decoding adds none.

The noise is a function of (seed, position, token) alone. So a request samples the same tokens whatever else is in its
batch and however many of them a forward emits. A draft is sampled with the noise that the AR model will use at its
position, which makes them equal as often as the two distributions allow.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from mars.errors import MarsError, require_integer, require_number
from mars.method.tensors import send

GREEDY_BELOW = 1e-5  # a smaller temperature is greedy: dividing by it would leave the range of float32
LARGEST = 1e6  # of temperatures, penalties and biases, for the same reason
GOLDEN = 0x9E3779B97F4A7C15  # the step between two states of SplitMix64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request samples its tokens; the default is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    min_position: int = 0  # no end token is sampled before this position of the text

    def __post_init__(self) -> None:
        for name in SamplingTensors.FLOATS:
            require_number(name, getattr(self, name))
        require_integer("top_k", self.top_k)
        if self.seed is not None:
            require_integer("seed", self.seed)
        heat = self.temperature
        _require(0 <= heat <= LARGEST, f"temperature must be between 0 (greedy) and {LARGEST:g}", heat)
        if heat < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)
        _require(self.top_k >= 0, "top_k must be 0 (off) or more", self.top_k)
        _require(0 < self.top_p <= 1, "top_p must be above 0 and at most 1", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p must be between 0 and 1", self.min_p)
        factor, range_ = self.repetition_penalty, f"between {1 / LARGEST:g} and {LARGEST:g}"
        _require(1 / LARGEST <= factor <= LARGEST, f"repetition_penalty must be {range_} (1 is off)", factor)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(abs(value) <= LARGEST, f"{name} must be between {-LARGEST:g} and {LARGEST:g}", value)
        self._check_bias()

    def _check_bias(self) -> None:
        rule = f"logit_bias must map token ids to numbers between {-LARGEST:g} and {LARGEST:g}"
        _require(isinstance(self.logit_bias, Mapping), rule, repr(self.logit_bias))
        for token, bias in self.logit_bias.items():
            valid = isinstance(token, int) and isinstance(bias, int | float) and abs(bias) <= LARGEST
            _require(valid, rule, {token: bias})

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def floats(self) -> list[float]:
        """The values of `SamplingTensors.FLOATS`."""
        return [getattr(self, name) for name in SamplingTensors.FLOATS]

    def integers(self, vocabulary: int) -> list[int]:
        """The values of `SamplingTensors.INTEGERS`."""
        seed = (self.seeded().seed or 0) & (2**63 - 1)
        return [min(self.top_k or vocabulary, vocabulary), seed, self.min_position]

    def seeded(self) -> SamplingParams:
        """The same with a seed; a random one if none was given."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


def _require(condition: bool, rule: str, value: object) -> None:
    if not condition:
        raise MarsError(f"{rule}, not {value}", param=rule.partition(" ")[0])


@dataclass(frozen=True, slots=True)
class Features:
    """What the requests of a batch need computed; the rest is left out."""

    greedy: bool = True
    truncates: bool = False
    penalises: bool = False
    biases: bool = False
    min_tokens: bool = False
    logprobs: bool = False
    grammar: bool = False

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> Features:
        return cls(
            greedy=all(each.greedy for each in params),
            truncates=any(each.truncates for each in params),
            penalises=any(each.penalises for each in params),
            biases=any(each.logit_bias for each in params),
            min_tokens=any(each.min_position for each in params),
        )


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """The sampling parameters of several sequences; each tensor has one entry per sequence."""

    temperature: Tensor
    top_k: Tensor  # the size of the vocabulary: off
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    seed: Tensor
    min_position: Tensor
    bias: Tensor  # (sequences or 1, vocabulary): added to logits
    features: Features
    ends: Tensor | None = None  # (vocabulary,): is it an end token?

    FLOATS: ClassVar = (
        *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    )
    INTEGERS: ClassVar = ("top_k", "seed", "min_position")

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        vocabulary: int,
        banned: int | None = None,
        device: torch.device | str = "cpu",
        ends: Collection[int] = (),
    ) -> SamplingTensors:
        """``banned`` is a token never sampled, ``ends`` are those that end a text."""
        floats = torch.tensor([each.floats() for each in params], dtype=torch.float64).view(-1, len(cls.FLOATS))
        integers = torch.tensor([each.integers(vocabulary) for each in params]).view(-1, len(cls.INTEGERS))
        named = dict(zip(cls.FLOATS, send(floats, device).unbind(1), strict=True))
        named |= dict(zip(cls.INTEGERS, send(integers, device).unbind(1), strict=True))
        bias = send(bias_tensor(params, vocabulary, banned), device)
        return cls(**named, bias=bias, features=Features.of(params), ends=send(token_mask(ends, vocabulary), device))

    def adjust(self, logits: Tensor, seen: Tensor | None = None, counts: Tensor | None = None) -> Tensor:
        """Logits (sequences, positions, vocabulary) after bias and penalties, as float32.

        ``seen`` marks tokens of the prompt and the generated text, ``counts`` counts the generated ones; both are
        (sequences, positions or 1, vocabulary).
        """
        logits = logits.float() + self.bias[:, None]
        if seen is not None and counts is not None:
            penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
            repetition, presence, frequency = (each.float()[:, None, None] for each in penalties)
            penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits = torch.where(seen, penalised, logits) - frequency * counts - presence * (counts > 0)
        return logits

    def ban_early_end(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Logits without end tokens at those ``positions`` (sequences, positions) where the text must not end yet."""
        if not self.features.min_tokens or self.ends is None:
            return logits
        early = positions < self.min_position[:, None]
        return torch.where(early[:, :, None] & self.ends, -torch.inf, logits)

    def scores(self, logits: Tensor) -> Tensor:
        """Adjusted logits (sequences, positions, vocabulary) after temperature and truncation."""
        if self.features.greedy:
            return logits
        greedy = self.temperature == 0
        scores = logits / torch.where(greedy, 1.0, self.temperature).float()[:, None, None]
        if self.features.truncates:
            truncating = ~greedy & ((self.top_k < logits.shape[2]) | (self.top_p < 1) | (self.min_p > 0))
            truncated = truncate(scores, self.top_k, self.top_p, self.min_p)
            scores = torch.where(truncating[:, None, None], truncated, scores)
        return scores

    def sample(self, scores: Tensor, positions: Tensor) -> Tensor:
        """Tokens (sequences, positions); ``positions`` (sequences, positions) say where in the text they stand."""
        return argmax(self.noisy(scores, positions))

    def noisy(self, scores: Tensor, positions: Tensor) -> Tensor:
        """Scores whose highest is the token to sample."""
        if self.features.greedy:
            return scores
        noise = gumbel(self.seed, positions, scores.shape[2])
        return torch.where((self.temperature == 0)[:, None, None], scores, scores + noise)


def argmax(scores: Tensor) -> Tensor:
    """The first of the tokens with the highest score: equal scores are common in bfloat16.

    The argmax of 64 parts of the vocabulary, then of those: a GPU computes the parts in parallel.
    """
    parts = scores.unflatten(2, (math.gcd(scores.shape[2], 64), -1))
    values, tokens = parts.max(3)
    part = values.argmax(2, keepdim=True)
    return (part * parts.shape[3] + tokens.gather(2, part))[:, :, 0]


def bias_tensor(params: Sequence[SamplingParams], vocabulary: int, banned: int | None) -> Tensor:
    """What is added to logits: (sequences, vocabulary), or (1, vocabulary) where no request has a logit bias."""
    biased = any(each.logit_bias for each in params)
    bias = torch.zeros(len(params) if biased else 1, vocabulary)
    for index, each in enumerate(params):
        if each.logit_bias:
            tokens = torch.tensor(list(each.logit_bias))
            if unknown := tokens[(tokens < 0) | (tokens >= vocabulary)].tolist():
                raise MarsError(f"logit_bias names token {unknown[0]}, but the vocabulary has {vocabulary} tokens")
            bias[index, tokens] = torch.tensor(list(each.logit_bias.values()), dtype=bias.dtype)
    if banned is not None:
        bias[:, banned] = -math.inf
    return bias


def token_mask(tokens: Collection[int], vocabulary: int) -> Tensor:
    """(vocabulary,): is it one of these?"""
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[[token for token in tokens if token < vocabulary]] = True
    return mask


def truncate(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Keep the ``top_k`` highest, of those the fewest that hold ``top_p`` of the mass, of those the ones with at least
    ``min_p`` times the top probability; the limits have one entry per sequence."""
    ranked, order = scores.sort(dim=2, descending=True, stable=True)
    ranks = torch.arange(ranked.shape[2], device=ranked.device)
    mass = torch.where(ranks < top_k[:, None, None], ranked, -torch.inf).softmax(2)
    mass_before = mass.cumsum(2) - mass
    keep = (mass_before < top_p[:, None, None]) & (mass >= min_p[:, None, None] * mass[:, :, :1]) & (mass > 0)
    ranked = torch.where(keep | (ranks == 0), ranked, -torch.inf)
    return torch.zeros_like(ranked).scatter_(2, order, ranked)


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise (sequences, n, vocabulary) for ``seeds`` (sequences,) and ``positions`` (sequences, n)."""
    state = _scramble(seeds[:, None] + _scramble(positions))
    numbers = torch.arange(vocabulary, device=seeds.device) ^ 0  # else the compiler folds arithmetic that must wrap
    tokens = numbers * _signed(GOLDEN)
    bits = _scramble(state[:, :, None] + tokens) >> 41 & (2**23 - 1)  # so many and a half are exact in float32
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
