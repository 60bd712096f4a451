"""The dial: how much a row trusts its masks, and what it therefore emits from one forward.

========================  =======================================================================================
``one-token``             no masks: the AR model
``exact``                 a claim stays if the AR model would have written it: same text, same distribution
``relaxed=δ``             a claim also stays if the AR model gives it at least δ times its best token's probability
``threshold=τ``           masks are believed unchecked, left to right, while their confidence is at least τ
``threshold:entropy=τ``   confidence measured as exp(-entropy) instead of the top probability
``threshold:margin=τ``    … as the gap between the two best probabilities
========================  =======================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from mars.errors import MarsError
from mars.method.sampling import SamplingBatch
from mars.method.tensors import send
from mars.method.windows import WindowBatch

Kind = Literal["one-token", "exact", "relaxed", "threshold"]
Measure = Literal["probability", "entropy", "margin"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
USAGE = "use one-token, exact, relaxed=0.3, threshold=0.9, threshold:entropy=0.9 or threshold:margin=0.9"


@dataclass(frozen=True, slots=True)
class Dial:
    """One setting of the dial. ``Dial.parse`` reads it from a string and ``str`` writes it back."""

    kind: Kind
    value: float | None = None
    measure: Measure = "probability"

    def __post_init__(self) -> None:
        measures = MEASURES if self.kind == "threshold" else MEASURES[:1]
        if self.kind not in get_args(Kind) or self.measure not in measures:
            raise MarsError(f"unknown dial {self.kind}:{self.measure}: {USAGE}")
        if self.kind in ("one-token", "exact"):
            if self.value is not None:
                raise MarsError(f"{self.kind} takes no value: {USAGE}")
        elif self.value is None:
            raise MarsError(f"{self.kind} needs a value: {USAGE}")
        elif self.kind == "relaxed" and not 0 < self.value <= 1:
            raise MarsError(f"relaxed={self.value:g} is out of range: δ must be above 0 and at most 1")
        elif self.kind == "threshold" and not 0 <= self.value <= 1:
            raise MarsError(f"threshold={self.value:g} is out of range: τ must be between 0 and 1")

    @classmethod
    def parse(cls, text: str | Dial) -> Dial:
        if isinstance(text, Dial):
            return text
        name, _, number = text.strip().partition("=")
        kind, _, measure = name.partition(":")
        if kind not in get_args(Kind) or (measure and kind != "threshold"):
            raise MarsError(f"unknown dial {text!r}: {USAGE}")
        try:
            value = float(number) if number else None
        except ValueError:
            raise MarsError(f"{number!r} in dial {text!r} is not a number: {USAGE}") from None
        return cls(kind, value, measure or "probability")  # type: ignore[arg-type]

    def __str__(self) -> str:
        measure = "" if self.measure == "probability" else f":{self.measure}"
        value = "" if self.value is None else f"={self.value!r}"
        return f"{self.kind}{measure}{value}"

    def numbers(self) -> list[float]:
        """The dial as numbers for `DialBatch`."""
        return [self.tolerance, self.trust, MEASURES.index(self.measure)]

    @property
    def uses_masks(self) -> bool:
        return self.kind != "one-token"

    @property
    def checks(self) -> bool:
        """Whether what the masks guess waits for the AR model's word before it is emitted."""
        return self.kind in ("exact", "relaxed")

    @property
    def is_loose(self) -> bool:
        """May the text differ from the AR model's?"""
        return self.kind in ("relaxed", "threshold")

    @property
    def tolerance(self) -> float:
        """δ: 1 admits only what the AR model would have written."""
        return self.value if self.kind == "relaxed" and self.value is not None else 1.0

    @property
    def trust(self) -> float:
        """τ: infinity believes no mask."""
        return self.value if self.kind == "threshold" and self.value is not None else math.inf


@dataclass(frozen=True, slots=True)
class DialFeatures:
    """What the dials of a batch make necessary; the rest is left out of the computation."""

    relaxes: bool = False
    """Does some row accept claims that the AR model would not have written?"""
    measures: frozenset[Measure] = frozenset()
    """Those that some row trusts its masks by"""

    @classmethod
    def of(cls, rows: Sequence[Dial]) -> DialFeatures:
        return cls(
            relaxes=any(row.kind == "relaxed" for row in rows),
            measures=frozenset(row.measure for row in rows if row.kind == "threshold"),
        )


class DialBatch:
    """The dials of several rows as tensors, each with one entry per row."""

    NUMBERS = 3

    def __init__(self, numbers: Tensor, features: DialFeatures) -> None:
        """``numbers`` (rows, NUMBERS) are `Dial.numbers`."""
        self.tolerance, self.trust, self.measure = numbers.unbind(1)
        self.features = features

    @classmethod
    def of(cls, rows: Sequence[Dial], device: torch.device | str = "cpu") -> DialBatch:
        numbers = torch.tensor([row.numbers() for row in rows], dtype=torch.float64).view(-1, cls.NUMBERS)
        return cls(send(numbers, device), DialFeatures.of(rows))


@dataclass(frozen=True, slots=True)
class Decision:
    """What one forward decided, a row each."""

    accepted: Tensor
    """(rows,): how many claims stay"""
    agrees: Tensor
    """(rows, claims): would the AR model have written this claim?"""
    token: Tensor
    """(rows,): the AR model's own token after the accepted claims"""
    drafts: Tensor
    """(rows, masks): the masks' guesses for the positions after that"""
    draft_count: Tensor
    """(rows,): how many guesses there are"""
    trusted: Tensor
    """(rows,): how many of them, from the left, are emitted unchecked"""


def decide(
    windows: WindowBatch,
    logits: Tensor,
    dials: DialBatch,
    sampling: SamplingBatch,
    *,
    positions: Tensor,
    settled: Tensor,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Decision:
    """Judge the claims of each row, draw the AR token behind them, and read the masks that follow it.

    ``logits`` are the last ``windows.tail`` ones, ``positions`` (rows,) those of the anchors, ``settled`` (rows,)
    says which rows have emitted their claims already, ``seen`` and ``counts`` (rows, vocabulary) are the tokens up to
    the anchor, ``allowed`` (rows, claims + 1, vocabulary) marks those that may follow there; guesses are free.
    """
    claims = windows.claims
    steps = torch.arange(claims.shape[1] + 1, device=claims.device)
    history = _along_claims(claims, seen, counts)
    places = positions[:, None] + 1 + steps
    beliefs = sampling.hold(sampling.adjust(windows.trunk_logits(logits), *history), places)
    if allowed is not None:
        beliefs = torch.where(allowed, beliefs, -torch.inf)
    scores = sampling.scores(beliefs)
    choices = sampling.draw(scores, places)  # what the AR model writes, if the claims stay

    real = steps[:-1] < windows.claim_count[:, None]
    agrees = real & (claims == choices[:, :-1])
    passes = agrees
    if dials.features.relaxes:
        passes = agrees | (real & passes_relaxed(beliefs[:, :-1], scores[:, :-1], claims, dials.tolerance))
    accepted = torch.where(settled, windows.claim_count, leading(passes))
    token = choices.gather(1, accepted[:, None])[:, 0]

    beliefs, draft_count = windows.mask_logits(logits, accepted)
    ahead = torch.arange(windows.masks, device=claims.device)
    places = (positions + accepted)[:, None] + 2 + ahead
    beliefs = sampling.adjust(beliefs, *(_behind(tokens, accepted)[:, None] for tokens in history))
    beliefs = sampling.hold(beliefs, places)
    drafts = sampling.draw(sampling.scores(beliefs), places)
    believed = confidence(beliefs, dials) >= dials.trust[:, None]
    trusted = leading(believed & (ahead < draft_count[:, None]))
    return Decision(accepted, agrees, token, drafts, draft_count, trusted)


TOP = 20
"""Most alternatives that `likelihoods` tells of a token"""


def likelihoods(windows: WindowBatch, logits: Tensor, decision: Decision, ban: Tensor) -> Tensor:
    """(rows, most claims + 1, 1 + 2 TOP): how likely the AR model found each emitted token, and its best ones.

    At each trunk position: the log-probability of the token that stays there or follows, the best tokens, and theirs.
    They are the model's own, before temperature, penalties and bias; ``ban`` (1, vocabulary) takes the mask out.
    """
    log_p = (windows.trunk_logits(logits).float() + ban[:, None]).log_softmax(2)
    steps = torch.arange(windows.claims.shape[1] + 1, device=logits.device)
    padded = torch.cat([windows.claims, decision.token[:, None]], 1)
    tokens = torch.where(steps < decision.accepted[:, None], padded, decision.token[:, None])
    best, ids = log_p.topk(min(TOP, log_p.shape[2]), dim=2)
    missing = [0, TOP - best.shape[2]]
    best, ids = (torch.nn.functional.pad(each, missing) for each in (best, ids))
    return torch.cat([_at(log_p, tokens)[:, :, None], ids, best], 2)


def passes_relaxed(beliefs: Tensor, scores: Tensor, claims: Tensor, tolerance: Tensor) -> Tensor:
    """Accept a claim that the AR model believes at least δ times as much as its best token, δ < 1.

    A claim that truncation took out of the draw never passes.
    """
    if not claims.shape[1]:
        return torch.zeros_like(claims, dtype=torch.bool)
    ratio = (_at(beliefs, claims) - beliefs.amax(2)).exp()
    return (_at(scores, claims) > -torch.inf) & (ratio >= tolerance[:, None]) & (tolerance[:, None] < 1)


def confidence(logits: Tensor, dials: DialBatch) -> Tensor:
    """How sure a position is of its token, between 0 and 1, by the measure of each row's dial."""
    result = torch.zeros(logits.shape[:2], device=logits.device)
    if not logits.shape[1]:
        return result
    for measure in dials.features.measures:
        mine = (dials.measure == MEASURES.index(measure))[:, None]
        result = torch.where(mine, _MEASURE[measure](logits.log_softmax(2)), result)
    return result


def _top_probability(log_p: Tensor) -> Tensor:
    return log_p.amax(2).exp()


def _certainty(log_p: Tensor) -> Tensor:
    return (log_p.exp() * log_p).nan_to_num(0.0).sum(2).exp()


def _margin(log_p: Tensor) -> Tensor:
    best, second = log_p.topk(2, dim=2).values.exp().unbind(2)
    return best - second


_MEASURE = {"probability": _top_probability, "entropy": _certainty, "margin": _margin}


def tally(counts: Tensor, claims: Tensor, decision: Decision) -> Tensor:
    """Counts (rows, vocabulary) of each answer's tokens with those from the old anchor to the new one."""
    steps = torch.arange(claims.shape[1], device=claims.device)
    tokens = torch.cat([claims, decision.token[:, None]], 1)
    stays = torch.cat([steps < decision.accepted[:, None], torch.ones_like(decision.token[:, None])], 1)
    return counts.scatter_add(1, tokens, stays.to(counts.dtype))


def leading(flags: Tensor) -> Tensor:
    """How many flags (rows, n) are set before the first one that is not."""
    return flags.long().cumprod(1).sum(1)


def _at(values: Tensor, tokens: Tensor) -> Tensor:
    return values.gather(2, tokens[:, :, None])[:, :, 0]


def _behind(values: Tensor, accepted: Tensor) -> Tensor:
    """Of values (rows, n, vocabulary), those at the position ``accepted`` (rows,)."""
    return values.gather(1, accepted[:, None, None].expand(-1, 1, values.shape[2]))[:, 0]


def _along_claims(claims: Tensor, seen: Tensor | None, counts: Tensor | None) -> tuple[Tensor, ...]:
    """Tokens seen and counted at each trunk position: those up to the anchor, plus the claims before it."""
    if seen is None or counts is None:
        return ()
    added = torch.zeros(claims.shape[0], claims.shape[1] + 1, counts.shape[1], device=counts.device)
    added[:, 1:].scatter_(2, claims[:, :, None], 1.0)
    added = added.cumsum(1)
    return seen[:, None] | (added > 0), counts[:, None] + added
