"""A request: what to continue and how, what has come out so far, and what it cost."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from transformers import PreTrainedTokenizerBase

from mars.decoding.text import Detokenizer, StopStrings
from mars.method.dials import Dial
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
    pieces: list[str]
    """Text emitted by each forward"""
    checked: int
    """Tokens for which the AR model's own choice is known"""
    agreed: int
    """Of those, how many are that choice"""
    seconds: float
    times: list[float]
    """When each forward's tokens came, in seconds since the request was made"""
    draft_forwards: int = 0
    """Forwards of a separate draft model, where one was used"""

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
    """None: any; the engine takes the fastest for `exact`, and a chain otherwise"""


class Answer:
    """What has come out of a request so far. Cuts exactly at an end token, a stop string or the length."""

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
        self.pieces: list[str] = []
        self.times: list[float] = []
        self.checked = 0
        self.agreed = 0
        self.draft_forwards = 0
        self.finish_reason: FinishReason | None = None
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(request.stop)
        self._end_tokens = end_tokens
        self._started = time.perf_counter()
        self._seconds = 0.0

    @property
    def room(self) -> int:
        """How many tokens may still come."""
        return self.limit - len(self.token_ids)

    def emit(self, tokens: Sequence[int]) -> int:
        """Take one forward's tokens, as many as fit; returns how many that were."""
        piece, taken = "", 0
        for token in tokens:
            taken += 1
            piece += self._take(token)
            if self.finish_reason:
                piece += "" if self._stops.hit else self._flush()
                self._seconds = time.perf_counter() - self._started
                break
        self.steps.append(taken)
        self.times.append(time.perf_counter() - self._started)
        self.pieces.append(piece)
        return taken

    def commit(
        self, claims: list[int], settled: bool, accepted: int, token: int, trusted: list[int], agrees: list[bool]
    ) -> None:
        """Take what a forward decided about the claims it was fed: emit what stays, and keep count of agreement."""
        tokens, verdicts = [token, *trusted], [True]
        if settled:
            self.judge(agrees)
        else:
            tokens, verdicts = claims[:accepted] + tokens, agrees[:accepted] + verdicts
        taken = self.emit(tokens)
        self.judge(verdicts[:taken])

    def judge(self, verdicts: Sequence[bool]) -> None:
        """Record for some tokens whether the AR model would have written them."""
        self.checked += len(verdicts)
        self.agreed += sum(verdicts)

    def cancel(self) -> None:
        self.finish_reason = "cancelled"
        self._seconds = time.perf_counter() - self._started

    def generation(self) -> Generation:
        if self.finish_reason is None:
            raise RuntimeError("the answer is not finished")
        return Generation(
            text="".join(self.pieces),
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            dial=str(self.request.dial),
            steps=self.steps,
            pieces=self.pieces,
            checked=self.checked,
            agreed=self.agreed,
            seconds=self._seconds,
            times=self.times,
            draft_forwards=self.draft_forwards,
        )

    def _take(self, token: int) -> str:
        self.token_ids.append(token)
        if token in self._end_tokens:
            self.finish_reason = "stop"
            return ""
        piece = self._stops.feed(self._detokenizer.feed(token))
        if self._stops.hit:
            self.finish_reason = "stop"
        elif self.room <= 0:
            self.finish_reason = "length"
        return piece

    def _flush(self) -> str:
        return self._stops.feed(self._detokenizer.flush()) + self._stops.flush()
