"""A request: what to continue and how, what has come out so far, and what it cost."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from transformers import PreTrainedTokenizerBase

from mars.decoding.text import Detokenizer, StopStrings, decode
from mars.method.acceptance import TOP, Dial
from mars.method.sampling import Sampling
from mars.method.windows import Shape

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished answer with its statistics."""

    text: str
    token_ids: list[int]
    """The end-of-text token included, where the model wrote one"""
    finish_reason: FinishReason
    dial: str
    steps: list[int]
    """Tokens emitted by each forward"""
    checked: int
    """Tokens for which the AR model's own choice is known"""
    agreed: int
    """Of those, how many are that choice"""
    seconds: float
    times: list[float]
    """When each forward's tokens came, in seconds since the request was made"""
    draft_forwards: int = 0
    """Forwards of a separate draft model, where one was used"""
    spell: Callable[[], list[str]] = field(default=list, repr=False, compare=False)

    @property
    def pieces(self) -> list[str]:
        """Text emitted by each forward"""
        return self.spell()

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def forwards(self) -> int:
        return len(self.steps)

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / max(1, self.forwards)

    @property
    def histogram(self) -> dict[int, int]:
        """How many forwards emitted 1, 2, 3, … tokens."""
        return dict(sorted(Counter(self.steps).items()))

    @property
    def agreement(self) -> float:
        """Share of the checked tokens that the AR model would have written itself."""
        return self.agreed / self.checked if self.checked else 1.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, object]:
        """What ``mars generate --json`` prints."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "tokens": self.tokens,
            "forwards": self.forwards,
            "tokens_per_forward": self.tokens_per_forward,
            "histogram": self.histogram,
            "agreement": self.agreement,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "finish_reason": self.finish_reason,
            "dial": self.dial,
        }


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How likely the AR model found a token."""

    logprob: float
    best: list[tuple[int, float]]
    """The likeliest tokens and their log-probabilities"""

    @classmethod
    def of(cls, numbers: Sequence[float], top: int) -> Likelihood:
        """From a row of `mars.method.dials.likelihoods`."""
        ids, best = numbers[1 : 1 + TOP], numbers[1 + TOP :]
        return cls(numbers[0], [(int(token), logprob) for token, logprob in zip(ids[:top], best, strict=False)])


@dataclass(slots=True)
class Request:
    """What one caller asked for. Its dial may be turned at any time; the next forward obeys."""

    prompt: Sequence[int]
    dial: Dial = field(default_factory=lambda: Dial("one-token"))
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 256
    stop: Sequence[str] = ()
    block_size: int = 1
    """Tokens one forward predicts: the AR token and ``block_size - 1`` masks"""
    shape: Shape | None = None
    """None: any; the engine takes the fastest for `exact`, and always the same otherwise"""
    min_new_tokens: int = 0
    """No end token before so many others; stop strings still stop"""
    ignore_end: bool = False
    """Write on behind end tokens"""
    logprobs: int | None = None
    """For every token, its log-probability and those of so many of the likeliest ones; needs a dial that checks"""
    grammar: str | None = None
    """What the text must follow, in llguidance's notation (see `mars.decoding.grammar`); needs a dial that checks"""

    @property
    def needs_checks(self) -> bool:
        """Must no token be emitted on trust?"""
        return self.logprobs is not None or self.grammar is not None

    def obey(self, dial: Dial) -> None:
        """Turn the dial, as far as the request can follow: what is not checked has no likelihood and no grammar."""
        self.dial = Dial("exact") if self.needs_checks and dial.kind == "threshold" else dial

    def drawing(self) -> Sampling:
        """The sampling with a seed, and with the position before which the text must not end."""
        least = len(self.prompt) + self.min_new_tokens if self.min_new_tokens else 0
        return replace(self.sampling.seeded(), min_position=least)


class Answer:
    """What has come out of a request so far. Cuts exactly at an end token, a stop string or the length.

    Tokens become text when somebody asks for it, or at once where a stop string may be in it.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: PreTrainedTokenizerBase,
        end_tokens: frozenset[int],
        context: int | None = None,
    ) -> None:
        self.request = request
        self.limit = min(request.max_new_tokens, (context or sys.maxsize) - len(request.prompt))
        """Most tokens the answer can have: what was asked for, or what the model's context leaves"""
        self.token_ids: list[int] = []
        self.steps: list[int] = []
        self.times: list[float] = []
        self.checked = 0
        self.agreed = 0
        self.draft_forwards = 0
        self.likelihoods: list[Likelihood] = []
        """One per token, if they were asked for"""
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._pieces: list[str] = []
        self._spelt = 0
        """Tokens that have become text"""
        self._loose = ""
        """Text that is not in a piece yet"""
        self._end = 0
        """Tokens whose pieces are made"""
        self._stops = StopStrings(request.stop)
        self._end_tokens = frozenset() if request.ignore_end else end_tokens
        self._started = time.perf_counter()
        self._seconds = 0.0

    @property
    def room(self) -> int:
        """How many tokens may still come."""
        return self.limit - len(self.token_ids)

    @property
    def pieces(self) -> list[str]:
        """Text emitted by each forward so far"""
        self._cut_pieces()
        return self._pieces

    def spell_at_once(self) -> None:
        """Make text of what is new, in one go: cheaper, but all of it counts as the last forward's."""
        new = self.steps[len(self._pieces) :]
        self._pieces += [""] * (len(new) - 1)
        self._end += sum(new[:-1])
        self._cut_pieces()

    @property
    def text(self) -> str:
        if self._stops or self._spelt:
            return "".join(self.pieces)
        return decode(self._tokenizer, self._written(0, len(self.token_ids)))

    def emit(self, tokens: Sequence[int]) -> int:
        """Take one forward's tokens, as many as fit; returns how many that were."""
        before = len(self.token_ids)
        for token in tokens:
            self.token_ids.append(token)
            if self._stops:
                self._spell(len(self.token_ids))
            if token in self._end_tokens or self._stops.hit:
                self.finish_reason = "stop"
            elif self.room <= 0:
                self.finish_reason = "length"
            if self.finish_reason:
                self._seconds = time.perf_counter() - self._started
                break
        self.steps.append(len(self.token_ids) - before)
        self.times.append(time.perf_counter() - self._started)
        if self._stops:
            self._cut_pieces()  # while it is known which text is this forward's
        return self.steps[-1]

    def commit(
        self,
        claims: list[int],
        settled: bool,
        accepted: int,
        token: int,
        trusted: list[int],
        agrees: list[bool],
        likelihoods: Sequence[Sequence[float]] = (),
    ) -> None:
        """Take what a forward decided about the claims it was fed: emit what stays, and keep count of agreement.

        ``likelihoods`` are those at the trunk positions.
        """
        tokens, verdicts = [token, *trusted], [True]
        if settled:
            self.judge(agrees)
        else:
            tokens, verdicts = claims[:accepted] + tokens, agrees[:accepted] + verdicts
        taken = self.emit(tokens)
        self.judge(verdicts[:taken])
        if self.request.logprobs is not None:
            known = likelihoods[accepted if settled else 0 :][:taken]
            self.likelihoods += [Likelihood.of(each, self.request.logprobs) for each in known]

    def is_end(self, token: int) -> bool:
        return token in self._end_tokens

    def judge(self, verdicts: Sequence[bool]) -> None:
        """Record for some tokens whether the AR model would have written them."""
        self.checked += len(verdicts)
        self.agreed += sum(verdicts)

    def cancel(self, reason: FinishReason = "cancelled") -> None:
        self.finish_reason = reason
        self._seconds = time.perf_counter() - self._started

    def generation(self) -> Generation:
        if self.finish_reason is None:
            raise RuntimeError("the answer is not finished")
        return Generation(
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            dial=str(self.request.dial),
            steps=self.steps,
            checked=self.checked,
            agreed=self.agreed,
            seconds=self._seconds,
            times=self.times,
            draft_forwards=self.draft_forwards,
            spell=lambda: self.pieces,
        )

    def _cut_pieces(self) -> None:
        for step in self.steps[len(self._pieces) :]:
            self._end += step
            self._spell(self._end)
            if self._end == len(self.token_ids) and self.finish_reason and not self._stops.hit:
                self._loose += self._stops.feed(self._detokenizer.flush()) + self._stops.flush()
            self._pieces.append(self._loose)
            self._loose = ""

    def _spell(self, end: int) -> None:
        """Turn the tokens up to ``end`` into text."""
        start, self._spelt = self._spelt, max(end, self._spelt)
        if start < end:
            self._loose += self._stops.feed(self._detokenizer.feed(*self._written(start, end)))

    def _written(self, start: int, end: int) -> list[int]:
        return [token for token in self.token_ids[start:end] if token not in self._end_tokens]
