"""What a forward costs on this machine, measured once and kept in a file for the next start."""

from __future__ import annotations

import hashlib
import json
import time

import torch

from mars.engine.choice import Cost
from mars.engine.layout import Layout
from mars.engine.runner import Batch, Runner, Terms
from mars.engine.state import NOBODY, Place, State
from mars.method.dials import Dial
from mars.method.sampling import Sampling
from mars.method.windows import Shape
from mars.models.builtin import cache_home
from mars.models.checkpoint import Checkpoint

CONTEXT = 128
"""Cached tokens of the rows that costs are measured with"""
REPEATS = 3


def measured_costs(runner: Runner, state: State, checkpoint: Checkpoint) -> Cost:
    """Seconds by rows and layout: measured for some numbers of tokens fed, and straight lines between those."""
    block_size = checkpoint.settings.block_size if checkpoint.settings else 1
    shapes = [Layout(), *(Layout.of(Shape(groups), block_size) for groups in (1, 2, None))]
    points = [(1, layout) for layout in shapes] + [(8, shapes[1])]
    path = cache_home() / "costs" / f"{_fingerprint(checkpoint)}.json"
    try:
        seconds = [float(each) for each in json.loads(path.read_text())]
        if len(seconds) != len(points):
            raise ValueError
    except (OSError, ValueError, TypeError):
        seconds = [_measure(runner, state, checkpoint, *point) for point in points]
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(seconds))
        scratch.rename(path)
    table = sorted({rows * layout.width: cost for (rows, layout), cost in zip(points, seconds, strict=True)}.items())
    return lambda rows, layout: interpolate(table, rows * layout.width)


def interpolate(table: list[tuple[int, float]], size: int) -> float:
    """The value at ``size`` on the line through the two nearest points of the table."""
    if len(table) == 1:
        return table[0][1]
    right = next((index for index, (x, _) in enumerate(table[1:-1], 1) if x >= size), len(table) - 1)
    (x0, y0), (x1, y1) = table[right - 1], table[right]
    return max(y0 + (y1 - y0) * (size - x0) / (x1 - x0), min(y0, y1) / 2)


def _measure(runner: Runner, state: State, checkpoint: Checkpoint, rows: int, layout: Layout) -> float:
    """Seconds of a forward of rows that nobody owns."""
    batch = Batch.of([Terms(NOBODY, Dial("exact"), Sampling(seed=0), layout.groups, layout.masks)] * rows, checkpoint)
    best = float("inf")
    for _ in range(REPEATS):
        state.put([Place(NOBODY, min(CONTEXT, state.table.shape[1] - 2), 0)])
        started = time.perf_counter()
        runner.decode(batch, layout, CONTEXT + layout.width).read()
        best = min(best, time.perf_counter() - started)
    return best


def _fingerprint(checkpoint: Checkpoint) -> str:
    """Of all that costs depend on."""
    device = checkpoint.device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu-{torch.get_num_threads()}"
    config = checkpoint.module.config.to_json_string()
    facts = f"{config} {checkpoint.module.dtype} {checkpoint.settings} {machine} {torch.__version__}"
    return hashlib.sha256(facts.encode()).hexdigest()[:16]
