"""Measurements as pictures: a line for every dial and peer, over batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mars.evaluation.tables import Row, title

PLOTS = {
    "tokens-per-second": ("tokens_per_second", "tokens per second", "log"),
    "ms-per-forward": ("ms_per_forward", "milliseconds per forward", "linear"),
}
"""File name ending → value, what it is called, and the scale of its axis"""


def draw(rows: Sequence[Row], out: Path) -> list[Path]:
    """Write each plot beside ``out`` as SVG and PNG; nothing but a word if there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        Console(stderr=True).print("no plots: pip install 'mars-llm[bench]' for them", markup=False)
        return []
    written: list[Path] = []
    sizes = sorted({int(row["batch_size"]) for row in rows})
    for name, (key, caption, scale) in PLOTS.items():
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        for who in dict.fromkeys(map(title, rows)):
            mine = [row for row in rows if title(row) == who and row[key] is not None]
            if mine:
                line = "--" if "peer" in mine[0] else "-"
                axes.plot([row["batch_size"] for row in mine], [row[key] for row in mine], line, marker="o", label=who)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_yscale(scale)
        if scale == "linear":
            axes.set_ylim(bottom=0)
        axes.set(xlabel="batch size", ylabel=caption)
        axes.grid(alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        for suffix in (".svg", ".png"):
            written.append(out.with_name(f"{out.stem}.{name}{suffix}"))
            figure.savefig(written[-1], dpi=150)
    return written
