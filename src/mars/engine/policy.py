"""Which window a step has: the one with the most tokens per second, by measured cost and observed acceptance.

What a step costs is measured at first need, and the steps that follow keep it up to date. What it yields is worked out
from how often drafts were accepted lately, offset by offset: a wide window pays for few sequences, a narrow one for
many. Where windows turn out slower than single tokens all the same, they stop for a while.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from mars.core.sequence import Sequence
from mars.method.windows import NARROW, Window

Cost = Callable[[int, Window], float]  # seconds of a step of so many sequences with this window
PRIOR = 0.7  # how often a draft is accepted if those before it were, before anything was observed
PRIOR_WEIGHT = 20.0  # how many observations the prior counts for
DECAY = 0.999  # what is left of an observation after another one; also after a step that observes nothing
FIRST_HIT = 0.3  # … the chance that the likeliest candidate is right; of others, over their place squared
NEWEST = 0.3  # weight of the newest step in the cost of its size, a geometric average
MOST_CHANGE = 2.0  # a step counts as at most so many times slower or faster than expected
STALE = 12  # steps after which the cost of a size that none of them had is no longer believed
TRIAL = 2  # steps of a trial: one that predicts drafts and one that verifies them
TRIAL_EVERY = (16, 512)  # fewest and most steps with single tokens between two trials
TRIAL_LOSS = 0.05  # of the time may be lost by trials
PROBE = 512  # steps with windows after which there is one of single tokens, so that its cost is known
FADES = 512  # steps of other windows in which what a window itself was seen to cost is forgotten
TOO_SLOW = 0.98  # of the speed of single tokens: then there are none but these for a while
PAUSE = 64  # steps of that while
CHECKED = 0.025  # weight of the newest step in the speed that is checked
SURPRISE = 1.25  # times what it is known to cost: a slower step is not compared with single tokens until costs follow
BINS = 8  # of the probabilities that masks give to their drafts
BIN_PRIOR = 4.0  # observations that the middle of a bin counts for
HOPE = 0.8  # the chance of a draft of which nothing is known: high enough that masks are tried
PROMISE = 0.8  # of its worth counts for a draft that is still to be predicted: the text may end before
LEARNING = 0.25  # weight of a sequence's newest drafts in what is expected of its next ones
WORTH_TRYING = 1.2  # tokens per forward that a chain must promise to be tried


class Acceptance:
    """How often the draft at each offset is accepted, given that the ones before it were.

    Of offsets that were not reached for long, little is known: they are taken to be like the one before where that does
    well, so that wider windows are tried when narrow ones bring all they can.
    """

    def __init__(self, offsets: int) -> None:
        self._accepted = [0.0] * offsets
        self._seen = [0.0] * offsets

    def observe(self, drafts: int, accepted: int) -> None:
        self.decay()
        for offset in range(min(drafts, accepted + 1, len(self._seen))):
            self._seen[offset] += 1
            self._accepted[offset] += offset < accepted

    def decay(self) -> None:
        """Observations get older, also in a step without drafts, so that these are tried again some day."""
        self._seen = [each * DECAY for each in self._seen]
        self._accepted = [each * DECAY for each in self._accepted]

    def rates(self) -> list[float]:
        """For each offset, the chance that it and all before it are accepted."""
        rates, so_far, rate = [], 1.0, PRIOR
        for accepted, seen in zip(self._accepted, self._seen, strict=True):
            rate = (accepted + PRIOR_WEIGHT * max(rate, PRIOR)) / (seen + PRIOR_WEIGHT)
            so_far *= rate
            rates.append(so_far)
        return rates


class CandidateHits:
    """How often a candidate is what the AR model writes in place of a rejected draft, by its place among them."""

    def __init__(self, most: int) -> None:
        self._hits = [0.0] * most
        self._seen = [0.0] * most

    def observe(self, fed: int, hit: int | None) -> None:
        """A draft was rejected in a window with ``fed`` candidates; ``hit``: which of them was right."""
        for number in range(min(fed, len(self._seen))):
            self._seen[number] = self._seen[number] * DECAY + 1
            self._hits[number] = self._hits[number] * DECAY + (number == hit)

    def rates(self) -> list[float]:
        """For each number of candidates, from none on, the chance that one of them is right."""
        rates = [0.0]
        for number, (hits, seen) in enumerate(zip(self._hits, self._seen, strict=True), 1):
            chance = (hits + PRIOR_WEIGHT * FIRST_HIT / number**2) / (seen + PRIOR_WEIGHT)
            rates.append(min(rates[-1] + chance, 1.0))
        return rates


class Calibration:
    """How often drafts are accepted to which masks gave this probability, given that those before them were."""

    def __init__(self) -> None:
        self._accepted = [BIN_PRIOR * (each + 0.5) / BINS for each in range(BINS)]
        self._seen = [BIN_PRIOR] * BINS

    def __call__(self, probability: float) -> float:
        at = self._bin(probability)
        return self._accepted[at] / self._seen[at]

    def observe(self, probability: float, accepted: bool) -> None:
        at = self._bin(probability)
        self._seen[at] += 1
        self._accepted[at] += accepted

    @staticmethod
    def _bin(probability: float) -> int:
        return min(int(probability * BINS), BINS - 1)


class Measurable(Protocol):
    """What the cost of steps is measured on: a runner."""

    def padded_size(self, num_seqs: int) -> int: ...
    def measured_steps(self, num_seqs: int) -> list[tuple[int, Window]]: ...
    def time_step(self, num_seqs: int, window: Window) -> float: ...


@dataclass(slots=True)
class CostPoint:
    """What steps of a size cost."""

    size: int  # tokens fed
    seconds: float
    unseen: int = 0  # steps of other sizes since the last one of this size


class StepCosts:
    """Seconds of a step, measured when they are first asked for: some sizes, and straight lines between those."""

    def __init__(self, runner: Measurable, turns: int = 1) -> None:
        """``turns``: how often each size is timed; the fastest counts, since other work only ever adds time."""
        self._runner = runner
        self._turns = turns
        self._points: dict[tuple[tuple[int, Window], ...], list[CostPoint]] = {}
        self._known: dict[int, list[CostPoint]] = {}  # the same by number of sequences: asked for many times a step
        self._ragged: dict[tuple[int, Window], float] = {}  # seconds: they say nothing of other steps

    def __call__(self, num_seqs: int, window: Window) -> float:
        points, size = self.measure(num_seqs), self._runner.padded_size(num_seqs)
        seconds = self._ragged.get((size, window))
        return interpolate(points, window.tokens(size)) if seconds is None else seconds

    def measure(self, num_seqs: int) -> list[CostPoint]:
        """The steps that are timed for so many sequences.

        Sizes are timed in turns, so that other work on the machine slows all of them down and not one.
        """
        if num_seqs in self._known:
            return self._known[num_seqs]
        steps = tuple(self._runner.measured_steps(num_seqs))
        if steps not in self._points:
            turns = [[self._runner.time_step(*step) for step in steps] for _ in range(self._turns)]
            best = dict(zip(steps, map(min, zip(*turns, strict=True)), strict=True))
            self._ragged |= {step: seconds for step, seconds in best.items() if step[1].budget}
            timed = {window.tokens(count): best[count, window] for count, window in steps if not window.budget}
            self._points[steps] = [CostPoint(*each) for each in sorted(timed.items())]
        self._known[num_seqs] = self._points[steps]
        return self._points[steps]

    def observe(self, num_seqs: int, window: Window, seconds: float) -> None:
        """Take into account what a step took, if costs were asked for before.

        A size that was not seen for long costs what it takes now; others not seen for long may have become as much
        cheaper.
        """
        points = self._known.get(num_seqs)
        if points is None:
            return
        size = window.tokens(self._runner.padded_size(num_seqs))
        change = seconds / interpolate(points, size)
        nearest = min(points, key=lambda point: abs(point.size - size))
        if nearest.unseen < STALE:
            nearest.seconds *= min(max(change, 1 / MOST_CHANGE), MOST_CHANGE) ** NEWEST
        else:
            for point in points:
                if point.unseen >= STALE:
                    point.seconds *= change if point is nearest else min(change, 1)
        for point in points:
            point.unseen += 1
        nearest.unseen = 0


class CapturedCosts(StepCosts):
    """Of captured steps, each of which is measured by itself, for texts of one length.

    Real steps say what all of so many sequences take more, as texts get longer or others use the GPU too, and slowly
    what a window does besides. A window not seen for long costs what it takes now.
    """

    def __init__(self, runner: Measurable) -> None:
        super().__init__(runner)
        self._more: dict[int, float] = {}  # seconds, by number of sequences with padding
        self._own: dict[int, dict[Window, float]] = {}  # … and by window, besides
        self._steps: dict[int, int] = {}  # of so many sequences
        self._seen: dict[tuple[int, Window], int] = {}  # the last of these steps with the window

    def __call__(self, num_seqs: int, window: Window) -> float:
        size, measured = self._runner.padded_size(num_seqs), super().__call__(num_seqs, window)
        more = self._more.get(size, 0.0) + self._own.get(size, {}).get(window, 0.0)
        return max(measured + more, measured / MOST_CHANGE)

    def observe(self, num_seqs: int, window: Window, seconds: float) -> None:
        if num_seqs not in self._known:
            return
        size = self._runner.padded_size(num_seqs)
        known = self(num_seqs, window)
        error = min(max(seconds, known / MOST_CHANGE), known * MOST_CHANGE) - known
        step = self._steps[size] = self._steps.get(size, 0) + 1
        unseen = step - self._seen.get((size, window), -STALE)
        self._seen[size, window] = step
        own = self._own.setdefault(size, {})
        for other in own.keys() - {window, Window()}:
            own[other] *= 1 - 1 / FADES  # one slow step shall not keep a window from being tried again
        if size not in self._more:
            self._more[size] = error
        elif unseen > STALE:
            own[window] = own.get(window, 0.0) + error
        else:
            self._more[size] += NEWEST * error
            own[window] = own.get(window, 0.0) + NEWEST / 10 * error


class SelfCheck:
    """Stops windows for a while where they turn out slower than single tokens would be."""

    def __init__(self, too_slow: float = TOO_SLOW) -> None:
        self._too_slow = too_slow
        self.speed = 1.0  # tokens per second lately, in terms of single tokens
        self.pause = 0  # steps left without windows

    def observe(self, speed: float | None) -> None:
        """After a step: its speed in terms of single tokens, or None if it had no choice or no window."""
        self.pause = max(self.pause - 1, 0)
        if speed is not None:
            self.speed += CHECKED * (speed - self.speed)
        if self.speed < self._too_slow:
            self.speed, self.pause = 1.0, PAUSE


def interpolate(points: SequenceOf[CostPoint], size: int) -> float:
    """The seconds at ``size`` on the line through the two nearest points."""
    if len(points) == 1:
        return points[0].seconds
    right = next((index for index, point in enumerate(points) if index and point.size >= size), len(points) - 1)
    low, high = points[right - 1], points[right]
    slope = (high.seconds - low.seconds) / (high.size - low.size)
    return max(low.seconds + slope * (size - low.size), min(low.seconds, high.seconds) / 2)


def tokens_per_forward(window: Window, rates: SequenceOf[float], hit: float = 0.0) -> float:
    """What a sequence emits per forward in the long run.

    A forward with drafts emits one token and what is accepted; the next one has drafts if a mask group followed the
    accepted ones. A forward without drafts emits one token, and the next one has drafts. Where a draft is rejected, one
    of the candidates is right with the chance ``hit``: the first draft after it is certain.
    """
    if not window.groups:
        return 1.0
    rates = rates[: window.drafts]
    behind_candidate = [1.0, *rates[:-1]] if rates else []
    again, hits = _drafted(window, rates, hit)
    again_behind, hits_behind = _drafted(window, behind_candidate, hit)
    usual, behind = 1.0, hits / max(1 - hits_behind, 1e-9)  # forwards with drafts, in proportion
    without = (1 - again - hits) + behind * (1 - again_behind - hits_behind)
    emitted = usual * sum(rates) + behind * sum(behind_candidate)
    return 1 + emitted / (usual + behind + without)


def _drafted(window: Window, rates: SequenceOf[float], hit: float) -> tuple[float, float]:
    """After a forward with drafts, the chances that masks drafted the next ones, and that they follow a candidate."""
    misses = [before - after for before, after in zip([1.0, *rates], rates, strict=False)]
    all_accepted = 1 - sum(misses)
    return all_accepted + (1 - hit) * sum(misses[: window.groups - 1]), hit * sum(misses)


def fastest(
    windows: SequenceOf[Window], rates: SequenceOf[float], num_seqs: int, cost: Cost, hits: SequenceOf[float] = (0.0,)
) -> Window:
    """The window with the most tokens per second; the first of equals. ``hits``: see `CandidateHits.rates`."""

    def speed(window: Window) -> float:
        hit = hits[min(window.candidates, len(hits) - 1)]
        return tokens_per_forward(window, rates, hit) / cost(num_seqs, window)

    return max(windows, key=speed)


class WindowPolicy:
    """Chooses the window of each step."""

    def __init__(
        self,
        block_size: int,
        default_groups: int,
        cost: Cost,
        *,
        explores: bool = False,
        checks: bool = False,
        most_drafts: int = 0,
        candidates: int = 0,
    ) -> None:
        """``default_groups``: mask groups of requests that name no window and whose text depends on it.

        ``explores``: try a chain now and then while single tokens seem faster, as others use the machine too.
        ``checks``: stop windows that turn out slower than single tokens, of which there is a step now and then.
        ``most_drafts``: of a window with what was looked up, if that is more than masks draft. ``candidates``: most of
        a window.
        """
        self.acceptance = Acceptance(max(block_size - 1, most_drafts))
        self._most_drafts = most_drafts
        self._default_groups = default_groups
        self._candidates = candidates
        self.candidate_hits = CandidateHits(candidates)
        self._cost = cost
        self._explores = explores
        self._pause = TRIAL_EVERY[0]  # steps with single tokens between two trials
        self._until_trial = self._pause  # below zero during a trial
        self._checks = checks
        self.check = SelfCheck()
        self._until_probe = PROBE
        self._has_choice = False  # in the last step: did all sequences take any window?
        self._host_seconds = 0.0

    def choose(self, sequences: SequenceOf[Sequence], host_seconds: float = 0.0) -> Window:
        """What some sequence needs, or else what is fastest for this many.

        ``host_seconds``: what the host needs for a step while the device runs another; no step takes less.
        """
        needed, free = Window(), 1
        for sequence in sequences:
            takes_any = takes_any_window(sequence)
            if takes_any and sequence.request.block_size > free:
                free = sequence.request.block_size
            window = self._needed(sequence, takes_any)
            if window is not None:
                needed |= window
        self._has_choice, self._host_seconds = free > 1 and needed == Window(), host_seconds
        if free < 2:
            return needed
        if self._checks and self._has_choice and (self.check.pause or self._probes()):
            return needed
        windows = [needed, *(needed | window for window in Window.useful(free, self._candidates))]
        if self._most_drafts:
            windows += [each | Window(self._most_drafts) for each in windows[1:]]

        def cost(num_seqs: int, window: Window) -> float:
            return max(self._cost(num_seqs, window), host_seconds)

        rates = self.acceptance.rates()
        best = fastest(windows, rates, len(sequences), cost, self.candidate_hits.rates())
        chain = needed | Window.of(1, min(free, NARROW))
        if self._explores and self._tries_chain(best, chain, rates, len(sequences)):
            return chain
        return best

    def _probes(self) -> bool:
        """Is it time for a step of single tokens?"""
        self._until_probe = PROBE if self._until_probe <= 0 else self._until_probe - 1
        return self._until_probe == 0

    def observe_step(self, windows: SequenceOf[Window], tokens: int, seconds: float) -> None:
        """What a step took that emitted so many tokens, if costs follow real steps."""
        window, count = windows[0], len(windows)
        speed = None
        if self._has_choice and window.masks and seconds < SURPRISE * self._cost(count, window):
            alone, taken = (max(each, self._host_seconds) for each in (self._cost(count, Window()), seconds))
            speed = tokens / taken * alone / count
        elif not window.masks:
            self._until_probe = PROBE
        self.check.observe(speed)

    def _tries_chain(self, best: Window, chain: Window, rates: SequenceOf[float], num_seqs: int) -> bool:
        """While single tokens seem fastest, is it time to see what a chain costs and how many drafts are accepted?

        The tokens of a trial count like any others. The more it took, the later the next one, but at most twice as late
        as the one before: it may have been slow because of other work.
        """
        fewest, most = TRIAL_EVERY
        if best.groups:
            if self._until_trial < 0:
                self._until_trial = self._pause = fewest
            return False
        if tokens_per_forward(chain, rates) < WORTH_TRYING:
            return False
        if self._until_trial <= -TRIAL:
            lost = TRIAL * (self._cost(num_seqs, chain) / self._cost(num_seqs, best) - 1)  # steps, if no draft passes
            self._pause = int(min(max(lost / TRIAL_LOSS, fewest), 2 * self._pause, most))
            self._until_trial = self._pause
        self._until_trial -= 1
        return self._until_trial < 0

    def expects(self, num_seqs: int, window: Window) -> tuple[float, float] | None:
        """Tokens of all sequences together and seconds, of a step with this window; None where windows differ."""
        hits = self.candidate_hits.rates()
        hit = hits[min(window.candidates, len(hits) - 1)]
        tokens = num_seqs * tokens_per_forward(window, self.acceptance.rates(), hit)
        return tokens, max(self._cost(num_seqs, window), self._host_seconds)

    def observe_drafts(self, sequence: Sequence, drafts: int, accepted: int) -> None:  # noqa: ARG002, all are alike
        """How many of the drafts fed were accepted."""
        self.acceptance.observe(drafts, accepted)

    def observe_predictions(self, sequence: Sequence, probabilities: list[float]) -> None:
        """What masks gave to the sequence's new drafts, if that is known."""

    def widest(self, sequence: Sequence) -> Window:
        """Of the sequence's windows."""
        block_size = sequence.request.block_size
        if takes_any_window(sequence):
            return Window.of(block_size, block_size, self._candidates)
        return sequence.request.window or Window.of(self._default_groups, block_size)

    def _needed(self, sequence: Sequence, takes_any: bool) -> Window | None:
        """The smallest window that the sequence's next step can have; None: any will do."""
        block_size, dial = sequence.request.block_size, sequence.dial
        keeps_drafts = not takes_any or sequence.drafts_emitted  # drafts that wait may be dropped; emitted ones not
        has_drafts = (sequence.drafts and keeps_drafts) or sequence.trusts_masks
        if not has_drafts and (takes_any or not dial.uses_masks):
            return None
        needed = Window(drafts=max(block_size - 1, len(sequence.drafts))) if has_drafts else Window()
        if dial.uses_masks and not takes_any:
            verifies = dial.verifies or not sequence.drafts_emitted  # drafts made before the dial was turned
            needed |= self.widest(sequence) if verifies else Window.of(1, block_size)
        return needed


def takes_any_window(sequence: Sequence) -> bool:
    """Is the text of the sequence the same in every window?"""
    return sequence.dial.kind == "exact" and sequence.request.window is None
