"""Measurements as pictures: speed against batch size, and what a forward costs against its width."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from mars.evaluation.tables import Row, title


def draw(rows: Sequence[Row], out: Path) -> list[Path]:
    """Write each plot beside ``out`` as SVG and PNG; nothing but a word if there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        Console(stderr=True).print("no plots: pip install 'mars-llm[bench]' for them", markup=False)
        return []
    written: list[Path] = []
    for name, plot in {"tokens-per-second": _speed, "ms-per-forward": _cost}.items():
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        plot(axes, rows)
        axes.grid(alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        for suffix in (".svg", ".png"):
            written.append(out.with_name(f"{out.stem}.{name}{suffix}"))
            figure.savefig(written[-1], dpi=150)
    return written


def _speed(axes: Any, rows: Sequence[Row]) -> None:
    """A line for every dial and peer, over batch sizes."""
    for who in dict.fromkeys(map(title, rows)):
        mine = [row for row in rows if title(row) == who]
        line = "--" if "peer" in mine[0] else "-"
        points = zip(*((row["batch_size"], row["tokens_per_second"]) for row in mine), strict=True)
        axes.plot(*points, line, marker="o", label=who)
    sizes = sorted({int(row["batch_size"]) for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="tokens per second")
    axes.minorticks_off()
    axes.set_xticks(sizes, [str(size) for size in sizes])


def _cost(axes: Any, rows: Sequence[Row]) -> None:
    """A line for every batch size, over the places that a forward's windows have."""
    for size in sorted({int(row["batch_size"]) for row in rows}):
        mine = [row for row in rows if row["batch_size"] == size and row["width"]]
        points = sorted((row["width"], row["ms_per_forward"]) for row in mine)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"batch size {size}")
    axes.set(xlabel="places in a window, on average", ylabel="milliseconds per forward")
    axes.set_ylim(bottom=0)
