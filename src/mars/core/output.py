"""What comes out of a request: tokens with statistics, and the text they become."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

FinishReason = Literal["stop", "length", "abort"]
REPLACEMENT = "\ufffd"
"""What a tokenizer writes for bytes that are not a whole character yet"""


class Logprob(NamedTuple):
    """The AR model's log-probability of a token, and its likeliest tokens with theirs."""

    logprob: float
    top: list[tuple[int, float]]


class Emission(NamedTuple):
    """What one forward gave to a sequence."""

    token_ids: list[int]
    agrees: list[bool]
    """Is a token what the AR model would have written? For all tokens in order, as far as is known by now: tokens that
    `threshold` emits are verified one forward later."""
    logprobs: list[Logprob]
    """Of these tokens, if they were asked for"""


@dataclass(slots=True)
class RequestOutput:
    """What came out of a request, so far or since it was last told of."""

    request_id: int = 0
    emissions: list[Emission] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    dial: str = ""
    times: list[float] = field(default_factory=list)
    """When each forward's tokens came, in seconds since the request was made"""
    seconds: float = 0.0
    """From the request to its last token"""
    draft_forwards: int = 0
    """Forwards of a separate draft model, where one was used"""
    num_tokens: int = 0
    num_verified: int = 0
    started: float = field(default_factory=time.perf_counter)
    processor: OutputProcessor | None = field(default=None, repr=False, compare=False)
    """Who turns the tokens into text"""

    def add(self, *emissions: Emission) -> None:
        self.emissions += emissions
        self.num_tokens += sum(len(each.token_ids) for each in emissions)
        self.num_verified += sum(len(each.agrees) for each in emissions)
        self.times += [time.perf_counter() - self.started] * len(emissions)

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.seconds = time.perf_counter() - self.started

    def since(self, forwards: int) -> RequestOutput:
        """What came after so many forwards."""
        later = RequestOutput(self.request_id, finish_reason=self.finish_reason)
        later.add(*self.emissions[forwards:])
        return later

    def __reduce__(self) -> tuple[object, ...]:
        """Outputs cross from process to process many times a second: verdicts are left out where all are positive."""
        plain = [not each.logprobs and each.agrees == [True] * len(each.token_ids) for each in self.emissions]
        packed = [each[0] if is_plain else tuple(each) for each, is_plain in zip(self.emissions, plain, strict=True)]
        rest = (self.times, self.finish_reason, self.dial, self.seconds, self.draft_forwards)
        return _unpack, (self.request_id, packed, *rest)

    def cut(self, forwards: int, tokens: int) -> None:
        """Keep the first forwards, and of the last of these its first tokens."""
        *kept, last = self.emissions[:forwards]
        late = sum(len(each.token_ids) - len(each.agrees) for each in kept)
        last = Emission(last.token_ids[:tokens], last.agrees[: late + tokens], last.logprobs[:tokens])
        times = self.times[:forwards]
        self.emissions, self.times, self.num_tokens, self.num_verified = [], [], 0, 0
        self.add(*kept, last)
        self.times = times

    @property
    def text(self) -> str:
        return self.processor.text if self.processor else ""

    @property
    def pieces(self) -> list[str]:
        """The text of each forward."""
        return self.processor.pieces if self.processor else []

    @property
    def token_ids(self) -> list[int]:
        """The end token included, where the model wrote one."""
        return [token for each in self.emissions for token in each.token_ids]

    @property
    def logprobs(self) -> list[Logprob]:
        """One per token, if they were asked for."""
        return [logprob for each in self.emissions for logprob in each.logprobs]

    @property
    def steps(self) -> list[int]:
        """Tokens emitted by each forward."""
        return [len(each.token_ids) for each in self.emissions]

    @property
    def forwards(self) -> int:
        return len(self.emissions)

    @property
    def tokens_per_forward(self) -> float:
        return self.num_tokens / max(1, self.forwards)

    @property
    def histogram(self) -> dict[int, int]:
        """How many forwards emitted 1, 2, 3, … tokens."""
        return dict(sorted(Counter(self.steps).items()))

    @property
    def num_agreed(self) -> int:
        """Tokens that are known to be the AR model's own choice, of the ``num_verified`` for which that is known."""
        return sum(sum(each.agrees) for each in self.emissions)

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
            "dial": self.dial,
        }


def _unpack(
    request_id: int,
    packed: list[list[int] | tuple[list[int], list[bool], list[Logprob]]],
    times: list[float],
    finish_reason: FinishReason | None,
    dial: str,
    seconds: float,
    draft_forwards: int,
) -> RequestOutput:
    output = RequestOutput(request_id, [], finish_reason, dial, seconds=seconds, draft_forwards=draft_forwards)
    output.add(
        *(Emission(*each) if isinstance(each, tuple) else Emission(each, [True] * len(each), []) for each in packed)
    )
    output.times = times
    return output


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
        self._is_flushed = False

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
        unread = self.output.emissions[len(self._pieces) :]
        if not self._stops and len(unread) > 1:
            self._pieces += [""] * (len(unread) - 1)
            tokens = [token for each in unread for token in each.token_ids]
            self._pieces.append(self._detokenizer.feed(*self._written(tokens)))
        self._read()

    def _read(self) -> None:
        for emission in self.output.emissions[len(self._pieces) :]:
            self._pieces.append("")
            tokens = emission.token_ids
            for end, part in enumerate([[token] for token in tokens] if self._stops else [tokens], 1):
                self._pieces[-1] += self._stops.feed(self._detokenizer.feed(*self._written(part)))
                if self._stops.hit:
                    self.output.cut(len(self._pieces), end)
                    self.output.finish("stop")
                    return
        if self._pieces and self.output.finish_reason and not self._is_flushed and not self._stops.hit:
            self._is_flushed = True
            self._pieces[-1] += self._stops.feed(self._detokenizer.flush()) + self._stops.flush()

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
