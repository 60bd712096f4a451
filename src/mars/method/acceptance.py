"""The dials: which drafts are accepted, what is emitted and what is drafted next, decided from logits.

========================  =======================================================================================
``one-token``             no masks: the AR model
``exact``                 a draft is accepted if the AR model would have written it: same text, same distribution
``relaxed=δ``             a draft is also accepted if the AR model gives it at least δ times its top probability
``threshold=τ``           masks' tokens are emitted unchecked, left to right, while their confidence is at least τ
``threshold:entropy=τ``   confidence measured as exp(-entropy) instead of the top probability
``threshold:margin=τ``    … as the gap between the two highest probabilities
========================  =======================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from mars.errors import MarsError
from mars.method.sampling import SamplingTensors, argmax
from mars.method.tensors import send
from mars.method.windows import ALTERNATIVES, NO_GROUP, Candidates, WindowBatch

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
            raise MarsError(f"unknown dial {self.kind}:{self.measure}: {USAGE}", param="dial")
        if self.kind in ("one-token", "exact"):
            if self.value is not None:
                raise MarsError(f"{self.kind} takes no value: {USAGE}", param="dial")
        elif self.value is None:
            raise MarsError(f"{self.kind} needs a value: {USAGE}", param="dial")
        elif self.kind == "relaxed" and not 0 < self.value <= 1:
            raise MarsError(f"relaxed={self.value:g} is out of range: δ must be above 0 and at most 1", param="dial")
        elif self.kind == "threshold" and not 0 <= self.value <= 1:
            raise MarsError(f"threshold={self.value:g} is out of range: τ must be between 0 and 1", param="dial")

    @classmethod
    def parse(cls, text: str | Dial) -> Dial:
        if isinstance(text, Dial):
            return text
        if not isinstance(text, str):
            hint = f' such as "threshold={text}" or "relaxed={text}"' if isinstance(text, int | float) else ""
            raise MarsError(f"a dial is text{hint}, not {text!r}: {USAGE}")
        name, _, number = text.strip().partition("=")
        kind, _, measure = name.partition(":")
        if kind not in get_args(Kind) or (measure and kind != "threshold"):
            raise MarsError(f"unknown dial {text!r}: {USAGE}", param="dial")
        try:
            value = float(number) if number else None
        except ValueError:
            raise MarsError(f"{number!r} in dial {text!r} is not a number: {USAGE}", param="dial") from None
        return cls(kind, value, measure or "probability")  # type: ignore[arg-type]

    def __str__(self) -> str:
        measure = "" if self.measure == "probability" else f":{self.measure}"
        value = "" if self.value is None else f"={self.value!r}"
        return f"{self.kind}{measure}{value}"

    @property
    def uses_masks(self) -> bool:
        return self.kind != "one-token"

    @property
    def verifies(self) -> bool:
        """Are drafts verified by the AR model before they are emitted?"""
        return self.kind in ("exact", "relaxed")

    @property
    def is_lossy(self) -> bool:
        """May the text differ from the AR model's?"""
        return self.kind in ("relaxed", "threshold")

    @property
    def tolerance(self) -> float:
        """δ: 1 accepts only what the AR model would have written."""
        return self.value if self.kind == "relaxed" and self.value is not None else 1.0

    @property
    def trust(self) -> float:
        """τ: infinity emits no prediction of a mask unchecked."""
        return self.value if self.kind == "threshold" and self.value is not None else math.inf


@dataclass(frozen=True, slots=True)
class DialFeatures:
    """What the dials of a batch need computed; the rest is left out."""

    relaxes: bool = False
    measures: frozenset[Measure] = frozenset()  # confidence measures that some sequence's threshold goes by

    @classmethod
    def of(cls, dials: Sequence[Dial]) -> DialFeatures:
        return cls(
            relaxes=any(dial.kind == "relaxed" for dial in dials),
            measures=frozenset(dial.measure for dial in dials if dial.kind == "threshold"),
        )


@dataclass(frozen=True, slots=True)
class DialTensors:
    """The dials of several sequences; each tensor has one entry per sequence."""

    tolerance: Tensor
    trust: Tensor
    measure: Tensor  # index into `MEASURES`
    features: DialFeatures

    @classmethod
    def of(cls, dials: Sequence[Dial], device: torch.device | str = "cpu") -> DialTensors:
        limits = torch.tensor([[dial.tolerance, dial.trust] for dial in dials], dtype=torch.float64).view(-1, 2)
        tolerance, trust = send(limits, device).unbind(1)
        measure = send([MEASURES.index(dial.measure) for dial in dials], device)
        return cls(tolerance, trust, measure, DialFeatures.of(dials))


@dataclass(frozen=True, slots=True)
class Decision:
    """What one forward decided, an entry per sequence."""

    accepted: Tensor  # (sequences,): how many drafts are accepted
    agrees: Tensor  # (sequences, most drafts): would the AR model have written this draft?
    token: Tensor  # (sequences,): the AR model's own token after the accepted drafts
    drafts: Tensor  # (sequences, masks): predictions of the masks for the positions after that
    draft_count: Tensor  # (sequences,): how many of them are real
    trusted: Tensor  # (sequences,): how many of them, from the left, are emitted unchecked
    candidates: Candidates  # for the next window: as many as this one has room for
    log_shares: Tensor | None = None  # (sequences, masks): logarithms of the probabilities of ``drafts``, if known


class Predictions(NamedTuple):
    """What masks say of their tokens."""

    tokens: Tensor  # (sequences, n, ranks): the one it chooses, then the next likeliest
    log_shares: Tensor  # (sequences, n, ranks): logarithms of what they have of all tokens together, if that is known
    confident: Tensor  # (sequences, n): is the choice sure enough to be emitted unchecked?


NO_TOKEN = -1  # before what is read: the head adds nothing


class Choices(Protocol):
    """Reads tokens off the logits of a forward.

    ``rows`` (sequences, n) say which logits, ``at`` (sequences, n) at which positions of the text the tokens stand.
    """

    @property
    def has_head(self) -> bool:
        """Does a Markov head condition each mask on the token before it?"""
        ...

    @property
    def wants_shares(self) -> bool:
        """Is it to be found out how probable the drafts are?"""
        ...

    def verify(self, rows: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """At each verified position: what the AR model writes there, and is the draft good enough for the dial?"""
        ...

    def predict(
        self, rows: Tensor, at: Tensor, accepted: Tensor, before: Tensor | None = None, ranks: int = 1
    ) -> Predictions:
        """Of each mask behind the accepted drafts.

        ``before`` (sequences, n) are the tokens before the masks or `NO_TOKEN`; given if it `has_head`.
        """
        ...


@dataclass(frozen=True, slots=True)
class LogitsChoices:
    """`Choices` in plain PyTorch: what is not among the features of ``dials`` and ``sampling`` is not computed."""

    logits: Tensor  # (tokens, vocabulary)
    drafts: Tensor
    dials: DialTensors
    sampling: SamplingTensors
    history: tuple[Tensor, ...]  # tokens seen and counted at each verified position, if there are penalties
    allowed: Tensor | None
    head: Callable[[Tensor], Tensor] | None = None
    wants_shares: bool = False

    def verify(self, rows: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        adjusted = self.sampling.ban_early_end(self.sampling.adjust(self.logits[rows], *self.history), at)
        if self.allowed is not None:
            adjusted = torch.where(self.allowed, adjusted, -torch.inf)
        scores = self.sampling.scores(adjusted)
        tolerated = torch.zeros_like(self.drafts, dtype=torch.bool)
        if self.dials.features.relaxes:
            tolerated = within_tolerance(adjusted[:, :-1], scores[:, :-1], self.drafts, self.dials.tolerance)
        return self.sampling.sample(scores, at), tolerated

    @property
    def has_head(self) -> bool:
        return self.head is not None

    def predict(
        self, rows: Tensor, at: Tensor, accepted: Tensor, before: Tensor | None = None, ranks: int = 1
    ) -> Predictions:
        logits, history = self.logits[rows], [_behind(tokens, accepted)[:, None] for tokens in self.history]
        if self.head is not None and before is not None:
            added = self.head(before.clamp(min=0)).float()
            logits = logits.float() + torch.where((before == NO_TOKEN)[:, :, None], 0.0, added)
        adjusted = self.sampling.ban_early_end(self.sampling.adjust(logits, *history), at)
        confident = confidence(adjusted, self.dials) >= self.dials.trust[:, None]
        scores = self.sampling.noisy(self.sampling.scores(adjusted), at)
        tokens = argmax(scores)[:, :, None]
        if ranks == 1 and not self.wants_shares:
            return Predictions(tokens, torch.zeros_like(tokens, dtype=torch.float), confident)
        log_shares = scores.log_softmax(2)
        others, ids = log_shares.scatter(2, tokens, -torch.inf).topk(ranks - 1, dim=2)
        return Predictions(torch.cat([tokens, ids], 2), torch.cat([log_shares.gather(2, tokens), others], 2), confident)


def decide(
    windows: WindowBatch,
    logits: Tensor,
    dials: DialTensors,
    sampling: SamplingTensors,
    *,
    positions: Tensor,
    emitted: Tensor,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
    allowed: Tensor | None = None,
    head: Callable[[Tensor], Tensor] | None = None,
    wants_shares: bool = False,
) -> Decision:
    """`decide_by` what the logits (tokens, vocabulary) of all windows say.

    ``seen`` and ``counts`` (sequences, vocabulary) are the tokens up to the last one. ``allowed`` (sequences, most
    drafts + 1, vocabulary) has the tokens that a grammar allows at the verified positions; masks are free. ``head``
    (a Markov head) adds to the logits of masks. ``wants_shares``: find out how probable the drafts are.
    """
    history = _along_drafts(windows.drafts, seen, counts)
    choices = LogitsChoices(logits, windows.drafts, dials, sampling, history, allowed, head, wants_shares)
    return decide_by(choices, windows, positions, emitted)


def decide_by(choices: Choices, windows: WindowBatch, positions: Tensor, emitted: Tensor) -> Decision:
    """Verify the drafts of each sequence, sample the AR token behind the accepted ones, and read the masks after it.

    ``positions`` (sequences,) are those of the last tokens. ``emitted`` (sequences,) says whose drafts were emitted
    already and are therefore accepted.
    """
    drafts = windows.drafts
    steps = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    chosen, tolerated = choices.verify(windows.verified_rows(), positions[:, None] + 1 + steps)
    real = steps[:-1] < windows.draft_count[:, None]
    agrees = real & (drafts == chosen[:, :-1])
    accepted = torch.where(emitted, windows.draft_count, leading(agrees | (real & tolerated)))
    token = chosen.gather(1, accepted[:, None])[:, 0]

    rows, draft_count, is_candidate = windows.mask_rows(accepted, token)
    ahead = torch.arange(windows.masks, device=drafts.device)
    at = (positions + accepted)[:, None] + 2 + ahead
    wanted = windows.candidates.tokens.shape[1]
    before = torch.where(is_candidate, NO_TOKEN, token) if wanted else token
    found = _predict(choices, rows, at, accepted, before, 1 + min(wanted, ALTERNATIVES))
    real = ahead < draft_count[:, None]
    candidates = likeliest(found, real, is_candidate, wanted) if wanted else windows.candidates
    trusted = leading(found.confident & real)
    drafts, log_shares = found.tokens[:, :, 0], found.log_shares[:, :, 0] if choices.wants_shares else None
    return Decision(accepted, agrees, token, drafts, draft_count, trusted, candidates, log_shares)


def _predict(choices: Choices, rows: Tensor, at: Tensor, accepted: Tensor, token: Tensor, ranks: int) -> Predictions:
    """All masks at once, or, where each depends on the token before it, one after the other from ``token`` on."""
    if not choices.has_head or not rows.shape[1]:
        return choices.predict(rows, at, accepted, ranks=ranks)
    found, before = list[Predictions](), token[:, None]
    for row, place in zip(rows.split(1, 1), at.split(1, 1), strict=True):
        found.append(choices.predict(row, place, accepted, before, ranks))
        before = found[-1].tokens[:, :, 0]
    return Predictions(*(torch.cat(each, 1) for each in zip(*found, strict=True)))


def likeliest(found: Predictions, real: Tensor, is_candidate: Tensor, wanted: int) -> Candidates:
    """The tokens besides the drafts that the AR model is likeliest to write next.

    One is written if all drafts before it are accepted and it is what comes then. ``real`` (sequences, masks) says
    which predictions there are. Where the first ``is_candidate`` (sequences,), it was read off the AR model's own
    logits, so there is no other.
    """
    first = torch.arange(real.shape[1], device=real.device) == 0
    certain = is_candidate[:, None] & first
    drafts = torch.where(certain, 0.0, found.log_shares[:, :, 0])
    scores = (drafts.cumsum(1) - drafts)[:, :, None] + found.log_shares[:, :, 1:]
    scores = torch.where((real & ~certain)[:, :, None], scores, -torch.inf)
    scores, places = scores.flatten(1).topk(wanted, dim=1)
    points = torch.where(scores > -torch.inf, places // (found.tokens.shape[2] - 1), NO_GROUP)
    return Candidates(found.tokens[:, :, 1:].flatten(1).gather(1, places), points)


TOP_LOGPROBS = 20  # most alternatives whose log-probabilities are reported for a token


def logprobs(windows: WindowBatch, logits: Tensor, decision: Decision, bias: Tensor) -> tuple[Tensor, Tensor]:
    """At each verified position: log-probabilities of the token accepted or sampled there and of the top tokens.

    They are the model's own, before temperature, penalties and bias; ``bias`` (1, vocabulary) takes the mask token out.
    (sequences, most drafts + 1, 1 + top) and, which tokens these are, (sequences, most drafts + 1, top), where top is
    `TOP_LOGPROBS` or the vocabulary.
    """
    log_p = (logits[windows.verified_rows()].float() + bias[:, None]).log_softmax(2)
    tokens = written_tokens(windows.drafts, decision)
    top, ids = log_p.topk(min(TOP_LOGPROBS, log_p.shape[2]), dim=2)
    return torch.cat([_at(log_p, tokens)[:, :, None], top], 2), ids


def within_tolerance(adjusted: Tensor, scores: Tensor, drafts: Tensor, tolerance: Tensor) -> Tensor:
    """Accept a draft with at least δ times the top probability of the AR model, δ < 1, unless truncation removed it."""
    if not drafts.shape[1]:
        return torch.zeros_like(drafts, dtype=torch.bool)
    ratio = (_at(adjusted, drafts) - adjusted.amax(2)).exp()
    return (_at(scores, drafts) > -torch.inf) & (ratio >= tolerance[:, None]) & (tolerance[:, None] < 1)


def confidence(logits: Tensor, dials: DialTensors) -> Tensor:
    """How sure a position is of its token, between 0 and 1, by the measure of each sequence's dial."""
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
    first, second = log_p.topk(2, dim=2).values.exp().unbind(2)
    return first - second


_MEASURE = {"probability": _top_probability, "entropy": _certainty, "margin": _margin}


def kept_tokens(drafts: Tensor, decision: Decision) -> tuple[Tensor, Tensor]:
    """(sequences, most drafts + 1): drafts and the token after them, and which of these the text keeps."""
    steps = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    tokens = torch.cat([drafts, decision.token[:, None]], 1)
    return tokens, (steps < decision.accepted[:, None]) | (steps == drafts.shape[1])


def written_tokens(drafts: Tensor, decision: Decision) -> Tensor:
    """(sequences, most drafts + 1): what was accepted or sampled at each verified position, as far as it counts."""
    tokens, stays = kept_tokens(drafts, decision)
    return torch.where(stays, tokens, decision.token[:, None])


def leading(flags: Tensor) -> Tensor:
    """How many flags (rows, n) are set before the first one that is not."""
    return flags.long().cumprod(1).sum(1)


def _at(values: Tensor, tokens: Tensor) -> Tensor:
    return values.gather(2, tokens[:, :, None])[:, :, 0]


def _behind(values: Tensor, accepted: Tensor) -> Tensor:
    """Of values (sequences, n, vocabulary), those at the position ``accepted`` (sequences,)."""
    return values.gather(1, accepted[:, None, None].expand(-1, 1, values.shape[2]))[:, 0]


def _along_drafts(drafts: Tensor, seen: Tensor | None, counts: Tensor | None) -> tuple[Tensor, ...]:
    """Tokens seen and counted at each verified position: those up to the last token, plus the drafts before it."""
    if seen is None or counts is None:
        return ()
    added = torch.zeros(drafts.shape[0], drafts.shape[1] + 1, counts.shape[1], device=counts.device)
    added[:, 1:].scatter_(2, drafts[:, :, None], 1.0)
    added = added.cumsum(1)
    return seen[:, None] | (added > 0), counts[:, None] + added
