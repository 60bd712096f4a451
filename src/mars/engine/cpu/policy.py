"""What each sequence feeds in a step on a CPU: as many drafts and masks as pay for themselves.

A step of few tokens takes as long as its weights take to read. Each further token then costs little, until arithmetic
takes as long. A draft is worth the chance that it is accepted, which its own probability tells; masks are worth the
drafts that they predict, if exactly the drafts before them are accepted. Both are weighed against the tokens that the
same time would bring otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from operator import mul
from typing import NamedTuple

from mars.core.sequence import Sequence
from mars.engine.policy import (
    BIN_PRIOR,
    HOPE,
    LEARNING,
    PROMISE,
    Calibration,
    SelfCheck,
    WindowPolicy,
    takes_any_window,
)
from mars.method.lookup import LONGEST
from mars.method.windows import NARROW, Window

NEWEST = 0.1  # weight of the newest step in what steps cost and bring lately
STALE = 0.5  # … of a step of single tokens after many others
FADING = 0.01  # … of no news, in each step of single tokens, in what other tokens cost
SPAN = 7  # fewest tokens over which the price of a token is averaged: single ones are measured too badly
PROBE = 64  # steps after which one of single tokens is taken: whether others pay shows beside it alone
MOST_CHANGE = 3.0  # a step counts as at most so many times slower or faster than expected
FEWEST_MEASURED, MOST_MEASURED = 16, 64  # tokens of the largest step that is timed, by number of sequences
MATCH_PRIOR = 0.75  # the chance of a draft that was looked up
MARGIN = 0.02  # tokens per sequence and step that windows must promise to bring: what they cost is not known better
CAUTION = 1.2  # times what more tokens seem to cost: those that seem worth it are often those that seem too cheap
REST = 8  # steps of single tokens, or without masks, after it was found that nothing else pays: that takes time too
FORGETTING = 0.1  # weight of hope, each time that is found: text changes, and masks are tried again some day
TOO_SLOW = 0.93  # of the speed of single tokens: then there are none but these for a while; costs are noisy here


@dataclass(slots=True)
class StepSeconds:
    """Seconds of a step: measured at first need, corrected by real steps.

    What a step of single tokens takes, what further tokens add to that and what masks add besides are corrected one by
    one: a machine that reads memory faster than a minute ago computes no faster.
    """

    time_step: Callable[[int, Window], float]  # seconds, by sequences and window
    masks: int  # most masks of a group
    turns: int = 3  # the fastest counts, since other work only ever adds time
    _text: list[float] = field(default_factory=list)  # of 1, 2, 4, … tokens, none of them a mask
    _first_mask: float = 0.0  # what the first mask adds to that
    _next_mask: float = 0.0  # … and each further one
    _lately: float = 1.0  # what steps of single tokens took lately over what was measured
    _more_lately: float = 1.0  # … what further tokens added
    _masks_lately: float = 1.0  # … what masks added to that
    unseen: int = 0  # steps since the last one of single tokens

    def __call__(self, sequences: int, drafts: int = 0, masks: int = 0) -> float:
        return self._lately * self._interpolate(sequences) + sum(self._added(sequences, drafts, masks))

    def _added(self, sequences: int, drafts: int, masks: int) -> tuple[float, float]:
        """What further tokens add, and what masks add besides."""
        further = self._interpolate(sequences + drafts + masks) - self._interpolate(sequences)
        besides = self._first_mask + (masks - 1) * self._next_mask if masks else 0.0
        return self._more_lately * further, self._masks_lately * besides

    def slope(self, tokens: int) -> float:
        """What a token more costs in a step of so many, on the average of the next ones."""
        more = max(tokens, SPAN)
        return self._more_lately * (self._interpolate(tokens + more) - self._interpolate(tokens)) / more

    def mask_price(self) -> float:
        """What a mask costs more than another token."""
        return self._masks_lately * self._next_mask

    @property
    def is_known(self) -> bool:
        return bool(self._text)

    def measure(self, sequences: int) -> None:
        """Time steps, if that was not done for so many sequences."""
        largest = min(max(FEWEST_MEASURED, 4 * sequences), MOST_MEASURED)
        if 1 << len(self._text) > largest:
            return
        sizes = [1 << power for power in range(largest.bit_length())]
        kinds = [(size, Window()) for size in sizes]
        if self.masks:
            kinds += [(1, Window(0, 1, 1)), (1, Window(0, 1, self.masks))]
        best = [
            min(each)
            for each in zip(*([self.time_step(*kind) for kind in kinds] for _ in range(self.turns)), strict=True)
        ]
        self._text = list(accumulate(best[: len(sizes)], max))
        self._lately = self._more_lately = self._masks_lately = 1.0
        if self.masks:
            one, several = best[-2] - self._interpolate(2), best[-1] - self._interpolate(1 + self.masks)
            self._next_mask = max(several - one, 0.0) / max(self.masks - 1, 1)
            self._first_mask = max(one, self._next_mask)

    def _interpolate(self, tokens: int) -> float:
        """On the line through the two sizes around this one; beyond the largest, through the last two."""
        power = min(tokens.bit_length() - 1, len(self._text) - 2)
        low, high = self._text[power : power + 2]
        return low + (high - low) * (tokens / (1 << power) - 1)

    def observe(self, sequences: int, drafts: int, masks: int, seconds: float) -> None:
        base = self._lately * self._interpolate(sequences)
        if not drafts and not masks:
            self._lately *= _change(seconds, base) ** (NEWEST if self.unseen < PROBE else STALE)
            self._more_lately **= 1 - FADING  # not seen for long: they may have become cheaper
            self._masks_lately **= 1 - FADING
            self.unseen = 0
            return
        self.unseen += 1
        further, besides = self._added(sequences, drafts, masks)
        if masks:
            self._masks_lately *= _change(seconds - base - further, besides) ** NEWEST
        else:
            self._more_lately *= _change(seconds - base, further) ** NEWEST


def _change(seconds: float, expected: float) -> float:
    return min(max(seconds / max(expected, 1e-9), 1 / MOST_CHANGE), MOST_CHANGE)


class MatchCalibration:
    """How often drafts that were looked up are accepted after so many matching tokens, if those before them were."""

    def __init__(self) -> None:
        self._accepted = [BIN_PRIOR * MATCH_PRIOR] * (LONGEST + 1)
        self._seen = [BIN_PRIOR] * (LONGEST + 1)

    def __call__(self, match: int) -> float:
        return self._accepted[match] / self._seen[match]

    def observe(self, match: int, accepted: bool) -> None:
        self._seen[match] += 1
        self._accepted[match] += accepted


class Outlook:
    """What is expected of the next drafts: for each offset, the chance that it and all before it are accepted.

    Predictable text goes on to be predictable, so there are two cases: ``after_hit`` for drafts that follow drafts
    which were all accepted, and ``after_miss`` for all others.
    """

    def __init__(self, offsets: int) -> None:
        self.after_hit = [HOPE ** (offset + 1) for offset in range(offsets)]
        self.after_miss = list(self.after_hit)
        self.is_hit = False  # were the last drafts all accepted?
        self.drafted_after_hit = False  # … and those before the drafts at hand?

    def copy(self) -> Outlook:
        made = Outlook(0)
        made.after_hit, made.after_miss = list(self.after_hit), list(self.after_miss)
        return made

    def learn(self, survival: SequenceOf[float], after_hit: bool, weight: float) -> None:
        """Of newer drafts."""
        known = self.after_hit if after_hit else self.after_miss
        for offset, each in enumerate(survival[: len(known)]):
            known[offset] += weight * (each - known[offset])

    def forget(self) -> None:
        for offset in range(len(self.after_hit)):
            for known in (self.after_hit, self.after_miss):
                known[offset] += FORGETTING * (HOPE ** (offset + 1) - known[offset])


class Plan(NamedTuple):
    """Windows of all sequences, and what is expected of them."""

    windows: list[Window]
    drafts: int
    masks: int
    gain: float  # tokens emitted and, less their price, promised


class RaggedPolicy(WindowPolicy):
    """Chooses a window for each sequence of a step."""

    def __init__(self, block_size: int, seconds: StepSeconds) -> None:
        super().__init__(block_size, 1, self._seconds_of)
        self.seconds = seconds
        self.calibration = Calibration()
        self.matches = MatchCalibration()
        self._usual = Outlook(block_size - 1)  # of a sequence of which nothing is known yet
        self.check = SelfCheck(TOO_SLOW)
        self._rest = 0  # … since nothing else seemed to pay
        self._mask_rest = 0  # steps left without masks, since these did not seem to pay
        self._price = 0.0  # of a token more in a step of single tokens, in terms of tokens
        self._host = 0.0  # seconds of a step besides its forward
        self._has_choice = True  # here: did any sequence take any window?

    def _seconds_of(self, sequences: int, window: Window) -> float:
        return self.seconds(sequences, sequences * window.drafts, sequences * window.all_masks)

    def windows(self, sequences: SequenceOf[Sequence], host_seconds: float = 0.0) -> list[Window]:
        """``host_seconds``: what a step takes besides its forward, whatever is fed."""
        self._host = host_seconds
        needed = [self._fixed(each) for each in sequences]
        least = [each or Window() for each in needed]
        self._has_choice = None in needed
        if not self._has_choice or self._rests(sequences):
            return least
        self.seconds.measure(len(sequences))
        if self.check.pause or self.seconds.unseen >= PROBE * (2 if any(each.drafts for each in sequences) else 1):
            return least
        rate = max(self.check.speed, 1.0) * len(sequences) / (self.seconds(len(sequences)) + self._host)
        rate *= CAUTION  # tokens per second that the time of this step would bring otherwise
        fewest = sum(each.drafts for each in least), sum(each.all_masks for each in least)
        without = self.seconds(len(sequences), *fewest)

        def worth(plan: Plan) -> float:
            return plan.gain - rate * (self.seconds(len(sequences), plan.drafts, plan.masks) - without)

        weighs_masks = not self._mask_rest
        best = max(self._plans(sequences, needed, rate, sum(fewest), masks=weighs_masks), key=worth)
        pays = worth(best) > MARGIN * len(sequences)
        windows = best.windows if pays else least
        self._rest = 0 if pays else REST
        self._mask_rest = max(self._mask_rest - 1, 0)
        if weighs_masks:
            self._mask_rest = 0 if pays and best.masks else REST
            for sequence, window, given in zip(sequences, windows, needed, strict=True):
                if given is None and not window.masks:
                    self._outlook(sequence).forget()
        return windows

    def _rests(self, sequences: SequenceOf[Sequence]) -> bool:
        """Was it found lately that nothing pays, and is there nothing new?"""
        if not self._rest or any(map(self._is_promising, sequences)):
            return False
        self._rest -= 1
        self._mask_rest = max(self._mask_rest - 1, 0)
        return True

    def _plans(
        self,
        sequences: SequenceOf[Sequence],
        needed: SequenceOf[Window | None],
        rate: float,
        fewest: int,
        *,
        masks: bool,
    ) -> list[Plan]:
        """What may be best where the time of a step brings ``rate`` and ``fewest`` further tokens have to be fed."""
        price = self._price = rate * self.seconds.slope(len(sequences) + fewest)
        chances = [self._survival(each) for each in sequences]
        plans = [self._plan(sequences, needed, chances, factor * price) for factor in (1.0, 2.0, 4.0)]
        if masks:
            more = rate * self.seconds.mask_price()
            plans.append(self._plan(sequences, needed, chances, price, more))
            if plans[-1].masks:  # once more, with the price at what that feeds
                price = rate * self.seconds.slope(len(sequences) + plans[-1].drafts + plans[-1].masks)
                plans.append(self._plan(sequences, needed, chances, price, more))
        return plans

    def _is_promising(self, sequence: Sequence) -> bool:
        """Are there drafts that may pay?"""
        if sequence.matches and sequence.matches[0]:
            return self.matches(sequence.matches[0]) > self._price
        return bool(sequence.drafts)

    def _fixed(self, sequence: Sequence) -> Window | None:
        """The window of a sequence that cannot have any."""
        takes_any = takes_any_window(sequence)
        needed = self._needed(sequence, takes_any)
        if takes_any:  # drafts that were emitted before the dial was turned
            return None if needed is None else needed | Window.of(1, sequence.request.block_size)
        return needed or Window()

    def _plan(
        self,
        sequences: SequenceOf[Sequence],
        needed: SequenceOf[Window | None],
        chances: SequenceOf[list[float]],
        price: float,
        more: float | None = None,
    ) -> Plan:
        """The best windows if a token costs ``price`` and a mask ``more`` than that, both in terms of tokens.

        ``more``: None for no masks.
        """
        windows, gain = list[Window](), 0.0
        for sequence, given, survival in zip(sequences, needed, chances, strict=True):
            if given is not None:
                window, worth = given, 0.0
            elif more is None:
                accepted = list(takewhile(price.__lt__, survival))
                window, worth = Window(len(accepted)), sum(accepted)
            else:
                window, worth = self._best(sequence, survival, price, more)
            windows.append(window)
            gain += worth
        return Plan(windows, sum(each.drafts for each in windows), sum(each.all_masks for each in windows), gain)

    def _best(self, sequence: Sequence, survival: list[float], price: float, more: float) -> tuple[Window, float]:
        """The window with the most tokens for the sequence, less what it costs; with what it brings."""
        outlook, most = self._outlook(sequence), min(sequence.request.block_size, NARROW) - 1
        best, chosen, brings, emitted = 0.0, Window(), 0.0, 0.0
        for drafts, chance in enumerate([1.0, *survival]):
            if drafts and chance <= price:
                break
            emitted += chance if drafts else 0.0
            worth = emitted - drafts * price
            if worth > best:
                best, chosen, brings = worth, Window(drafts), emitted
            for early in range(min(drafts, 1) + 1):  # one group behind all drafts, or another behind the last token too
                later, count, costs = 0.0, 0, (1 + early) * (price + more)
                behind_all = outlook.after_hit if drafts else outlook.after_miss
                for offset in range(most):
                    adds = chance * max(behind_all[offset] - price, 0.0)
                    if early:
                        adds += (1.0 - survival[0]) * max(outlook.after_miss[offset] - price, 0.0)
                    adds *= PROMISE
                    if adds <= costs:
                        break
                    later, count = later + adds, count + 1
                if count and worth + later - count * costs > best:
                    best = worth + later - count * costs
                    chosen, brings = Window(drafts, 1 + early, count), emitted + later
        return chosen, brings

    def _survival(self, sequence: Sequence) -> list[float]:
        """For each draft, the chance that it and all before it are accepted."""
        survival = self._predicted_survival(sequence)
        if sequence.matches:
            survival = survival[: sequence.matches.count(0)]
            chance = survival[-1] if survival else 1.0
            for match in sequence.matches[len(survival) :]:
                chance *= self.matches(match)
                if chance <= self._price:  # none of the rest will be fed
                    break
                survival.append(chance)
        return survival[: len(sequence.drafts)]

    def _predicted_survival(self, sequence: Sequence) -> list[float]:
        """The same of what masks predicted."""
        if sequence.draft_probabilities:
            return list(accumulate(map(self.calibration, sequence.draft_probabilities), mul))
        outlook = self._outlook(sequence)
        return outlook.after_hit if outlook.drafted_after_hit else outlook.after_miss

    def _outlook(self, sequence: Sequence) -> Outlook:
        if sequence.outlook is None:
            sequence.outlook = self._usual.copy()
        assert isinstance(sequence.outlook, Outlook)
        return sequence.outlook

    def observe_drafts(self, sequence: Sequence, drafts: int, accepted: int) -> None:
        super().observe_drafts(sequence, drafts, accepted)
        predicted = min(drafts, sequence.matches.count(0) if sequence.matches else drafts)
        for offset, probability in enumerate(sequence.draft_probabilities[: min(predicted, accepted + 1)]):
            self.calibration.observe(probability, offset < accepted)
        for offset in range(predicted, min(drafts, accepted + 1)):
            self.matches.observe(sequence.matches[offset], offset < accepted)
        outlook = self._outlook(sequence)
        if not sequence.draft_probabilities:
            self._learn(outlook, [float(offset < accepted) for offset in range(predicted)], outlook.drafted_after_hit)
        outlook.is_hit = accepted == drafts

    def observe_predictions(self, sequence: Sequence, probabilities: list[float]) -> None:
        """What masks gave to the sequence's new drafts."""
        sequence.draft_probabilities = probabilities
        if not takes_any_window(sequence):
            return
        outlook = self._outlook(sequence)
        outlook.drafted_after_hit, outlook.is_hit = outlook.is_hit, False
        if probabilities:
            self._learn(outlook, self._predicted_survival(sequence), outlook.drafted_after_hit)

    def _learn(self, outlook: Outlook, survival: SequenceOf[float], after_hit: bool) -> None:
        outlook.learn(survival, after_hit, LEARNING)
        self._usual.learn(survival, after_hit, LEARNING / 10)

    def expects(self, num_seqs: int, window: Window) -> None:  # noqa: ARG002
        return None

    def observe_step(self, windows: SequenceOf[Window], tokens: int, seconds: float) -> None:
        """What a step took that emitted so many tokens; of no use while all write one token at a time."""
        if not self.seconds.is_known:
            return
        drafts, masks = sum(each.drafts for each in windows), sum(each.all_masks for each in windows)
        self.seconds.observe(len(windows), drafts, masks, seconds)
        speed = None
        if self._has_choice and drafts + masks:
            speed = tokens / (seconds + self._host) * (self.seconds(len(windows)) + self._host) / len(windows)
            speed = min(speed, MOST_CHANGE)
        self.check.observe(speed)
