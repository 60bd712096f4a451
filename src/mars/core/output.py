"""What comes out of a request: tokens with statistics, and the text they become."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

FinishReason = Literal["stop", "length", "abort", "error"]
REPLACEMENT = "\ufffd"  # what a tokenizer writes for bytes that are not a whole character yet


class Logprob(NamedTuple):
    """The AR model's log-probability of a token, and its likeliest tokens with theirs."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class RequestOutput:
    """What came out of a request, so far or since it was last told of.

    One flat list for everything: an object per forward would be a lot of work for the garbage collector.
    """

    request_id: int = 0
    token_ids: list[int] = field(default_factory=list)  # the end token included, where the model wrote one
    steps: list[int] = field(default_factory=list)  # tokens emitted by each forward
    agrees: list[bool] = field(default_factory=list)
    """Is a token what the AR model would have written? For all tokens in order, as far as is known by now: tokens that
    `threshold` emits are verified one forward later."""
    verdicts: list[int] = field(default_factory=list)  # for how many tokens each forward has revealed that
    logprobs: list[Logprob] = field(default_factory=list)  # one per token, if they were asked for
    finish_reason: FinishReason | None = None
    error: str | None = None  # what went wrong, where the reason is "error"
    dial: str = ""
    times: list[float] = field(default_factory=list)
    """When each forward's tokens came, in seconds since the request was made"""
    seconds: float = 0.0  # from the request to its last token
    draft_forwards: int = 0  # forwards of a separate draft model, where one was used
    started: float = field(default_factory=time.perf_counter)
    processor: OutputProcessor | WrittenText | None = field(default=None, repr=False, compare=False)
    """Turns the tokens into text; a copy has the text instead"""

    def add(self, tokens: Sequence[int], agrees: Sequence[bool]) -> None:
        """What one forward brought: its tokens, and the next verdicts."""
        self.token_ids += tokens
        self.steps.append(len(tokens))
        self.agrees += agrees
        self.verdicts.append(len(agrees))
        self.times.append(time.perf_counter() - self.started)

    def extend(self, later: RequestOutput) -> None:
        """What further forwards brought."""
        for name in ("token_ids", "steps", "agrees", "verdicts", "logprobs"):
            getattr(self, name).extend(getattr(later, name))
        self.times += [time.perf_counter() - self.started] * later.forwards

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        self.finish_reason, self.error = reason, error
        self.seconds = time.perf_counter() - self.started

    def since(self, forwards: int) -> RequestOutput:
        """What came after so many forwards."""
        steps, verdicts = self.steps[forwards:], self.verdicts[forwards:]
        start = len(self.token_ids) - sum(steps)
        agrees = self.agrees[len(self.agrees) - sum(verdicts) :]
        logprobs = self.logprobs[start:]
        return RequestOutput(
            self.request_id, self.token_ids[start:], steps, agrees, verdicts, logprobs, self.finish_reason, self.error
        )

    def cut(self, forwards: int, tokens: int) -> None:
        """Keep the first forwards, and of the last of these its first tokens."""
        count = sum(self.steps[: forwards - 1]) + tokens
        known = min(count, sum(self.verdicts[:forwards]))
        self.verdicts[forwards - 1 :] = [known - sum(self.verdicts[: forwards - 1])]
        self.steps[forwards - 1 :] = [tokens]
        del self.token_ids[count:], self.logprobs[count:], self.agrees[known:], self.times[forwards:]

    @property
    def text(self) -> str:
        return self.processor.text if self.processor else ""

    @property
    def pieces(self) -> list[str]:
        """The text of each forward."""
        return self.processor.pieces if self.processor else []

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def forwards(self) -> int:
        return len(self.steps)

    @property
    def tokens_per_forward(self) -> float:
        return self.num_tokens / max(1, self.forwards)

    @property
    def histogram(self) -> dict[int, int]:
        """How many forwards emitted 1, 2, 3, … tokens."""
        return dict(sorted(Counter(self.steps).items()))

    @property
    def num_verified(self) -> int:
        """Tokens for which the AR model's own choice is known."""
        return len(self.agrees)

    @property
    def num_agreed(self) -> int:
        """Of those, how many are that choice."""
        return sum(self.agrees)

    @property
    def agreement(self) -> float:
        """Share of the verified tokens that the AR model would have written itself."""
        return self.num_agreed / self.num_verified if self.num_verified else 1.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, object]:
        """What ``mars generate --json`` prints."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "tokens": self.num_tokens,
            "forwards": self.forwards,
            "tokens_per_forward": self.tokens_per_forward,
            "histogram": self.histogram,
            "agreement": self.agreement,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "dial": self.dial,
        }


class WrittenText(NamedTuple):
    """The text of an output that was copied or unpickled: it needs no tokenizer."""

    text: str
    pieces: list[str]
    has_stops: bool = False

    def update(self) -> None:
        """Nothing more comes."""


class OutputProcessor:
    """Turns the tokens of a growing output into text, and ends the output at a stop string.

    Tokens become text when it is asked for; `update` looks for stop strings as soon as tokens come.
    """

    def __init__(
        self,
        output: RequestOutput,
        tokenizer: PreTrainedTokenizerBase,
        end_tokens: frozenset[int],
        stop: Sequence[str] = (),
    ) -> None:
        """``end_tokens`` are not part of the text."""
        self.output = output
        output.processor = self
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stop)
        self._pieces: list[str] = []
        self._read_tokens = 0  # tokens that have become text
        self._is_flushed = False

    def __reduce__(self) -> tuple[type[WrittenText], tuple[str, list[str]]]:
        """What pickle and copy.deepcopy keep."""
        return WrittenText, (self.text, self.pieces)

    @property
    def has_stops(self) -> bool:
        return bool(self._stops)

    @property
    def pieces(self) -> list[str]:
        """The text of each forward so far."""
        self._read()
        return self._pieces

    @property
    def text(self) -> str:
        if self._stops or self._pieces:
            return "".join(self.pieces)
        return decode(self._tokenizer, self._written(self.output.token_ids))

    def update(self) -> None:
        """Look for stop strings in new tokens; the output ends with the token that completes one."""
        if self._stops:
            self._read()

    def read_at_once(self) -> None:
        """Turn all new tokens into text together: cheaper, but it counts as the last forward's."""
        unread = self.output.forwards - len(self._pieces)
        if not self._stops and unread > 1:
            self._pieces += [""] * (unread - 1)
            self._pieces.append(self._detokenizer.feed(*self._written(self._take(self.output.num_tokens))))
        self._read()

    def _read(self) -> None:
        for step in self.output.steps[len(self._pieces) :]:
            self._pieces.append("")
            tokens = self._take(self._read_tokens + step)
            for end, part in enumerate([[token] for token in tokens] if self._stops else [tokens], 1):
                self._pieces[-1] += self._stops.feed(self._detokenizer.feed(*self._written(part)))
                if self._stops.hit:
                    self.output.cut(len(self._pieces), end)
                    self.output.finish("stop")
                    return
        if self._pieces and self.output.finish_reason and not self._is_flushed and not self._stops.hit:
            self._is_flushed = True
            self._pieces[-1] += self._stops.feed(self._detokenizer.flush()) + self._stops.flush()

    def _take(self, end: int) -> list[int]:
        start, self._read_tokens = self._read_tokens, end
        return self.output.token_ids[start:end]

    def _written(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token not in self._end_tokens]


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Text without special tokens, by the fast tokenizer itself where there is one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer.decode(tokens, skip_special_tokens=True)
    return backend.decode(tokens, skip_special_tokens=True)


class Detokenizer:
    """Turns a growing list of tokens into pieces of text, which together are the whole text.

    A token is decoded together with its predecessors, since many tokenizers write it differently at the start of a
    text. A piece that ends inside a character waits for the rest of it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0
        self._done = 0

    def feed(self, *tokens: int) -> str:
        """Text that these tokens complete; may be empty."""
        self._tokens += tokens
        piece = self._pending()
        return "" if piece.endswith(REPLACEMENT) else self._release(piece)

    def flush(self) -> str:
        """What is left at the end of the text, broken or not."""
        return self._release(self._pending())

    def _pending(self) -> str:
        known = self._decode(self._tokens[self._context : self._done])
        return self._decode(self._tokens[self._context :])[len(known) :]

    def _release(self, piece: str) -> str:
        if piece:
            self._context, self._done = self._done, len(self._tokens)
        return piece

    def _decode(self, tokens: Sequence[int]) -> str:
        return decode(self._tokenizer, tokens)


class StopStrings:
    """Passes text through until one of the stop strings appears, holding back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.hit = False

    def __bool__(self) -> bool:
        """Is there anything to stop at?"""
        return bool(self._stops)

    def feed(self, piece: str) -> str:
        """Text that is safe to show. Once `hit` is set, nothing more follows."""
        text = self._held + piece
        found = [index for index in (text.find(stop) for stop in self._stops) if index >= 0]
        if found:
            self.hit = True
            self._held = ""
            return text[: min(found)]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text are the beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
