"""A sequence: the whole state of a request in progress, as the host knows it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from mars.core.grammar import GrammarMatcher, grammar_compiler
from mars.core.output import Logprob, RequestOutput
from mars.core.request import ModelInfo, Request, default_dial
from mars.method.acceptance import Dial
from mars.method.lookup import Lookup
from mars.method.sampling import SamplingParams


class StepResult(NamedTuple):
    """What a forward decided for one sequence; see `mars.method.acceptance.Decision`."""

    accepted: int
    token: int
    agrees: list[bool]  # for each draft that the window had room for
    drafts: list[int]
    trusted: int
    logprobs: list[Logprob]  # at each verified position, if some sequence of the batch asked for them
    candidates: SequenceOf[tuple[int, int]] = ()  # of the next window: token, and behind how many drafts


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    dial: Dial  # in effect for the next forward
    sampling: SamplingParams  # the request's, with a seed
    max_tokens: int
    end_tokens: frozenset[int]
    matcher: GrammarMatcher | None
    output: RequestOutput
    tokens: list[int]  # prompt and generated text, up to the last token
    drafts: list[int] = field(default_factory=list)
    drafts_emitted: bool = True  # were the drafts emitted already, unchecked?
    candidates: SequenceOf[tuple[int, int]] = ()  # other guesses: token, and behind how many drafts
    matches: list[int] = field(default_factory=list)  # of drafts some of which were looked up; see `Found`
    cursor: int = 0  # how many of the tokens have their keys and values cached
    lookup: Lookup | None = None

    # What follows is the engine's.
    order: tuple[int, int] = (0, 0)  # priority and number of arrival: the smaller, the sooner it runs
    slot: int | None = None  # its index in the device state; None while it waits
    admissions: int = 0  # how often it was given a slot: results of an earlier admission do not count any more
    awaits_result: bool = False  # its grammar must see the result of its last step before the next one
    device_drafts: list[int] = field(default_factory=list)  # the drafts as the device has them
    masks: Future[Tensor] | None = None  # what its grammar allows in the next step; another thread computes it
    trusts_masks: bool = False  # did the last step dispatched for it emit predictions of masks unchecked?
    draft_probabilities: list[float] = field(default_factory=list)  # that the masks gave the drafts, if they are known
    outlook: object = None  # what the policy expects of its next drafts
    pages: list[int] = field(default_factory=list)
    cached_pages: int = 0  # how many of its pages are full and in the prefix cache
    page_hash: int = 0  # of the last one of those

    @classmethod
    def of(cls, request: Request, model: ModelInfo, dial: Dial | None = None) -> Sequence:
        """``dial``: for a request that has none of its own, by default the model's."""
        request.validate(model)
        first = len(request.prompt) + request.min_new_tokens if request.min_new_tokens else 0
        matcher = None if request.grammar is None else grammar_compiler(model).matcher(request.grammar)
        sequence = cls(
            request=request,
            dial=Dial("one-token"),
            sampling=replace(request.sampling.seeded(), min_position=first),
            max_tokens=request.max_tokens(model),
            end_tokens=frozenset() if request.ignore_end else model.end_tokens,
            matcher=matcher,
            output=RequestOutput(),
            tokens=list(request.prompt),
        )
        sequence.set_dial(request.dial or dial or default_dial(model))
        return sequence

    def __lt__(self, other: Sequence) -> bool:
        return self.order < other.order

    @property
    def is_finished(self) -> bool:
        return self.output.finish_reason is not None

    @property
    def is_prefilled(self) -> bool:
        return self.cursor == len(self.tokens) - 1

    @property
    def can_decode(self) -> bool:
        """Is all there that its next decoding step needs?"""
        has_masks = self.matcher is None or (self.masks is not None and self.masks.done())
        return self.is_prefilled and has_masks and not self.awaits_result

    @property
    def room(self) -> int:
        """How many tokens may still be generated."""
        return self.max_tokens - self.output.num_tokens

    @property
    def looks_up(self) -> bool:
        """May drafts come from the text? With other dials than `exact`, what is written would depend on it."""
        asked = self.request.lookup
        return self.dial.kind == "exact" and (self.request.window is None if asked is None else asked > 0)

    def set_dial(self, dial: Dial) -> None:
        """Turn the dial of this sequence alone, as far as its request can follow."""
        self.dial = self.request.follow(dial)
        self.output.dial = str(self.dial)

    def process(self, result: StepResult, dial: Dial) -> tuple[int, int] | None:
        """Take what a forward with this dial decided: emit tokens and set up the next window.

        Returns how many drafts it verified and how many were accepted, if they waited for that.
        """
        count, token, agrees, predicted, trusted, logprobs, self.candidates = result
        verified = None
        accepted = [*self.drafts[:count], token]
        if self.drafts_emitted:
            emitted, logprobs = [token], logprobs[count:]
        else:
            emitted = accepted
            verified = (min(len(self.drafts), len(agrees)), count) if self.drafts else None
        self.emit(emitted + predicted[:trusted], [*agrees[:count], True], logprobs)
        if self.matcher is not None and not self.is_finished:
            self.matcher.advance(accepted)
        self.awaits_result = False
        self.tokens += accepted
        self.cursor = len(self.tokens) - 1
        self.drafts_emitted = not dial.verifies
        self.drafts = self.device_drafts = predicted[:trusted] if self.drafts_emitted else predicted
        return verified

    def look_up(self, most: int) -> None:
        """Let drafts that wait for their verification go on as the text does elsewhere, to at most ``most``."""
        self.matches = []
        if most and self.looks_up and not self.drafts_emitted and not self.is_finished:
            self.lookup = self.lookup or Lookup()
            self.drafts, self.matches = self.lookup.drafts(self.tokens, self.drafts, max(most, len(self.drafts)))

    def emit(self, tokens: list[int], agrees: list[bool], logprobs: SequenceOf[Logprob] = ()) -> int:
        """Put one forward's tokens out, up to an end token or the most that may come; returns how many these are.

        ``agrees`` goes on where the verdicts so far end: first for tokens emitted before, then for these.
        """
        output, before = self.output, len(self.output.token_ids)
        room = self.max_tokens - before
        tokens = tokens[:room]
        ends = not self.end_tokens.isdisjoint(tokens)
        if ends:
            tokens = tokens[: next(index for index, token in enumerate(tokens, 1) if token in self.end_tokens)]
        count = len(tokens)
        if (top := self.request.logprobs) is not None:
            output.logprobs += [Logprob(each.logprob, each.top[:top]) for each in logprobs[:count]]
        output.add(tokens, agrees[: before - len(output.agrees) + count])
        if ends or count == room:
            output.finish("stop" if ends else "length")
        return count
