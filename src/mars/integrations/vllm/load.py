"""How many masks windows have at a load: as many as were fastest there, which a few steps find out now and then.

All windows of a step have one length, so that there is a CUDA graph for it. What a length is worth is measured as a
whole: tokens per second of steps with it, whatever they cost and however many drafts pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

SETTLE = 2  # steps after a change of length that do not count: the first one has no drafts yet
TRIAL = 6  # steps of a trial that count, more with few sequences: drafts pass by chance
TRIAL_SEQUENCES = 48  # of all steps of a trial together
PAUSES = (16, 512)  # fewest and most steps between two trials at a load, for each step of a trial
MARGIN = 0.02  # what another length must bring more
SLOWEST = 4.0  # times as long as usual: what a step takes beyond that has nothing to do with its length
PATIENCE = 8  # steps for which the load must have allowed longer windows before they are fed


@dataclass(slots=True)
class Speed:
    """Tokens and seconds of a step, on average over the last so many."""

    steps: int
    count: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        self.count = min(self.count + 1, self.steps)
        seconds = seconds if self.count == 1 else min(seconds, SLOWEST * self.seconds)
        self.tokens += (tokens - self.tokens) / self.count
        self.seconds += (seconds - self.seconds) / self.count

    def __call__(self) -> float:
        return self.tokens / self.seconds


@dataclass(slots=True)
class Load:
    """What is known of steps with about so many sequences."""

    best: int  # masks per window
    steps: int  # of a trial
    tried: int | None = None  # masks of the trial that goes on
    trials: int = 0  # so far
    pause: int = PAUSES[0]  # between two trials, in trials
    left: int = 0  # steps until the trial or the pause ends
    speeds: dict[int, Speed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.left = self.pause * self.steps

    @property
    def masks(self) -> int:
        return self.best if self.tried is None else self.tried

    def observe(self, masks: int, tokens: float, seconds: float, others: Sequence[int]) -> None:
        """After a step; ``others`` are the masks per window that may be tried."""
        self.speeds.setdefault(masks, Speed(2 * self.steps)).observe(tokens, seconds)
        if masks != self.masks:
            return
        self.left -= 1
        if self.left > 0:
            return
        if self.tried is not None:
            self._compare(self.tried)
        elif others:
            self.tried, self.left = others[self.trials % len(others)], self.steps
            self.trials += 1
            self.speeds.pop(self.tried, None)  # it was long ago

    def _compare(self, tried: int) -> None:
        if self.speeds[tried]() > (1 + MARGIN) * self.speeds[self.best]():
            self.best, self.pause = tried, PAUSES[0]
        else:
            self.pause = min(2 * self.pause, PAUSES[1])
        self.tried, self.left = None, self.pause * self.steps


class MasksByLoad:
    def __init__(
        self, guess: Callable[[int], int], choices: Collection[int] = (), most_tokens: int | None = None
    ) -> None:
        """``guess``: masks per window by number of sequences. It stays so if there are no ``choices``, masks per window
        that are measured, as far as a step has not more than ``most_tokens``.
        """
        self._guess = guess
        self._choices = sorted(choices, reverse=True)
        self._most_tokens = most_tokens
        self._loads: dict[int, Load] = {}
        self._masks = guess(1)
        self._calm = 0  # steps for which the load has allowed more
        self._last = self._masks  # masks in the last step
        self._steps = 0  # with so many

    def __call__(self, sequences: int) -> int:
        """Masks of the next windows: fewer at once, more after a while, as every change loses the drafts of a step."""
        masks = self._load(sequences).masks if self._choices and sequences else self._guess(sequences)
        self._calm = self._calm + 1 if masks > self._masks else 0
        if masks < self._masks or self._calm >= PATIENCE:
            self._masks, self._calm = masks, 0
        return self._masks

    def observe(self, sequences: int, masks: int, tokens: int, seconds: float) -> None:
        """After a step in which so many sequences, none of them with a prompt, wrote so many tokens."""
        self._last, self._steps = masks, self._steps + 1 if masks == self._last else 1
        if self._choices and self._steps > SETTLE:
            load = self._load(sequences)
            fits = [each for each in self._choices if each != load.best and self._fits(sequences, each)]
            load.observe(masks, tokens / sequences, seconds, fits)

    def _fits(self, sequences: int, masks: int) -> bool:
        return not masks or not self._most_tokens or sequences * (1 + 2 * masks) <= self._most_tokens

    def _load(self, sequences: int) -> Load:
        size = (sequences - 1).bit_length()
        if size not in self._loads:
            self._loads[size] = Load(self._guess(sequences), max(TRIAL, TRIAL_SEQUENCES // sequences))
        return self._loads[size]
