"""Which window a step has: the one with the most tokens per second, by measured cost and observed acceptance.

What a step costs is measured once. What it yields is worked out from how often drafts were accepted lately, offset by
offset: a wide window pays for few sequences, a narrow one for many.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from mars.core.sequence import Sequence
from mars.method.windows import Window

Cost = Callable[[int, Window], float]  # seconds of a step of so many sequences with this window
PRIOR = 0.7  # how often a draft is accepted if those before it were, before anything was observed
PRIOR_WEIGHT = 20.0  # how many observations the prior counts for
DECAY = 0.999  # what is left of an observation after another one; also after a step that observes nothing


class Acceptance:
    """How often the draft at each offset is accepted, given that the ones before it were."""

    def __init__(self, offsets: int) -> None:
        self._accepted = [0.0] * offsets
        self._seen = [0.0] * offsets

    def observe(self, drafts: int, accepted: int) -> None:
        for offset in range(min(drafts, accepted + 1)):
            self._seen[offset] = self._seen[offset] * DECAY + 1
            self._accepted[offset] = self._accepted[offset] * DECAY + (offset < accepted)

    def decay(self) -> None:
        """A step without drafts: observations get older, so that drafts are tried again some day."""
        self._seen = [each * DECAY for each in self._seen]
        self._accepted = [each * DECAY for each in self._accepted]

    def rates(self) -> list[float]:
        """For each offset, the chance that it and all before it are accepted."""
        rates, so_far = [], 1.0
        for accepted, seen in zip(self._accepted, self._seen, strict=True):
            so_far *= (accepted + PRIOR_WEIGHT * PRIOR) / (seen + PRIOR_WEIGHT)
            rates.append(so_far)
        return rates


class Measurable(Protocol):
    """What the cost of steps is measured on: a runner."""

    def padded_size(self, num_seqs: int) -> int: ...
    def measured_steps(self, num_seqs: int) -> list[tuple[int, Window]]: ...
    def time_step(self, num_seqs: int, window: Window) -> float: ...


class StepCosts:
    """Seconds of a step, measured when they are first asked for: some sizes, and straight lines between those."""

    def __init__(self, runner: Measurable) -> None:
        self._runner = runner
        self._points: dict[tuple[tuple[int, Window], ...], list[tuple[int, float]]] = {}

    def __call__(self, num_seqs: int, window: Window) -> float:
        return interpolate(self.measure(num_seqs), self._runner.padded_size(num_seqs) * window.width)

    def measure(self, num_seqs: int) -> list[tuple[int, float]]:
        """Tokens fed and seconds of the steps that are timed for so many sequences."""
        steps = tuple(self._runner.measured_steps(num_seqs))
        if steps not in self._points:
            timed = {count * window.width: self._runner.time_step(count, window) for count, window in steps}
            self._points[steps] = sorted(timed.items())
        return self._points[steps]


def interpolate(points: list[tuple[int, float]], size: int) -> float:
    """The value at ``size`` on the line through the two nearest points."""
    if len(points) == 1:
        return points[0][1]
    right = next((index for index, (x, _) in enumerate(points) if index and x >= size), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return max(y0 + (y1 - y0) * (size - x0) / (x1 - x0), min(y0, y1) / 2)


def tokens_per_forward(window: Window, rates: SequenceOf[float]) -> float:
    """What a sequence emits per forward in the long run.

    A forward with drafts emits one token and what is accepted; the next one has drafts if a mask group followed the
    accepted ones. A forward without drafts emits one token, and the next one has drafts.
    """
    if not window.groups:
        return 1.0
    rates = rates[: window.masks]
    ends = [before - after for before, after in zip([1.0, *rates], [*rates, 0.0], strict=True)]
    drafted_again = ends[-1] + sum(ends[: min(window.groups - 1, len(rates))])
    with_drafts = 1 / (2 - drafted_again)
    return 1 + with_drafts * sum(rates)


def fastest(candidates: SequenceOf[Window], rates: SequenceOf[float], num_seqs: int, cost: Cost) -> Window:
    """The window with the most tokens per second; the first of equals."""
    return max(candidates, key=lambda window: tokens_per_forward(window, rates) / cost(num_seqs, window))


class WindowPolicy:
    """Chooses the window of each step."""

    def __init__(self, block_size: int, default_groups: int, cost: Cost) -> None:
        """``default_groups``: mask groups of requests that name none and whose text depends on the window."""
        self.acceptance = Acceptance(block_size - 1)
        self._default_groups = default_groups
        self._cost = cost

    def choose(self, sequences: SequenceOf[Sequence], host_seconds: float = 0.0) -> Window:
        """What some sequence needs, or else what is fastest for this many.

        ``host_seconds``: what the host needs for a step while the device runs another; no step takes less.
        """
        needed, free = Window(), 1
        for sequence in sequences:
            takes_any = _takes_any_window(sequence)
            if takes_any and sequence.request.block_size > free:
                free = sequence.request.block_size
            window = self._needed(sequence, takes_any)
            if window is not None:
                needed |= window
        if free < 2:
            return needed
        candidates = [needed, *(needed | Window.of(groups, free) for groups in range(1, free + 1))]

        def cost(num_seqs: int, window: Window) -> float:
            return max(self._cost(num_seqs, window), host_seconds)

        return fastest(candidates, self.acceptance.rates(), len(sequences), cost)

    def groups(self, sequence: Sequence) -> int:
        """Most mask groups of the sequence's window."""
        block_size = sequence.request.block_size
        if _takes_any_window(sequence):
            return block_size
        return max(1, min(sequence.request.mask_groups or self._default_groups, block_size))

    def _needed(self, sequence: Sequence, takes_any: bool) -> Window | None:
        """The smallest window that the sequence's next step can have; None: any will do."""
        block_size, dial = sequence.request.block_size, sequence.dial
        keeps_drafts = not takes_any or sequence.drafts_emitted  # drafts that wait may be dropped; emitted ones not
        has_drafts = (sequence.drafts and keeps_drafts) or sequence.trusts_masks
        if not has_drafts and (takes_any or not dial.uses_masks):
            return None
        needed = Window(drafts=block_size - 1) if has_drafts else Window()
        if dial.uses_masks and not takes_any:
            verifies = dial.verifies or not sequence.drafts_emitted  # drafts made before the dial was turned
            needed |= Window.of(self.groups(sequence) if verifies else 1, block_size)
        return needed


def _takes_any_window(sequence: Sequence) -> bool:
    """Is the text of the sequence the same in every window?"""
    return sequence.dial.kind == "exact" and sequence.request.mask_groups is None
