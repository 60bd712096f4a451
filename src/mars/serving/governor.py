"""The dial by load: looser, step by step down to the operator's floor, while requests wait too long; then back.

Whether a step pays is not assumed but seen. The governor notes how long a token takes with each dial and number of
running requests. It goes on to a looser dial only if it does not know it or knows it to be faster; it comes back
as soon as a stricter one is no slower, or, by what it knows, fast enough for the load of the moment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from mars.method.dials import Dial
from mars.serving.backend import Backend
from mars.serving.messages import FromEngine, News

TICK = 0.25
"""Seconds between two looks at the load"""
PATIENCE = 1.0
"""Seconds that it must be too slow before the dial is turned, and that a dial is tried for"""
CALM_SECONDS = 5.0
"""Seconds that a stricter dial must have been fast enough before it is taken again; twice as many whenever that turns
out to have been too soon, by a move the other way within `REGRET_SECONDS`"""
REGRET_SECONDS = 60.0
MOST_CALM_SECONDS = 600.0
CALM = 0.8
"""Of the target: what counts as fast enough for that"""
GAIN = 0.95
"""What a dial must be to be called faster: this much of the other's time"""
GUESS = 1.5
"""How much slower a stricter dial is thought to be that was never seen at this load"""
MEMORY_SECONDS = 300.0
"""What was seen longer ago does not count: other texts are other speeds"""
WEIGHT = 0.3
"""Of the newest look in an average"""


@dataclass(frozen=True, slots=True)
class Target:
    """What the operator wants of a request, in seconds."""

    per_token: float = 0.05
    wait: float = 1.0
    """Until its first token"""


@dataclass(frozen=True, slots=True)
class Load:
    """What was seen since the last look."""

    running: int
    per_token: float | None
    """Seconds that a token took, over all requests; None: nothing was written"""
    wait: float = 0.0
    """Seconds that the request without a first token has waited which came first"""


@dataclass(slots=True)
class Governor:
    ladder: Sequence[Dial]
    """From the strictest to the loosest"""
    target: Target = field(default_factory=Target)
    rung: int = 0
    _seen: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """(rung, size of the load): seconds per token, and when that was"""
    _moved: float = float("-inf")
    _late_since: float | None = None
    _calm_since: float | None = None
    _calm_seconds: float = CALM_SECONDS
    _returned: float = float("-inf")
    """When it last took a stricter dial again"""

    @property
    def dial(self) -> Dial:
        return self.ladder[self.rung]

    def observe(self, load: Load, now: float) -> bool:
        """Look at the load; returns whether the dial is another one now."""
        size = round(4 * math.log2(1 + load.running))
        if load.per_token is not None and now - self._moved >= PATIENCE / 2:  # not what the last dial wrote
            old = self._known(self.rung, size, now)
            seconds = load.per_token if old is None else old + WEIGHT * (load.per_token - old)
            self._seen[self.rung, size] = (seconds, now)
        target = self.target
        late = (load.per_token or 0.0) > target.per_token or load.wait > target.wait
        self._late_since = (self._late_since or now) if late else None
        calm = self.rung > 0 and not late and self._expected(size, now) < CALM * target.per_token
        self._calm_since = (self._calm_since or now) if calm and load.wait < CALM * target.wait else None
        if now - self._moved < PATIENCE:
            return False
        if (better := self._better(size, now)) is not None:
            return self._move(better, now)
        if self._late_since is not None and now - self._late_since >= PATIENCE:
            return self._loosen(size, now)
        if self._calm_since is not None and now - self._calm_since >= self._calm_seconds:
            self._returned = now
            return self._move(self.rung - 1, now)
        return False

    def _loosen(self, size: int, now: float) -> bool:
        """To the next dial that may be faster, if there is one."""
        mine = self._known(self.rung, size, now)
        for rung in range(self.rung + 1, len(self.ladder)):
            seen = self._known(rung, size, now)
            if seen is None or mine is None or seen < GAIN * mine:
                regrets = now - self._returned < REGRET_SECONDS + self._calm_seconds
                self._calm_seconds = min(2 * self._calm_seconds, MOST_CALM_SECONDS) if regrets else CALM_SECONDS
                return self._move(rung, now)
        return False

    def _better(self, size: int, now: float) -> int | None:
        """The strictest dial that is as fast as this one, if no looser one may be faster: then this one is in vain."""
        times = [self._known(rung, size, now) for rung in range(len(self.ladder))]
        mine = times[self.rung]
        if mine is None or any(each is None or each < GAIN * mine for each in times[self.rung + 1 :]):
            return None
        return next((rung for rung, each in enumerate(times[: self.rung]) if each and mine > GAIN * each), None)

    def _expected(self, size: int, now: float) -> float:
        """Seconds per token with the next stricter dial."""
        mine = self._known(self.rung, size, now) or 0.0
        return self._known(self.rung - 1, size, now) or GUESS * mine

    def _known(self, rung: int, size: int, now: float) -> float | None:
        seconds, when = self._seen.get((rung, size), (0.0, float("-inf")))
        return seconds if now - when < MEMORY_SECONDS else None

    def _move(self, rung: int, now: float) -> bool:
        self.rung, self._moved, self._late_since, self._calm_since = rung, now, None, None
        return True


def ladder(strict: Dial, floor: Dial | None) -> list[Dial]:
    """From a lossless dial to the floor, with one step in between; without a loose floor, there is nowhere to go."""
    if floor is None or not floor.is_loose or floor.value is None:
        return [strict]
    between = Dial(floor.kind, round((1 + floor.value) / 2, 4), floor.measure)
    return [strict, between, floor]


class Meter:
    """Reads the load off what the engine says."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._last: dict[int, float] = {}
        """When a request was last heard of"""
        self._spent, self._written = 0.0, 0
        backend.listeners.append(self._hear)

    def read(self) -> Load:
        """What was seen since it was last read."""
        per_token = self._spent / self._written if self._written else None
        self._spent, self._written = 0.0, 0
        return Load(self._backend.gauges.running, per_token, self._backend.longest_wait)

    def _hear(self, message: FromEngine) -> None:
        if not isinstance(message, News):
            return
        now = time.perf_counter()
        for each in message.written:
            if (last := self._last.pop(each.number, None)) is not None:
                self._spent += now - last
                self._written += sum(map(len, each.steps))
            if each.finish_reason is None:
                self._last[each.number] = now
        if not message.gauges.running:
            self._last.clear()  # some may have hung up
