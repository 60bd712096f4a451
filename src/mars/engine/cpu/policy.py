"""What each sequence feeds in a step on a CPU: as many drafts and masks as pay for themselves.

A CPU is bound by arithmetic from a few tokens on, so every token fed costs something. A draft is worth the chance that
it is accepted, which its own probability tells; masks are worth the drafts that they predict, if everything before them
is accepted. Both are weighed against the tokens that the same time would bring otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from mars.core.sequence import Sequence
from mars.engine.policy import WindowPolicy, takes_any_window
from mars.method.windows import Window

NEWEST = 0.1  # weight of the newest step in what steps cost and bring lately
MOST_CHANGE = 3.0  # a step counts as at most so many times slower or faster than expected
MOST_MEASURED = 8  # sequences in steps that are timed: more take long
MEASURE_AGAIN = 600.0  # seconds after which prices are measured again
MEASURE_SHARE = 0.01  # of the time may go into that
BINS = 8  # of the probabilities that masks give to their drafts
BIN_PRIOR = 4.0  # observations that the middle of a bin counts for
HOPE = 0.8  # the chance of a draft of which nothing is known: high enough that masks are tried
LEARNING = 0.25  # weight of the newest drafts in what is expected of a sequence's next ones
FORGETTING = 0.02  # … of hope, after a step without masks: text changes, and they are tried again some day
TOO_SLOW = 0.97  # of the speed of single tokens: then there are no masks for a while
PAUSE = 64  # steps of that while


class Prices(NamedTuple):
    """Seconds of a step, and what is added to it."""

    step: float  # of single tokens
    draft: float
    masks: float  # if there are any, whatever their number
    mask: float

    def of(self, drafts: int, masks: int) -> float:
        return self.step + drafts * self.draft + (self.masks + masks * self.mask if masks else 0.0)


@dataclass(slots=True)
class StepPrices:
    """Prices by number of sequences: measured when they are asked for, again after a while, corrected by real steps."""

    time_step: Callable[[int, Window, int], float]  # seconds, by sequences, window, and drafts of each sequence
    block_size: int
    turns: int = 3  # the fastest counts, since other work only ever adds time
    _measured: dict[int, tuple[float, Prices]] = field(default_factory=dict)  # valid until then
    _lately: float = 1.0  # what steps took lately over what was measured
    _masks: float = 1.0  # … those with masks, besides that

    def __call__(self, sequences: int) -> Prices:
        known = self._nearest(sequences)
        if known not in self._measured or time.monotonic() > self._measured[known][0]:
            started, prices = time.monotonic(), self._measure(known)
            took = time.monotonic() - started
            self._measured[known] = started + took + max(MEASURE_AGAIN, took / MEASURE_SHARE), prices
            self._lately = self._masks = 1.0
        step, draft, masks, mask = (self._lately * each for each in self._measured[known][1])
        step += (sequences - known) * draft  # a token costs the same, whosever it is
        step = max(step, 1e-9)
        return Prices(step, draft, max((step + masks) * self._masks - step, 0.0), mask * self._masks)

    def knows(self, sequences: int) -> bool:
        return self._nearest(sequences) in self._measured

    def _nearest(self, sequences: int) -> int:
        """The number of sequences that is measured in the place of this one: a power of two, and not too many."""
        return min(1 << (sequences - 1).bit_length(), MOST_MEASURED)

    def _measure(self, sequences: int) -> Prices:
        most = self.block_size - 1
        if not most:
            return Prices(self.time_step(sequences, Window(), 0), 0.0, 0.0, 0.0)
        kinds = [(Window(), 0), (Window(most), most), (Window(0, 1, 1), 0), (Window(0, 1, most), 0)]
        turns = [[self.time_step(sequences, *each) for each in kinds] for _ in range(self.turns)]
        step, drafts, one_mask, masks = (min(each) for each in zip(*turns, strict=True))
        mask = max(masks - one_mask, 0.0) / (sequences * max(most - 1, 1))
        fixed = max(one_mask - step - sequences * mask, 0.0)
        return Prices(step, max(drafts - step, 0.0) / (sequences * most), fixed, mask)

    def observe(self, sequences: int, drafts: int, masks: int, seconds: float) -> None:
        change = seconds / self(sequences).of(drafts, masks)
        change = min(max(change, 1 / MOST_CHANGE), MOST_CHANGE) ** NEWEST
        if masks:
            self._masks *= change
        else:
            self._lately *= change
            self._masks **= 1 - NEWEST / 10  # not seen for long: they may have become cheaper


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


class Outlook:
    """What is expected of a sequence's drafts: for each offset, the chance that it and all before it are accepted."""

    def __init__(self, offsets: int) -> None:
        self._hope = [HOPE ** (offset + 1) for offset in range(offsets)]
        self.survival = list(self._hope)

    def learn(self, survival: SequenceOf[float]) -> None:
        """Of newer drafts."""
        self._approach(survival, LEARNING)

    def forget(self) -> None:
        self._approach(self._hope, FORGETTING)

    def _approach(self, survival: SequenceOf[float], weight: float) -> None:
        for offset, each in enumerate(survival):
            self.survival[offset] += weight * (each - self.survival[offset])


class RaggedPolicy(WindowPolicy):
    """Chooses a window for each sequence of a step."""

    def __init__(self, block_size: int, prices: StepPrices) -> None:
        super().__init__(block_size, 1, lambda sequences, window: prices(sequences).of(window.drafts, window.all_masks))
        self.prices = prices
        self.calibration = Calibration()
        self._speed = 1.0  # tokens per second lately, in terms of single tokens
        self._pause = 0  # steps left without masks

    def windows(self, sequences: SequenceOf[Sequence]) -> list[Window]:
        free = sum(takes_any_window(each) for each in sequences)
        if not free:
            return [self._needed(each, False) or Window() for each in sequences]
        prices = self.prices(len(sequences))
        rate = max(self._speed, 1.0) * len(sequences) / prices.step
        in_tokens = Prices(0.0, rate * prices.draft, rate * prices.masks / free, rate * prices.mask)
        return [
            self._best(each, in_tokens) if takes_any_window(each) else self._needed(each, False) or Window()
            for each in sequences
        ]

    def _best(self, sequence: Sequence, prices: Prices) -> Window:
        """The window with the most tokens for the sequence, less what it costs in terms of tokens."""
        needed = self._needed(sequence, True)
        if needed is not None:  # drafts that were emitted before the dial was turned
            return needed | Window.of(1, sequence.request.block_size)
        outlook = self._outlook(sequence)
        most = 0 if self._pause else sequence.request.block_size - 1
        later = [sum(max(each - prices.draft, 0.0) for each in outlook.survival[:masks]) for masks in range(most + 1)]
        """What the drafts of so many masks bring in the next step"""
        best, chosen, tokens = 0.0, Window(), 0.0
        for drafts, survival in enumerate([1.0, *self._survival(sequence)]):
            tokens += survival - prices.draft if drafts else 0.0
            for masks in range(most + 1):
                worth = tokens + survival * later[masks] - prices.of(0, masks)
                if worth > best:
                    best, chosen = worth, Window(drafts, int(masks > 0), masks)
        if not chosen.masks:
            outlook.forget()
        return chosen

    def _survival(self, sequence: Sequence) -> list[float]:
        """For each draft, the chance that it and all before it are accepted."""
        if sequence.draft_probabilities:
            return list(accumulate(map(self.calibration, sequence.draft_probabilities), mul))
        return self._outlook(sequence).survival[: len(sequence.drafts)]

    def _outlook(self, sequence: Sequence) -> Outlook:
        if sequence.outlook is None:
            sequence.outlook = Outlook(sequence.request.block_size - 1)
        assert isinstance(sequence.outlook, Outlook)
        return sequence.outlook

    def observe_drafts(self, sequence: Sequence, drafts: int, accepted: int) -> None:
        super().observe_drafts(sequence, drafts, accepted)
        for offset, probability in enumerate(sequence.draft_probabilities[: min(drafts, accepted + 1)]):
            self.calibration.observe(probability, offset < accepted)
        if not sequence.draft_probabilities:
            self._outlook(sequence).learn([float(offset < accepted) for offset in range(drafts)])

    def observe_predictions(self, sequence: Sequence, probabilities: list[float]) -> None:
        """What masks gave to the sequence's new drafts."""
        sequence.draft_probabilities = probabilities
        if probabilities and takes_any_window(sequence):
            self._outlook(sequence).learn(self._survival(sequence))

    def observe_step(self, windows: SequenceOf[Window], tokens: int, seconds: float) -> None:
        """What a step took that emitted so many tokens; of no use while all write one token at a time."""
        if not self.prices.knows(len(windows)):
            return
        drafts, masks = (sum(each) for each in zip(*((each.drafts, each.all_masks) for each in windows), strict=True))
        speed = tokens / seconds * self.prices(len(windows)).step / len(windows)
        self.prices.observe(len(windows), drafts, masks, seconds)
        if drafts or masks:
            self._speed += NEWEST / 2 * (min(speed, MOST_CHANGE) - self._speed)
        self._pause = max(self._pause - 1, 0)
        if self._speed < TOO_SLOW:
            self._speed, self._pause = 1.0, PAUSE
