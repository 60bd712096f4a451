"""A request inside the engine: its text so far, its pages, and what it feeds next, as far as the host knows."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from mars.decoding.grammar import Guide
from mars.decoding.request import Answer, Request
from mars.engine.layout import Layout
from mars.engine.pages import START
from mars.engine.runner import Terms
from mars.method.acceptance import TOP
from mars.method.sampling import Sampling
from mars.method.windows import Shape


@dataclass(slots=True, eq=False)
class Row:
    answer: Answer
    sampling: Sampling
    """The request's, with a seed"""
    urgency: tuple[int, int]
    """Priority and number of arrival: the smaller, the sooner"""
    default: Shape = field(default_factory=Shape)
    """The window of a request that names none and whose text depends on it"""
    text: list[int] = field(init=False)
    """Prompt and answer up to the token that is fed next"""
    claims: list[int] = field(default_factory=list)
    settled: bool = True
    cursor: int = 0
    """How many tokens of the text are cached"""
    slot: int | None = None
    """Its place among the running rows; None while it waits"""
    guide: Guide | None = None
    """Through its grammar, if it has one"""
    waits: bool = False
    """For the outcome of its last step, without which its grammar cannot say what may come next"""
    visit: int = 0
    """How often it has been given one"""
    trusts: bool = False
    """Did the last step launched for it trust its masks?"""
    last_terms: Terms | None = None
    """Of the last step launched for it; the same object as long as nothing changes"""
    pages: list[int] = field(default_factory=list)
    learnt: int = 0
    """How many of its pages are full and known"""
    content: int = START
    """The number of the last known one's content"""

    def __post_init__(self) -> None:
        self.text = list(self.request.prompt)

    def __lt__(self, other: Row) -> bool:
        return self.urgency < other.urgency

    @property
    def request(self) -> Request:
        return self.answer.request

    @property
    def most(self) -> int:
        """Tokens that its text may have in the end"""
        return len(self.request.prompt) + self.answer.limit

    @property
    def is_prefilled(self) -> bool:
        return self.cursor == len(self.text) - 1

    @property
    def chooses_window(self) -> bool:
        """Is any window as good as another for its text?"""
        return self.request.dial.kind == "exact" and self.request.shape is None

    def demand(self) -> Layout | None:
        """The least that the row's next window needs; None if it is content with any."""
        request, chooses = self.request, self.chooses_window
        fed = self.settled or not chooses  # claims emitted on trust have to be; drafts may be dropped
        holds = (self.claims and fed) or self.trusts
        if chooses and not holds:
            return None
        needs = Layout(trunk=request.block_size) if holds else Layout()
        if request.dial.uses_masks and not chooses:
            checks = request.dial.checks or not self.settled  # drafts made before the dial was turned
            needs |= Layout.of((request.shape or self.default) if checks else Shape(), request.block_size)
        return needs

    def terms(self) -> Terms:
        """How the row takes part in a step."""
        request, last = self.request, self.last_terms
        if self.slot is None:
            raise RuntimeError("the row is not running")
        if last is None or last.dial is not request.dial or last.slot != self.slot:
            shape = Shape(None) if self.chooses_window else request.shape or self.default
            groups = max(1, Layout.of(shape, request.block_size).groups)
            masks = request.block_size - 1 if request.dial.uses_masks else 0
            wants = request.logprobs is not None
            guided = self.guide is not None
            last = self.last_terms = Terms(self.slot, request.dial, self.sampling, groups, masks, wants, guided)
        self.trusts = request.dial.kind == "threshold"
        return last

    def commit(self, terms: Terms, layout: Layout, record: list[int]) -> tuple[int, int] | None:
        """Take what a step decided; returns how many drafts it checked and how many passed, if it checked any."""
        accepted, trusted, count, token, *rest = record
        claims = self.claims[: layout.trunk - 1]
        agrees = [bool(flag) for flag in rest[: len(claims)]]
        drafts = rest[layout.trunk - 1 :][:count]
        checked = (len(claims), accepted) if claims and not self.settled else None
        likely = _rows_of(rest[layout.trunk - 1 + layout.masks :]) if self.request.logprobs is not None else ()
        self.answer.commit(claims, self.settled, accepted, token, drafts[:trusted], agrees, likely)
        if self.guide is not None:
            self.guide.follow(self.answer, [*claims[:accepted], token])
            self.waits = False
        self.text += [*claims[:accepted], token]
        self.cursor = len(self.text) - 1
        self.settled = not terms.dial.checks
        self.claims = drafts[:trusted] if self.settled else drafts
        return checked


def _rows_of(bits: list[int]) -> list[tuple[float, ...]]:
    """The rows of `mars.method.dials.likelihoods` from their bits."""
    numbers = struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}i", *bits))
    return [numbers[start : start + 1 + 2 * TOP] for start in range(0, len(numbers), 1 + 2 * TOP)]
