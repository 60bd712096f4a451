"""What a forward costs on this machine, measured when it is first asked."""

from __future__ import annotations

import time

from mars.engine.choice import Cost
from mars.engine.layout import Layout
from mars.engine.runner import Batch, Runner, Terms
from mars.engine.state import NOBODY, Place, State
from mars.method.acceptance import Dial
from mars.method.sampling import Sampling
from mars.method.windows import Shape

CONTEXT = 64
"""Cached tokens of the rows that costs are measured with"""
ROUNDS = 3
"""The best of so many is taken: other work on the machine only ever adds time"""


def measured_costs(runner: Runner, state: State, block_size: int) -> Cost:
    """Seconds by rows and layout: measured for some numbers of tokens fed, and straight lines between those."""
    chain = Layout.of(Shape(), block_size)
    layouts = [(1, Layout()), (1, chain), (1, Layout.of(Shape(None), block_size)), (8, chain)]
    best = {rows * layout.width: float("inf") for rows, layout in layouts}
    for _ in range(ROUNDS):
        for rows, layout in layouts:
            size = rows * layout.width
            best[size] = min(best[size], _measure(runner, state, rows, layout))
    points = sorted(best.items())
    return lambda rows, layout: interpolate(points, rows * layout.width)


def interpolate(points: list[tuple[int, float]], size: int) -> float:
    """The value at ``size`` on the line through the two nearest points; there are at least two."""
    right = next((index for index, (x, _) in enumerate(points) if index and x >= size), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return max(y0 + (y1 - y0) * (size - x0) / (x1 - x0), min(y0, y1) / 2)


def _measure(runner: Runner, state: State, rows: int, layout: Layout) -> float:
    """Seconds of a forward of rows that nobody owns."""
    terms = Terms(NOBODY, Dial("exact"), Sampling(seed=0), layout.groups, layout.masks)
    batch = Batch.of([terms] * rows, runner.checkpoint.vocabulary)
    state.put([Place(NOBODY, CONTEXT, 0)])
    started = time.perf_counter()
    runner.decode(batch, layout, CONTEXT + layout.width).read()
    return time.perf_counter() - started
