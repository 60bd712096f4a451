"""Measurements as pictures: accuracy against speed, speed against batch size, cost of a forward against its width."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from mars.evaluation.tables import Row, title

Plot = Callable[[Any], None]
"""Draws into matplotlib's axes"""

KINDS = ("one-token", "exact", "relaxed", "threshold")
"""Each has a colour of its own in every plot; peers get those that follow"""
MARKERS = "oDs^vXP<>*"
WHOSE = (("-", "full"), ("--", "none"), ("-.", "left"), (":", "bottom"))
"""Dashes and fill of each checkpoint"""
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "svg.fonttype": "none",
    "text.parse_math": False,
}


def _theme(paper: str, ink: str, faint: str, line: str, colours: str) -> dict[Any, Any]:
    """Colours for matplotlib, safe for colour-blind readers; the first is one-token's."""
    return {
        "axes.edgecolor": line,
        "axes.facecolor": "none",
        "axes.labelcolor": ink,
        "axes.prop_cycle": f"cycler('color', {colours.split()})",
        "axes.titlecolor": ink,
        "figure.facecolor": paper,
        "grid.color": line,
        "legend.labelcolor": ink,
        "text.color": faint,
        "xtick.color": faint,
        "ytick.color": faint,
    }


THEMES = {
    "light": _theme(
        *("#fcfaf8", "#241d19", "#655b54", "#d9d0c9"), "#655b54 #0072b2 #a8478a #d98200 #007a5e #b03d1a #8a7900 #56b4e9"
    ),
    "dark": _theme(
        *("#171311", "#efe8e3", "#b3a79f", "#40362f"), "#b3a79f #56b4e9 #dd8cc0 #ff9f2e #4cc9a0 #ff946b #e6d93c #9fb8ff"
    ),
}


class Point(NamedTuple):
    """A checkpoint with one setting of the dial; the score is in percent, between its bounds."""

    who: str
    dial: str
    speed: float
    score: float
    low: float
    high: float

    @property
    def family(self) -> str:
        return self.dial.partition("=")[0]


def draw(rows: Sequence[Row], out: Path) -> list[Path]:
    """Write each plot beside ``out`` as SVG and PNG; nothing but a word if there is no matplotlib."""
    try:
        whole = [row for row in rows if row.get("category") is None]
        plots = {"tokens-per-second": speed(whole), "ms-per-forward": cost(whole)} if whole else {}
        if len(whole) < len(rows):
            plots["by-category"] = by_category(rows)
        return [file for name, plot in plots.items() for file in save(plot, out.with_name(f"{out.stem}.{name}"))]
    except ImportError:
        Console(stderr=True).print("no plots: pip install 'mars-decoding[bench]' for them", markup=False)
        return []


def save(plot: Plot, path: Path, theme: str = "light") -> list[Path]:
    """Draw a plot and its legend into ``path``.svg and ``path``.png."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    svg, png = (path.with_name(path.name + suffix) for suffix in (".svg", ".png"))
    with rc_context(STYLE | THEMES[theme] | {"svg.hashsalt": path.name}):
        figure = Figure(figsize=(5.2, 4), layout="constrained")
        axes = figure.subplots()
        plot(axes)
        labels = axes.get_legend_handles_labels()[1]
        columns = 2 if max(map(len, labels), default=0) > 18 else 4 if len(labels) == 4 else 3
        figure.legend(loc="outside lower center", ncols=columns)
        figure.savefig(svg, transparent=True, metadata={"Date": None})
        figure.savefig(png, dpi=150)
    return [svg, png]


def frontier(points: Sequence[Point], unit: str) -> Plot:
    """Accuracy against speed: a line for each family of dials, in each checkpoint's own dashes."""
    looks = _looks(point.family for point in points)
    dials = Counter(point.who for point in points)
    lone = [who for who in dials if dials[who] == 1]
    several = [who for who in dials if dials[who] > 1]

    def plot(axes: Any) -> None:
        for point in points:
            colour = looks[point.family]["color"]
            axes.vlines(point.speed, point.low, point.high, color=colour, linewidth=1, alpha=0.4)
            if point.who in several and point.dial == KINDS[0]:
                axes.axhline(point.score, color=colour, linewidth=0.9, linestyle=":", zorder=1)
            if value := point.dial.partition("=")[2]:
                at = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center"}
                axes.annotate(value, (point.speed, point.score), **at, fontsize=8)
        for who, marker in zip(lone, cycle("xP*1"), strict=False):
            mine = [point for point in points if point.who == who]
            look = {"color": "C0", "marker": marker, "linestyle": ""}
            axes.plot(mine[0].speed, mine[0].score, **look, label=f"{who}, {mine[0].dial}")
        for who, (dashes, fill) in zip(several, cycle(WHOSE), strict=False):
            for family, look in looks.items():
                mine = sorted(point for point in points if (point.who, point.family) == (who, family))
                speeds, scores = [point.speed for point in mine], [point.score for point in mine]
                axes.plot(speeds, scores, **look, linestyle=dashes, fillstyle=fill)
            if len(several) > 1:
                axes.plot([], [], color="C0", linestyle=dashes, marker="o", fillstyle=fill, label=who)
        for family, look in looks.items():
            axes.plot([], [], **look, linestyle="-" if family in KINDS[2:] else "", label=family)
        axes.set(xlabel=unit, ylabel="score, %")
        axes.xaxis.set_major_formatter("{x:,g}")

    return plot


def speed(rows: Sequence[Row]) -> Plot:
    """A line for every dial and peer, over batch sizes."""

    def plot(axes: Any) -> None:
        from matplotlib.ticker import LogLocator

        for who, look in _looks(map(title, rows)).items():
            mine = sorted((row["batch_size"], row["tokens_per_second"]) for row in rows if title(row) == who)
            line = "-" if re.split("[ =:]", who)[0] in KINDS else "--"
            axes.plot(*zip(*mine, strict=True), **look, linestyle=line, label=who)
        sizes = sorted({int(row["batch_size"]) for row in rows})
        axes.set(xscale="log", yscale="log", xlabel="requests at once", ylabel="tokens per second")
        axes.minorticks_off()
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,g}")

    return plot


def cost(rows: Sequence[Row]) -> Plot:
    """A line for every batch size, over the places that a forward's windows have."""

    def plot(axes: Any) -> None:
        for size in sorted({int(row["batch_size"]) for row in rows}):
            mine = [row for row in rows if row["batch_size"] == size and row["width"]]
            points = sorted((row["width"], row["ms_per_forward"]) for row in mine)
            axes.plot(*zip(*points, strict=True), marker="o", label=f"batch size {size}")
        axes.set(xlabel="places in a window, on average", ylabel="milliseconds per forward")
        axes.set_ylim(bottom=0)

    return plot


def by_category(rows: Sequence[Row]) -> Plot:
    """How many times as fast as one-token ``exact`` is, for every category, with a marker for every batch size."""

    def plot(axes: Any) -> None:
        mine = [row for row in rows if row.get("category") is not None and title(row) == "exact"]
        categories = list(dict.fromkeys(row["category"] for row in mine))[::-1]
        for number, size in enumerate(sorted({int(row["batch_size"]) for row in mine})):
            points = [
                (row["ratio_to_one_token"], categories.index(row["category"]))
                for row in mine
                if row["batch_size"] == size
            ]
            look = {"color": f"C{number + 1}", "marker": MARKERS[number % len(MARKERS)], "linestyle": ""}
            axes.plot(*zip(*points, strict=True), **look, label=f"{size} at once")
        axes.axvline(1, color="C0", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(categories)), categories)
        axes.set(xlabel="tokens per second, one-token = 1")
        axes.figure.set_figheight(1.5 + 0.26 * len(categories))

    return plot


def _looks(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Colour and marker of each: those of a kind share a colour."""
    known = list(dict.fromkeys(names))
    kinds = {name: re.split("[ =:]", name)[0] for name in known}
    colours = list(dict.fromkeys([*KINDS, *kinds.values()]))
    looks: dict[str, dict[str, str]] = {}
    used: Counter[str] = Counter()
    for name, kind in kinds.items():
        place = colours.index(kind)
        looks[name] = {"color": f"C{place}", "marker": MARKERS[(place + used[kind]) % len(MARKERS)]}
        used[kind] += 1
    return looks
