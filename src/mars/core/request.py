"""A request: what to continue and how, and the checks that it can be served."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from mars.errors import MarsError, require_integer
from mars.method.acceptance import TOP_LOGPROBS, Dial
from mars.method.lookup import MOST_DRAFTS
from mars.method.sampling import SamplingParams
from mars.method.windows import Window
from mars.models.settings import Settings


class ContextLengthError(MarsError):
    """A prompt and its answer are longer than the model or the cache can hold."""


class ModelInfo(Protocol):
    """What of a model decides whether a request can be served: a loaded checkpoint has it, and so has a server."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def end_tokens(self) -> frozenset[int]: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def context(self) -> int | None: ...
    @property
    def settings(self) -> Settings | None: ...


def default_dial(model: ModelInfo) -> Dial:
    return Dial.parse(model.settings.dial if model.settings else "one-token")


def require_masks(model: ModelInfo, dial: Dial) -> None:
    """Raise if the dial needs masks and the model was not trained for them."""
    if dial.uses_masks and model.settings is None:
        raise MarsError(
            f"{model.name} was not trained for MARS, so it decodes one token at a time: "
            f"use the dial one-token, or train it with `mars train` for {dial}",
            param="dial",
        )


@dataclass(frozen=True, slots=True)
class Request:
    """What one caller asked for."""

    prompt: Sequence[int]
    dial: Dial | None = field(default_factory=lambda: Dial("one-token"))  # None: the engine's, also when that is turned
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 256
    stop: Sequence[str] = ()
    block_size: int = 1  # tokens one forward predicts: the AR token and ``block_size - 1`` masks
    window: Window | None = None
    """Of every step; None: `exact` takes the fastest of each step, the other dials always the same"""
    lookup: int | None = None
    """Most drafts from masks and the text together, with the dial `exact`. None: with a ``window``, drafts come from
    masks alone, otherwise the engine decides"""
    min_new_tokens: int = 0  # no end token before so many others; stop strings still stop
    ignore_end: bool = False  # go on after end tokens
    logprobs: int | None = None
    """For every token, its log-probability and those of so many of the likeliest ones; needs a dial that verifies"""
    grammar: str | None = None
    """What the text must follow, in llguidance's notation (see `mars.core.grammar`); needs a dial that verifies"""

    @property
    def needs_verification(self) -> bool:
        """Must every token be verified? Logprobs and grammars are only known for those."""
        return self.logprobs is not None or self.grammar is not None

    def follow(self, dial: Dial) -> Dial:
        """The dial as far as the request can follow: `exact` instead of `threshold` where all must be verified."""
        return Dial("exact") if dial.kind == "threshold" and self.needs_verification else dial

    def max_tokens(self, model: ModelInfo) -> int:
        """Most tokens that can be generated: what was asked for, or what the model's context leaves."""
        return min(self.max_new_tokens, (model.context or sys.maxsize) - len(self.prompt))

    def validate(self, model: ModelInfo) -> None:
        """Raise if the model cannot serve the request."""
        dial = self.dial or Dial("one-token")
        require_masks(model, dial)
        if not self.prompt:
            raise MarsError("the prompt is empty: give at least one token", param="prompt")
        if not 0 <= min(self.prompt) <= max(self.prompt) < model.vocabulary:
            raise MarsError(f"the prompt has tokens outside the vocabulary of {model.vocabulary}", param="prompt")
        if unknown := [token for token in self.sampling.logit_bias if not 0 <= token < model.vocabulary]:
            raise MarsError(
                f"logit_bias names token {unknown[0]}, but the vocabulary has {model.vocabulary} tokens",
                param="logit_bias",
            )
        self._check_stops()
        require_integer("max_new_tokens", self.max_new_tokens, 1)
        require_integer("min_new_tokens", self.min_new_tokens)
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            rule = f"min_new_tokens must be between 0 and max_new_tokens, {self.max_new_tokens}"
            raise MarsError(f"{rule}, not {self.min_new_tokens}", param="min_new_tokens")
        if self.logprobs is not None:
            require_integer("logprobs", self.logprobs)
            if not 0 <= self.logprobs <= TOP_LOGPROBS:
                raise MarsError(f"logprobs must be 0 to {TOP_LOGPROBS}, not {self.logprobs}", param="logprobs")
        if self.needs_verification and dial.kind == "threshold":
            raise MarsError(
                f"logprobs and grammars need the dial one-token, exact or relaxed, not {dial}", param="dial"
            )
        if self.grammar is not None and (self.min_new_tokens or self.ignore_end):
            raise MarsError(
                "a grammar says where a text ends: min_new_tokens and ignore_end cannot be used with it",
                param="min_new_tokens" if self.min_new_tokens else "ignore_end",
            )
        least = 2 if dial.uses_masks else 1
        require_integer("block_size", self.block_size)
        if self.block_size < least:
            rule = f"block_size must be at least {least} for the dial {dial}"
            raise MarsError(f"{rule}, not {self.block_size}", param="block_size")
        if self.lookup is not None:
            require_integer("lookup", self.lookup)
            if not 0 <= self.lookup <= MOST_DRAFTS:
                raise MarsError(f"lookup must be 0 (off) to {MOST_DRAFTS} drafts, not {self.lookup}", param="lookup")
        if model.context is not None and len(self.prompt) >= model.context:
            raise ContextLengthError(
                f"the prompt has {len(self.prompt)} tokens, but {model.name} holds {model.context} together "
                "with the answer: shorten the prompt",
                param="prompt",
            )

    def _check_stops(self) -> None:
        if isinstance(self.stop, str) or not isinstance(self.stop, Sequence):
            raise MarsError(f"stop strings come in a list, not as {self.stop!r}")
        if wrong := [each for each in self.stop if not isinstance(each, str)]:
            raise MarsError(f"a stop string is text, not {wrong[0]!r}")
