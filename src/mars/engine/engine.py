"""The engine: requests in, tokens out, many at a time. A step is schedule, run, decide, commit.

Rows join and leave at any step. Their texts are cached in pages, shared where they begin alike. When pages run out,
the least urgent row gives its own back and waits; what it wrote is kept, what it cached is computed again.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from mars.decoding.decoder import check_request
from mars.decoding.grammar import lexicon_of
from mars.decoding.request import Answer, Generation, Request
from mars.engine.cache import PagedCache, layer_shapes
from mars.engine.choice import Acceptance, Cost, best_layout
from mars.engine.costs import measured_costs
from mars.engine.graphs import GraphRunner
from mars.engine.layout import Layout
from mars.engine.pages import Pages
from mars.engine.rows import Row
from mars.engine.runner import Batch, Chunk, Result, Runner, Terms
from mars.engine.state import Place, State
from mars.errors import MarsError
from mars.method.acceptance import Dial, DialFeatures
from mars.method.sampling import token_bias
from mars.method.windows import Shape
from mars.models.checkpoint import Checkpoint

PAGE_SIZE = 16
GROWTH = 8
"""Pages that rows get at a time where there are enough, so that the device need not be told of each"""
CPU_MEMORY = 2 * 2**30
GPU_SHARE = 0.5


class QueueFullError(MarsError):
    """No more requests are taken for now."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched and whose outcome the host has not seen yet."""

    rows: list[Row]
    visits: list[int]
    terms: list[Terms]
    layout: Layout
    result: Result


class Engine:
    """Decodes requests together. `add` one, call `step` until its answer is finished."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        rows: int = 64,
        memory: int | float | None = None,
        page_size: int = PAGE_SIZE,
        prefill_tokens: int | None = None,
        max_waiting: int | None = None,
        block_size: int | None = None,
        ahead: int | None = None,
        cost: Cost | None = None,
    ) -> None:
        """``rows`` run at once. ``memory`` for the cache: bytes, or a share of what is free on the device.

        ``prefill_tokens`` of prompts are read per step, so that a long one does not hold up the others; by default
        512, and 2048 on a GPU. Requests may ask for blocks of at most ``block_size``, by default the model's own. The
        device may be ``ahead`` of the host by so many steps: one on a GPU, which then never waits. ``cost``: seconds of
        a forward by rows and layout; measured, if it is not given.
        """
        on_gpu = checkpoint.device.type == "cuda"
        if prefill_tokens is None:
            prefill_tokens = 2048 if on_gpu else 512
        shapes = layer_shapes(checkpoint)
        per_page = page_size * sum(shape.bytes_per_token for shape in shapes)
        pages = _bytes(memory, checkpoint.device) // per_page
        if rows < 1 or prefill_tokens < 1 or pages < 2:
            raise MarsError("the engine needs at least one row, one prefill token, and memory for two pages")
        self.checkpoint = checkpoint
        self.pages = Pages(pages, page_size)
        trained = checkpoint.settings.block_size if checkpoint.settings else 1
        self.block_size = max(1, trained if block_size is None else block_size)
        self.acceptance = Acceptance(self.block_size - 1)
        self._default = Shape(None) if checkpoint.device.type == "cuda" else Shape()  # there, width costs little
        self._margin = Layout.of(Shape(None), self.block_size).width
        """Places behind a row's text that the widest window of a step may need"""
        self._ahead = int(on_gpu) if ahead is None else ahead
        most = (checkpoint.context or pages * page_size) + self._margin + self._ahead * self.block_size
        longest = min(pages, -(-most // page_size))
        self._state = State(rows, self.block_size - 1, longest, checkpoint.vocabulary, checkpoint.device)
        cache = PagedCache(shapes, pages, page_size, checkpoint.device)
        self._runner = Runner(checkpoint, self._state, cache)
        if on_gpu:
            self._runner = GraphRunner(checkpoint, self._state, cache, self.block_size)
            cost = cost or self._runner.cost
        self.steps = 0
        """Forwards in which rows decoded"""
        self.places = 0
        """Sum of their windows' widths"""
        self._cost = cost
        self._waited = 0.0
        """Seconds that this step has waited for the device"""
        self._host = math.inf
        """Seconds that a step takes without waiting, lately"""
        self._prefill_tokens = prefill_tokens
        self._max_waiting = max_waiting
        self._flights: deque[Flight] = deque()
        self._waiting: list[Row] = []
        self._running: list[Row] = []
        self._slots = list(range(rows, 0, -1))
        self._numbers = count()
        self._batch: tuple[list[Terms], Batch] | None = None
        self._moved: list[tuple[int, int, int]] = []
        """Entries of the page tables that the device does not know yet"""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def longest(self) -> int:
        """Tokens that the cache has room for in one request, prompt and answer together"""
        return (self.pages.count - 1) * self.pages.size - self._margin

    def warm_up(
        self, rows: int | None = None, *, dials: Sequence[Dial] = (), sampled: bool = False
    ) -> Iterator[tuple[int, int]]:
        """Get ready for up to so many rows, all by default, as far as that can be done ahead of time.

        Beside ``one-token`` and ``exact``, for these ``dials``; ``sampled``: also for requests with a temperature.
        Yields how much is done, and of how much.
        """
        if isinstance(self._runner, GraphRunner):
            most = min(rows or self._state.slots, self._state.slots)
            yield from self._runner.warm_up(most, self._prefill_tokens, self._loose_steps(dials), sampled=sampled)

    def _loose_steps(self, dials: Sequence[Dial]) -> list[tuple[Layout, DialFeatures]]:
        """What these dials need besides: their own windows, and those in which rows turn to them or back."""
        tree = Layout.of(self._default, self.block_size)
        steps = {(Layout(trunk=self.block_size), DialFeatures()): None} if self.block_size > 1 else {}
        for dial in dials:
            if dial.is_loose:
                features = DialFeatures.of([dial])
                steps |= {(tree, features): None}  # also of drafts that were made before the dial was turned
                steps |= {} if dial.checks else {(Layout.of(Shape(), self.block_size), features): None}
        return list(steps)

    def add(self, request: Request, priority: int = 0) -> Answer:
        """Queue a request; the smaller its priority, the sooner it runs. The answer grows as the engine steps."""
        check_request(self.checkpoint, request)
        if request.block_size > self.block_size:
            raise MarsError(f"block_size {request.block_size} is more than the engine's {self.block_size}")
        if self._max_waiting is not None and len(self._waiting) >= self._max_waiting:
            raise QueueFullError(f"{len(self._waiting)} requests are waiting already: try again later")
        checkpoint = self.checkpoint
        answer = Answer(request, checkpoint.tokenizer, checkpoint.end_tokens, checkpoint.context)
        guide = None if request.grammar is None else lexicon_of(self.checkpoint).guide(request.grammar)
        row = Row(answer, request.drawing(), (priority, next(self._numbers)), self._default, guide=guide)
        needs = len(row.text) + answer.limit
        if needs > self.longest:
            raise MarsError(
                f"the request may need {needs} tokens of cache, but there is room for {self.longest}: "
                "ask for fewer new tokens, shorten the prompt, or give the engine more memory"
            )
        heapq.heappush(self._waiting, row)
        return answer

    def cancel(self, answer: Answer) -> None:
        """Stop a request at once, if it is not finished; its answer keeps what has come out so far."""
        for row in [*self._waiting, *self._running]:
            if row.answer is answer:
                answer.cancel()
                self._leave(row)
                self._waiting = [each for each in self._waiting if each is not row]
                heapq.heapify(self._waiting)

    def finish(self, answers: Sequence[Answer]) -> list[Generation]:
        """Step until these answers are finished."""
        left = answers
        while left := [answer for answer in left if answer.finish_reason is None]:
            self.step()
        return [answer.generation() for answer in answers]

    def step(self) -> None:
        """Read some of the prompts, then let every row that has read its own take a step."""
        started, self._waited = time.perf_counter(), 0.0
        self._admit()
        self._prefill()
        rows = self._ready()
        if rows:
            self._launch(rows)
        while len(self._flights) > (self._ahead if rows else 0):
            self._land()
        self._host = min(time.perf_counter() - started - self._waited, self._host * 1.05)

    def _launch(self, rows: list[Row]) -> None:
        self.steps += 1
        layout = self._layout(rows)
        self.places += layout.width
        terms = [row.terms() for row in rows]
        self._restrict(rows, layout)
        reach = max(self._furthest(row) for row in rows) + layout.width
        result = self._runner.decode(self._batch_of(terms), layout, reach)
        self._flights.append(Flight(rows, [row.visit for row in rows], terms, layout, result))

    def _restrict(self, rows: Sequence[Row], layout: Layout) -> None:
        """Tell the device what the grammars of rows allow them."""
        guided = [(row, row.guide) for row in rows if row.guide is not None]
        if not guided:
            return
        allowed = lexicon_of(self.checkpoint).allowed([(guide, row.claims) for row, guide in guided], layout.trunk)
        self._state.restrict([row.slot or 0 for row, _ in guided], allowed)
        for row, _ in guided:
            row.waits = True

    def _furthest(self, row: Row) -> int:
        """How far the row's cursor may be by now."""
        return row.cursor + len(self._flights) * self.block_size

    def _land(self) -> None:
        """Commit the outcome of the oldest flight; rows that have left since then do not take part."""
        flight, started = self._flights.popleft(), time.perf_counter()
        records = flight.result.read()
        self._waited += time.perf_counter() - started
        checked = False
        there = zip(flight.rows, flight.visits, flight.terms, records, strict=True)
        for row, visit, terms, record in there:
            if row.slot is None or row.visit != visit:
                continue
            if outcome := row.commit(terms, flight.layout, record):
                self.acceptance.observe(*outcome)
                checked = True
            self._learn(row)
            if row.answer.finish_reason is not None:
                self._leave(row)
        if not checked:
            self.acceptance.fade()

    def check(self) -> None:
        """Raise if a page is lost or in two places, or a slot is."""
        self.pages.check([row.pages for row in self._running])
        slots = sorted([*self._slots, *(row.slot or 0 for row in self._running)])
        if slots != list(range(1, self._state.slots + 1)):
            raise RuntimeError("a slot is lost, or in two places at once")

    # --- who runs

    def _admit(self) -> None:
        """Let waiting rows in while there is room, the most urgent first; they may push out less urgent ones."""
        while self._waiting:
            row = self._waiting[0]
            if self._is_being_read(row):
                return
            if self._enter(row):
                heapq.heappop(self._waiting)
                continue
            least = max(self._running, default=None)
            if least is None or least.urgency[0] <= row.urgency[0]:
                return
            self._preempt_or_land(least)

    def _is_being_read(self, row: Row) -> bool:
        """Does a running row read just what this one would have to read next? Then its pages will do for both."""
        reading = [each for each in self._running if not each.is_prefilled]
        if not reading:
            return False
        end = (len(self.pages.find(row.text[:-1])) + 1) * self.pages.size
        return end < len(row.text) and any(
            each.cursor < end < len(each.text) and each.text[:end] == row.text[:end] for each in reading
        )

    def _enter(self, row: Row) -> bool:
        """Give the row a slot and pages for its text and a window, sharing what is known; False if there are none."""
        found = self.pages.find(row.text[:-1])
        shared = self.pages.share(found)
        wanted = self._pages_for(len(row.text) + self._margin) - len(shared)
        if not self._slots or wanted > self.pages.available:
            self.pages.release(shared)
            return False
        row.slot = self._slots.pop()
        row.visit += 1
        row.waits = False
        row.pages = []
        self._grow(row, [*shared, *self.pages.take(wanted)])
        row.cursor = len(shared) * self.pages.size
        row.learnt = len(shared)
        row.content = found[-1].number if found else row.content
        self._running.append(row)
        if row.is_prefilled:
            self._put([row])
        return True

    def _preempt_or_land(self, row: Row) -> None:
        """Send a row back to wait; it keeps its text and its claims, so these must be known first."""
        if self._flights:
            self._land()
        else:
            self._leave(row)
            heapq.heappush(self._waiting, row)

    def _leave(self, row: Row) -> None:
        if row.slot is None:
            return
        self._running.remove(row)
        self._slots.append(row.slot)
        self.pages.release(row.pages)
        row.slot, row.pages, row.cursor, row.learnt, row.content = None, [], 0, 0, 0

    def _ready(self) -> list[Row]:
        """Rows that can take a step, with pages for it; where there are too few, the least urgent row leaves."""
        if any(self._lacks(row) > 0 for row in self._running):
            for row in sorted(self._running):
                while row.slot is not None and (missing := self._lacks(row, GROWTH)) > 0:
                    if missing > self.pages.available:
                        missing = self._lacks(row)  # what is spare is not worth a row
                    if missing <= self.pages.available:
                        self._grow(row, self.pages.take(max(0, missing)))
                        break
                    self._preempt_or_land(max(self._running))
        self._tell_pages()
        return [row for row in self._running if row.is_prefilled and not row.waits]

    def _lacks(self, row: Row, spare: int = 0) -> int:
        """How many pages the row's next windows need that it has not; with ``spare`` ones, if it may fill them."""
        if not row.is_prefilled:
            return 0
        reach = self._furthest(row) + self._margin
        if spare:
            reach = max(reach, min(reach + spare * self.pages.size, row.most + self._margin))
        return self._pages_for(reach) - len(row.pages)

    def _tell_pages(self) -> None:
        if self._moved:
            self._state.set_pages(self._moved)
            self._moved = []

    def _grow(self, row: Row, pages: list[int]) -> None:
        start = len(row.pages)
        row.pages += pages
        self._moved += [(row.slot or 0, start + index, page) for index, page in enumerate(pages)]

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pages.size)

    # --- what runs

    def _prefill(self) -> None:
        """Read prompts, the most urgent first, as many tokens as a step may."""
        left, chunks = self._prefill_tokens, list[tuple[Row, Chunk]]()
        for row in sorted(row for row in self._running if not row.is_prefilled):
            size = min(left, len(row.text) - 1 - row.cursor)
            if size > 0 and row.slot is not None:
                tokens = row.text[row.cursor : row.cursor + size]
                chunks.append((row, Chunk(row.slot, row.cursor, tokens)))
                left -= size
        if not chunks:
            return
        self._tell_pages()
        self._runner.prefill([chunk for _, chunk in chunks])
        for row, chunk in chunks:
            row.cursor += len(chunk.tokens)
            self._learn(row)
        self._put([row for row, _ in chunks if row.is_prefilled])

    def _put(self, rows: Sequence[Row]) -> None:
        """Tell the device where rows stand that begin to decode."""
        if rows:
            self._state.put([Place(row.slot or 0, row.cursor, row.text[-1], row.claims, row.settled) for row in rows])
        for row in rows:
            if row.sampling.penalises:
                prompt = len(row.request.prompt)
                self._state.remember(row.slot or 0, row.text[:prompt], row.text[prompt:])
            biased = bool(row.sampling.logit_bias)
            bias = token_bias([row.sampling], self.checkpoint.vocabulary, None)[0] if biased else None
            self._state.favour(row.slot or 0, bias)
            self._state.restrict([row.slot or 0], None)

    def _layout(self, rows: Sequence[Row]) -> Layout:
        """The window of this step: what some row needs, or else what is fastest for this many rows."""
        needed = Layout()
        for demand in {row.demand() for row in rows}:
            needed |= demand or Layout()
        choosers = [row.request.block_size for row in rows if row.chooses_window]
        if not choosers or max(choosers) < 2:
            return needed
        shapes = [Shape(groups) for groups in (1, *range(2, max(choosers)), None)]
        candidates = [needed, *(needed | Layout.of(shape, max(choosers)) for shape in shapes)]
        if self._cost is None:
            self._cost = measured_costs(self._runner, self._state, self.block_size)
        return best_layout(candidates, self.acceptance.rates(), len(rows), self._seconds)

    def _seconds(self, rows: int, layout: Layout) -> float:
        """What a step costs: the device's time, and no less than the host's, if the one works ahead of the other."""
        seconds = self._cost(rows, layout) if self._cost else 0.0
        return max(seconds, self._host) if self._ahead and self._host < math.inf else seconds

    def _batch_of(self, terms: list[Terms]) -> Batch:
        if self._batch is None or self._batch[0] != terms:
            self._batch = terms, Batch.of(terms, self.checkpoint.vocabulary)
        return self._batch[1]

    def _learn(self, row: Row) -> None:
        """Make full pages known, for others to share."""
        size = self.pages.size
        while (row.learnt + 1) * size <= row.cursor:
            start = row.learnt * size
            row.content = self.pages.learn(row.content, row.text[start : start + size], row.pages[row.learnt])
            row.learnt += 1


def _bytes(memory: int | float | None, device: torch.device) -> int:
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        return int(free * GPU_SHARE if memory is None else memory if memory > 1 else free * memory)
    return int(CPU_MEMORY if memory is None else memory)


def memory_for(checkpoint: Checkpoint, rows: int, length: int) -> int:
    """Bytes with which an engine never runs out of pages, if no row's text is longer than ``length``."""
    block_size = checkpoint.settings.block_size if checkpoint.settings else 1
    per_token = sum(shape.bytes_per_token for shape in layer_shapes(checkpoint))
    return rows * (length + block_size**2 + 4 * PAGE_SIZE) * per_token
