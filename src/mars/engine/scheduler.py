"""Who runs: admission, priorities, preemption, prefill chunks. It knows sequences, slots and pages, but no tensors.

When pages run out, the least urgent sequence gives its own back and waits. It keeps its tokens and drafts; its keys and
values are computed again, mostly from the prefix cache.
"""

import heapq
from dataclasses import dataclass
from itertools import count

from mars.core.request import ContextLengthError
from mars.core.sequence import Sequence
from mars.engine.pages import NO_PREFIX, Pages
from mars.errors import MarsError

GROWTH = 8  # pages that sequences get at a time where there are enough, so that the device need not be told of each


class QueueFullError(MarsError):
    """No more requests are taken for now."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the next step does."""

    prefill: list[tuple[int, int, list[int]]]  # chunks: slot, start and tokens
    begin: list[Sequence]  # sequences whose first decoding step since their admission this is
    decode: list[Sequence]
    page_updates: list[tuple[int, int, int]]  # new entries of the page table: slot, index, page


class Scheduler:
    def __init__(
        self,
        pages: Pages,
        *,
        max_num_seqs: int,
        prefill_tokens: int,
        margin: int,
        step_tokens: int,
        max_waiting: int | None,
    ) -> None:
        """``margin``: tokens behind a text that a window may need; a step moves on by up to ``step_tokens``."""
        self.pages = pages
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []  # A heap, the most urgent first
        self._max_num_seqs = max_num_seqs
        self._prefill_tokens = prefill_tokens
        self._margin = margin
        self._step_tokens = step_tokens
        self._max_waiting = max_waiting
        self._free_slots = list(range(max_num_seqs, 0, -1))
        self._arrivals = count()
        self._new: set[Sequence] = set()  # admitted, but not decoding yet
        self._page_updates: dict[tuple[int, int], int] = {}

    @property
    def max_length(self) -> int:
        """Tokens that the cache has room for in one request, prompt and answer together."""
        return (self.pages.count - 1) * self.pages.size - self._margin

    def add(self, sequence: Sequence, priority: int) -> None:
        """Queue a sequence; the smaller its priority, the sooner it runs."""
        if self._max_waiting is not None and len(self.waiting) >= self._max_waiting:
            raise QueueFullError(f"{len(self.waiting)} requests are waiting already: try again later")
        self.require_room(sequence)
        sequence.order = (priority, next(self._arrivals))
        heapq.heappush(self.waiting, sequence)

    def require_room(self, sequence: Sequence) -> None:
        """Raise if the sequence could never fit, even alone."""
        needs = len(sequence.tokens) + sequence.max_tokens
        if needs > self.max_length:
            raise ContextLengthError(
                f"the request may need {needs} tokens of cache, but there is room for {self.max_length}: "
                "ask for fewer new tokens, shorten the prompt, or give the engine more memory",
                param="prompt",
            )

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out that has ended, wherever it is."""
        if sequence.slot is not None:
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            heapq.heapify(self.waiting)

    def schedule(self, in_flight: int) -> Schedule | None:
        """The next step, behind so many whose results are not known yet.

        None: a sequence has to be preempted, and its newest tokens must be known first, so process one of those.
        """
        if not self._admit(in_flight):
            return None
        chunks = self._chunks()
        ends = {sequence: sequence.cursor + size for sequence, size in chunks.items()}
        if not self._grow(ends, in_flight):
            return None
        prefill = []
        for sequence, size in chunks.items():
            if sequence.slot is not None:  # else it was preempted
                start = sequence.cursor
                prefill.append((sequence.slot, start, sequence.tokens[start : start + size]))
                sequence.cursor += size
                self.cache_pages(sequence)
        decode = [each for each in self.running if each.can_decode]
        begin = [each for each in decode if each in self._new] if self._new else []
        self._new.difference_update(begin)
        updates, self._page_updates = self._page_updates, {}
        return Schedule(prefill, begin, decode, [(*entry, page) for entry, page in updates.items()])

    def cache_pages(self, sequence: Sequence) -> None:
        """Put the sequence's full pages into the prefix cache."""
        size = self.pages.size
        while (sequence.cached_pages + 1) * size <= sequence.cursor:
            start = sequence.cached_pages * size
            tokens, page = sequence.tokens[start : start + size], sequence.pages[sequence.cached_pages]
            sequence.page_hash = self.pages.cache(sequence.page_hash, tokens, page)
            sequence.cached_pages += 1

    def check(self) -> None:
        """Raise if a page or a slot is lost, or given out twice."""
        self.pages.check([each.pages for each in self.running])
        slots = sorted([*self._free_slots, *(each.slot or 0 for each in self.running)])
        if slots != list(range(1, self._max_num_seqs + 1)):
            raise RuntimeError("a slot is lost, or given out twice")

    # --- admission

    def _admit(self, in_flight: int) -> bool:
        """Admit waiting sequences while there is room, the most urgent first; they may preempt less urgent ones."""
        while self.waiting:
            sequence = self.waiting[0]
            if self._prefix_is_on_its_way(sequence):
                return True
            if self._enter(sequence):
                heapq.heappop(self.waiting)
                continue
            least = max(self.running, default=None)
            if least is None or least.order[0] <= sequence.order[0]:
                return True
            if in_flight:
                return False
            self._preempt(least)
        return True

    def _prefix_is_on_its_way(self, sequence: Sequence) -> bool:
        """Is a running sequence about to prefill the very page that this one needs next? Then they can share it."""
        prefilling = [each for each in self.running if not each.is_prefilled]
        if not prefilling:
            return False
        end = (len(self.pages.find(sequence.tokens[:-1])) + 1) * self.pages.size
        return end < len(sequence.tokens) and any(
            each.cursor < end < len(each.tokens) and each.tokens[:end] == sequence.tokens[:end] for each in prefilling
        )

    def _enter(self, sequence: Sequence) -> bool:
        """Give the sequence a slot and pages for its text and a window; False if there are not enough."""
        found = self.pages.find(sequence.tokens[:-1])
        shared = self.pages.share(found)
        wanted = self.pages.needed(len(sequence.tokens) + self._margin) - len(shared)
        if not self._free_slots or wanted > self.pages.available:
            self.pages.release(shared)
            return False
        sequence.slot = self._free_slots.pop()
        sequence.admissions += 1
        sequence.awaits_result = False
        sequence.pages = []
        self._append_pages(sequence, [*shared, *self.pages.take(wanted)])
        sequence.cursor = len(shared) * self.pages.size
        sequence.cached_pages = len(shared)
        sequence.page_hash = found[-1].hash if found else NO_PREFIX
        self.running.append(sequence)
        self._new.add(sequence)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        heapq.heappush(self.waiting, sequence)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._new.discard(sequence)
        self._free_slots.append(sequence.slot or 0)
        self.pages.release(sequence.pages)
        sequence.slot, sequence.pages, sequence.cursor, sequence.cached_pages = None, [], 0, 0
        sequence.page_hash = NO_PREFIX

    # --- the step

    def _chunks(self) -> dict[Sequence, int]:
        """How many tokens of which texts are prefilled in this step, the most urgent first."""
        left, chunks = self._prefill_tokens, dict[Sequence, int]()
        for sequence in sorted(each for each in self.running if not each.is_prefilled):
            size = min(left, len(sequence.tokens) - 1 - sequence.cursor)
            if size > 0:
                chunks[sequence] = size
                left -= size
        return chunks

    def _grow(self, ends: dict[Sequence, int], in_flight: int) -> bool:
        """Give every sequence that will decode the pages for its window; ``ends`` are cursors after prefill.

        Where pages are too few, the least urgent sequence is preempted.
        """
        ahead = in_flight * self._step_tokens

        def lacks(sequence: Sequence, spare: int = 0) -> int:
            cursor = ends.get(sequence, sequence.cursor)
            if cursor < len(sequence.tokens) - 1:
                return 0
            reach = cursor + ahead + self._margin
            if spare:
                most = len(sequence.request.prompt) + sequence.max_tokens + self._margin
                reach = max(reach, min(reach + spare * self.pages.size, most))
            return self.pages.needed(reach) - len(sequence.pages)

        if not any(lacks(each) > 0 for each in self.running):
            return True
        for sequence in sorted(self.running):
            while sequence.slot is not None and (missing := lacks(sequence, GROWTH)) > 0:
                if missing > self.pages.available:
                    missing = lacks(sequence)  # growing in advance is optional: do not preempt a sequence for it
                if missing <= self.pages.available:
                    self._append_pages(sequence, self.pages.take(max(0, missing)))
                    break
                if in_flight:
                    return False
                self._preempt(max(self.running))
        return True

    def _append_pages(self, sequence: Sequence, pages: list[int]) -> None:
        start = len(sequence.pages)
        sequence.pages += pages
        self._page_updates |= {(sequence.slot or 0, start + index): page for index, page in enumerate(pages)}
