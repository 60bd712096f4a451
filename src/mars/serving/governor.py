"""The dial by load: looser, step by step down to the operator's floor, while requests wait too long; then back.

Whether a step pays is not assumed but seen. The governor notes how long a token takes with the strictest dial, by the
number of running requests, and what share of that it takes with each looser one. It goes on to a looser dial only if
it does not know it or knows it to be faster; it gives one back that is not; and it comes back to a stricter one when
that, by what it knows, is fast enough for the load of the moment.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from mars.method.acceptance import Dial
from mars.serving.engine_client import EngineClient
from mars.serving.messages import EngineOutputs, FromEngine

TICK = 0.1  # seconds between two looks at the load
PATIENCE = 2.0  # seconds that it must be too slow before the dial is turned
TRIAL = 3.0  # seconds that a dial is tried for, at least
ENOUGH = 1000  # tokens that tell as much as those times: where many are written, there is no need to wait
CALM_SECONDS = 5.0
"""Seconds that a stricter dial must have been fast enough before it is taken again; twice as many whenever that turns
out to have been too soon, by a move the other way within `REGRET_SECONDS`"""
REGRET_SECONDS = 60.0
MOST_CALM_SECONDS = 600.0
CALM = 0.8  # of the target: what counts as fast enough for that
GAIN = 0.9  # what a dial must be to be called faster: this much of the other's time
MEMORY_SECONDS = 300.0  # what was seen of a dial longer ago does not count: other texts are other speeds
LOOKS = 8  # that it takes to judge a dial: one is noisy
WEIGHT = 0.02  # of the newest look in an average, once there are many


@dataclass(slots=True)
class Average:
    """Of all values at first, then of the latest."""

    value: float = 0.0
    count: int = 0
    when: float = float("-inf")

    def add(self, value: float, now: float) -> None:
        self.count = self.count + 1 if now - self.when < MEMORY_SECONDS else 1
        self.value += max(WEIGHT, 1 / self.count) * (value - self.value)
        self.when = now


@dataclass(frozen=True, slots=True)
class Target:
    """What the operator wants of a request, in seconds."""

    per_token: float = 0.05
    wait: float = 1.0  # until its first token


@dataclass(frozen=True, slots=True)
class Load:
    """What was seen since the last look."""

    running: int
    per_token: float | None  # seconds that a token took, over all requests; None: nothing was written
    tokens: int = 0
    wait: float = 0.0  # seconds that the request without a first token has waited which came first


@dataclass(slots=True)
class Governor:
    ladder: Sequence[Dial]  # from the strictest to the loosest
    target: Target = field(default_factory=Target)
    rung: int = 0
    _strict: dict[int, Average] = field(default_factory=lambda: defaultdict(Average))
    """Running requests: seconds per token with the strictest dial"""
    _shares: dict[int, Average] = field(default_factory=lambda: defaultdict(Average))
    """Rung: the share of those seconds that it takes"""
    _in_vain: dict[int, float] = field(default_factory=dict)
    """Rung: when it was found to be no faster than a stricter one"""
    _moved: float = float("-inf")
    _written: int = 0  # tokens since then
    _late_since: float | None = None
    _late_tokens: int = 0  # tokens since then
    _calm_since: float | None = None
    _calm_seconds: float = CALM_SECONDS
    _returned: float = float("-inf")  # when it last took a stricter dial again

    @property
    def dial(self) -> Dial:
        return self.ladder[self.rung]

    def observe(self, load: Load, now: float) -> bool:
        """Look at the load; returns whether the dial is another one now."""
        is_steady = now - self._moved >= TRIAL / 3 or self._written >= ENOUGH  # else the last dial wrote some of it
        if load.per_token is not None and is_steady:
            self._learn(load.running, load.per_token, now)
        self._written += load.tokens
        target = self.target
        late = (load.per_token or 0.0) > target.per_token or load.wait > target.wait
        if late and self._late_since is None:
            self._late_since, self._late_tokens = now, 0
        elif late:
            self._late_tokens += load.tokens
        elif load.per_token is not None or not load.running:  # else it is not known
            self._late_since = None
        calm = self.rung > 0 and not late and self._expected(load, now) < CALM * target.per_token
        self._calm_since = (self._calm_since or now) if calm and load.wait < CALM * target.wait else None
        if now - self._moved < TRIAL and self._written < ENOUGH:
            return False
        if (better := self._better(now)) is not None:
            return self._move(better, now)
        if self._late_since is not None and (now - self._late_since >= PATIENCE or self._late_tokens >= ENOUGH):
            return self._loosen(now)
        if self._calm_since is not None and now - self._calm_since >= self._calm_seconds:
            self._returned = now
            return self._move(self.rung - 1, now)
        return False

    def _learn(self, running: int, seconds: float, now: float) -> None:
        if self.rung == 0:
            self._strict[running].add(seconds, now)
        elif strict := self._strict_seconds(running):
            self._shares[self.rung].add(seconds / strict, now)

    def _loosen(self, now: float) -> bool:
        """To the next dial that may be faster, if there is one."""
        for rung in range(self.rung + 1, len(self.ladder)):
            if now - self._in_vain.get(rung, float("-inf")) >= MEMORY_SECONDS:
                regrets = now - self._returned < REGRET_SECONDS + self._calm_seconds
                self._calm_seconds = min(2 * self._calm_seconds, MOST_CALM_SECONDS) if regrets else CALM_SECONDS
                return self._move(rung, now)
        return False

    def _better(self, now: float) -> int | None:
        """The strictest dial that is as fast as this one, if there is none looser to try: then this one is in vain."""
        mine = self._share(self.rung, now)
        untried = [rung for rung in range(self.rung + 1, len(self.ladder)) if self._share(rung, now) is None]
        if mine is None or untried:
            return None
        for rung in range(self.rung):
            share = self._share(rung, now)
            if share is not None and mine > GAIN * share:
                self._in_vain |= dict.fromkeys(range(rung + 1, self.rung + 1), now)
                return rung
        return None

    def _expected(self, load: Load, now: float) -> float:
        """Seconds per token with the next stricter dial."""
        strict = self._strict_seconds(load.running) or load.per_token or 0.0
        return strict * (self._share(self.rung - 1, now) or 1.0)

    def _share(self, rung: int, now: float) -> float | None:
        if rung == 0:
            return 1.0
        share = self._shares[rung]
        return share.value if share.count >= LOOKS and now - share.when < MEMORY_SECONDS else None

    def _strict_seconds(self, running: int) -> float | None:
        """What a token takes with the strictest dial: on the line between the nearest numbers of requests seen."""
        seen = sorted(self._strict, key=lambda each: abs(each - running))[:2]
        if not seen:
            return None
        near = self._strict[seen[0]].value
        if len(seen) < 2:
            return near
        slope = (self._strict[seen[1]].value - near) / (seen[1] - seen[0])
        return near + max(0.0, slope) * (running - seen[0])

    def _move(self, rung: int, now: float) -> bool:
        self.rung, self._moved, self._written, self._late_since, self._calm_since = rung, now, 0, None, None
        return True


def ladder(strict: Dial, floor: Dial | None) -> list[Dial]:
    """From a lossless dial to the floor, with one step in between; without a loose floor, there is nowhere to go."""
    if floor is None or not floor.is_lossy or floor.value is None:
        return [strict]
    between = Dial(floor.kind, round((1 + floor.value) / 2, 4), floor.measure)
    return [strict, between, floor]


class Meter:
    """Reads the load off the engine's messages."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._last: dict[int, float] = {}  # when a request last emitted tokens
        self._spent, self._written = 0.0, 0
        client.listeners.append(self._receive)

    def read(self) -> Load:
        """What was seen since it was last read."""
        per_token = self._spent / self._written if self._written else None
        load = Load(self._client.load.running, per_token, self._written, self._client.longest_wait)
        self._last = {number: when for number, when in self._last.items() if number in self._client.open}
        self._spent, self._written = 0.0, 0
        return load

    def _receive(self, message: FromEngine) -> None:
        if not isinstance(message, EngineOutputs):
            return
        now = time.perf_counter()
        for each in message.outputs:
            if (last := self._last.pop(each.request_id, None)) is not None:
                self._spent += now - last
                self._written += each.num_tokens
            if each.finish_reason is None:
                self._last[each.request_id] = now
