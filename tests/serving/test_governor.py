"""The governor over a simulated engine: arrivals from a trace, rows that share forwards, dials that cost and bring."""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from mars.method.acceptance import Dial
from mars.serving.governor import TICK, Governor, Load, Target, ladder

TRACE = Path(__file__).parent / "arrivals.json"
"""Arrivals (seconds, new tokens) at a server under load with a burst in the middle, as `benchmarks/serving_burst.py`
records them"""


@dataclass
class Request:
    at: float
    left: float
    tokens: int
    started: float | None = None
    ended: float = 0.0


@dataclass
class Simulation:
    """Rows share forwards; a forward takes longer the more rows there are, and brings each as many tokens."""

    governor: Governor
    tokens_per_forward: dict[str, float]
    rows: int = 16
    base: float = 0.010
    per_row: float = 0.002
    noise: float = 0.3
    """Of what the governor sees, one way or the other"""
    moves: list[tuple[float, str]] = field(default_factory=list)
    done: list[Request] = field(default_factory=list)
    strict_tokens: float = 0.0
    loose_tokens: float = 0.0

    def run(self, arrivals: list[tuple[float, int]]) -> None:
        queue = deque(Request(at, tokens, tokens) for at, tokens in sorted(arrivals))
        waiting, running, draw = deque[Request](), list[Request](), random.Random(0)
        now, look, spent, written = 0.0, 0.0, 0.0, 0.0
        end = queue[-1].at + 60
        while now < end:
            while queue and queue[0].at <= now:
                waiting.append(queue.popleft())
            while waiting and len(running) < self.rows:
                running.append(waiting.popleft())
            if running:
                seconds = self.base + self.per_row * len(running)
                brought = self.tokens_per_forward[str(self.governor.dial)]
                now += seconds
                for each in running:
                    each.started = each.started or now
                    each.left -= brought
                    each.ended = now
                spent, written = spent + seconds * len(running), written + brought * len(running)
                loose = self.governor.dial.is_lossy
                self.loose_tokens += brought * len(running) * loose
                self.strict_tokens += brought * len(running) * (not loose)
                self.done += [each for each in running if each.left <= 0]
                running = [each for each in running if each.left > 0]
            else:
                now = min([look + TICK, *(each.at for each in list(queue)[:1])])
            if now >= look + TICK:
                wait = max((now - each.at for each in waiting), default=0.0)
                seen = spent / written * (1 + draw.uniform(-self.noise, self.noise)) if written else None
                load = Load(len(running), seen, int(written), wait)
                if self.governor.observe(load, now):
                    self.moves.append((now, str(self.governor.dial)))
                look, spent, written = now, 0.0, 0.0

    def turns(self) -> int:
        """How often the dial changed its direction."""
        rungs = [0, *([str(each) for each in self.governor.ladder].index(dial) for _, dial in self.moves)]
        steps = [after > before for before, after in pairwise(rungs)]
        return sum(before != after for before, after in pairwise(steps))

    def per_token(self, quantile: float) -> float:
        times = sorted((each.ended - (each.started or 0)) / each.tokens for each in self.done if each.tokens > 8)
        return times[min(int(quantile * len(times)), len(times) - 1)]


SPEEDS = {"exact": 2.0, "relaxed=0.65": 2.6, "relaxed=0.3": 3.2}
TARGET = Target(per_token=0.014, wait=1.0)


def simulate(floor: str | None, arrivals: list, speeds: dict[str, float] = SPEEDS) -> Simulation:
    steps = ladder(Dial("exact"), None if floor is None else Dial.parse(floor))
    simulation = Simulation(Governor(steps, TARGET), speeds)
    simulation.run(arrivals)
    return simulation


def replay(floor: str | None) -> Simulation:
    """The recorded arrivals, at an engine about as fast as the one that they were recorded with."""
    steps = ladder(Dial("exact"), None if floor is None else Dial.parse(floor))
    simulation = Simulation(Governor(steps, Target(0.1)), SPEEDS, rows=8, base=0.06, per_row=0.03)
    simulation.run(json.loads(TRACE.read_text())["arrivals"])
    return simulation


def steady(per_second: float, seconds: float, start: float = 0.0, tokens: int = 100) -> list[tuple[float, int]]:
    return [(start + number / per_second, tokens) for number in range(int(per_second * seconds))]


def test_a_burst_turns_the_dial_there_and_back_once() -> None:
    free, held = replay("relaxed=0.3"), replay(None)
    assert [dial for _, dial in free.moves] == ["relaxed=0.65", "relaxed=0.3", "relaxed=0.65", "exact"]
    assert free.moves[0][0] > 25, "the burst begins there"
    assert free.per_token(0.99) < 0.85 * held.per_token(0.99)
    assert len(free.done) == len(held.done)


def test_without_a_floor_nothing_is_ever_loose() -> None:
    held = replay(None)
    assert not held.moves and not held.loose_tokens and held.strict_tokens


@pytest.mark.parametrize("rate", [6, 10, 12, 14, 18, 25])
def test_a_steady_load_does_not_make_it_swing(rate: float) -> None:
    """Ten minutes at rates where strict suffices, where loose just does, where nothing does."""
    simulation = simulate("relaxed=0.3", steady(rate, 600))
    assert simulation.turns() <= 8, simulation.moves
    late = [when for when, _ in simulation.moves if when > 300]
    assert len(late) <= 4, simulation.moves


def test_where_many_tokens_are_written_a_burst_is_met_at_once() -> None:
    steps = ladder(Dial("exact"), Dial.parse("relaxed=0.3"))
    simulation = Simulation(Governor(steps, Target(0.00068)), SPEEDS, base=0.0008, per_row=0.00007)
    simulation.run([*steady(5, 40, tokens=200), *steady(100, 20, start=10, tokens=200)])
    assert [dial for _, dial in simulation.moves] == ["relaxed=0.65", "relaxed=0.3", "relaxed=0.65", "exact"]
    assert 10 < simulation.moves[0][0] < simulation.moves[1][0] < 11
    assert simulation.moves[2][0] > 30, "the burst ends there"


def test_light_load_stays_exact() -> None:
    assert not simulate("relaxed=0.3", steady(1, 120)).moves


def test_a_looser_dial_that_is_no_faster_is_given_back_for_good() -> None:
    slower = {"exact": 2.0, "threshold=0.75": 1.6, "threshold=0.5": 1.9}
    simulation = simulate("threshold=0.5", steady(18, 120), slower)
    assert [dial for _, dial in simulation.moves] == ["threshold=0.75", "threshold=0.5", "exact"]
    assert simulation.loose_tokens < 0.05 * simulation.strict_tokens


def test_a_slower_step_on_the_way_is_passed() -> None:
    speeds = {"exact": 2.0, "threshold=0.75": 1.6, "threshold=0.5": 3.0}
    simulation = simulate("threshold=0.5", steady(20, 60), speeds)
    assert [dial for _, dial in simulation.moves][:2] == ["threshold=0.75", "threshold=0.5"]
    assert simulation.loose_tokens > simulation.strict_tokens


def test_the_ladder_ends_at_the_floor() -> None:
    assert [str(each) for each in ladder(Dial("exact"), Dial.parse("threshold:margin=0.6"))] == [
        "exact",
        "threshold:margin=0.8",
        "threshold:margin=0.6",
    ]
    assert ladder(Dial("one-token"), None) == [Dial("one-token")]
    assert ladder(Dial("exact"), Dial("exact")) == [Dial("exact")]
