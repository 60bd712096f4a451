"""Plots of measurements: accuracy against speed, speed against batch size, time of a forward against its width."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from mars.errors import how_to_install
from mars.evaluation.tables import Row, title

Plot = Callable[[Any], None]  # draws into matplotlib's axes

KINDS = ("one-token", "exact", "relaxed", "threshold")
"""Each has the same colour in every plot; peers get the colours that follow"""
MARKERS = "oDs^vXP<>*"
CHECKPOINT_STYLES = (("-", "full"), ("--", "none"), ("-.", "left"), (":", "bottom"))
"""Dashes and marker fill, one pair for each checkpoint"""
THEMES = ("light", "dark")  # each has a style sheet of that name, with colours that colour-blind readers can tell apart


class Point(NamedTuple):
    """A checkpoint with one setting of the dial; the score and its interval are in percent."""

    checkpoint: str
    dial: str
    speed: float
    score: float
    low: float
    high: float

    @property
    def family(self) -> str:
        return self.dial.partition("=")[0]


def draw(rows: Sequence[Row], out: Path) -> list[Path]:
    """Write each plot beside ``out`` as SVG and PNG; without matplotlib, only print how to install it."""
    whole = [row for row in rows if row.get("category") is None]
    plots: dict[str, Plot] = {}
    if whole:
        plots = {"tokens-per-second": partial(speed, whole), "ms-per-forward": partial(cost, whole)}
    if len(whole) < len(rows):
        plots["by-category"] = partial(by_category, rows)
    try:
        return [file for name, plot in plots.items() for file in save(plot, out.with_name(f"{out.stem}.{name}"))]
    except ImportError:
        Console(stderr=True).print(f"no plots, for which: {how_to_install('bench')}", markup=False, soft_wrap=True)
        return []


def save(plot: Plot, path: Path, theme: str = "light") -> list[Path]:
    """Draw a plot and its legend into ``path``.svg and ``path``.png."""
    from matplotlib import style
    from matplotlib.figure import Figure

    svg, png = (path.with_name(path.name + suffix) for suffix in (".svg", ".png"))
    sheets = [Path(__file__).with_name(f"{name}.mplstyle") for name in ("plots", theme)]
    with style.context([*sheets, {"svg.hashsalt": path.name}]):
        figure = Figure(figsize=(5.2, 4), layout="constrained")
        axes = figure.subplots()
        plot(axes)
        labels = axes.get_legend_handles_labels()[1]
        columns = 2 if max(map(len, labels), default=0) > 18 else 4 if len(labels) == 4 else 3
        if labels:
            figure.legend(loc="outside lower center", ncols=columns)
        figure.savefig(svg, transparent=True, metadata={"Date": None})
        figure.savefig(png, dpi=150)
    return [svg, png]


def frontier(points: Sequence[Point], unit: str, axes: Any) -> None:
    """Accuracy against speed: a line for each family of dials, with dashes that tell the checkpoint."""
    styles = _styles(point.family for point in points)
    dials = Counter(point.checkpoint for point in points)
    single = [name for name in dials if dials[name] == 1]
    several = [name for name in dials if dials[name] > 1]
    for point in points:
        colour = styles[point.family]["color"]
        axes.vlines(point.speed, point.low, point.high, color=colour, linewidth=1, alpha=0.4)
        if point.checkpoint in several and point.dial == KINDS[0]:
            axes.axhline(point.score, color=colour, linewidth=0.9, linestyle=":", zorder=1)
        if value := point.dial.partition("=")[2]:
            at = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center"}
            axes.annotate(value, (point.speed, point.score), **at, fontsize=8)
    for name, marker in zip(single, cycle("xP*1"), strict=False):
        point = next(point for point in points if point.checkpoint == name)
        style = {"color": "C0", "marker": marker, "linestyle": ""}
        axes.plot(point.speed, point.score, **style, label=f"{name}, {point.dial}")
    for name, (dashes, fill) in zip(several, cycle(CHECKPOINT_STYLES), strict=False):
        for family, style in styles.items():
            mine = sorted(point for point in points if (point.checkpoint, point.family) == (name, family))
            speeds, scores = [point.speed for point in mine], [point.score for point in mine]
            axes.plot(speeds, scores, **style, linestyle=dashes, fillstyle=fill)
        if len(several) > 1:
            axes.plot([], [], color="C0", linestyle=dashes, marker="o", fillstyle=fill, label=name)
    for family, style in styles.items():
        axes.plot([], [], **style, linestyle="-" if family in KINDS[2:] else "", label=family)
    axes.set(xlabel=unit, ylabel="score, %")
    axes.xaxis.set_major_formatter("{x:,g}")


def speed(rows: Sequence[Row], axes: Any) -> None:
    """Tokens per second over batch sizes: a line for every dial and peer; bars if there is one batch size only."""
    from matplotlib.ticker import LogLocator

    styles = _styles(map(title, rows))
    if len({row["batch_size"] for row in rows}) == 1:
        _speed_bars(rows, styles, axes)
        return
    for name, style in styles.items():
        mine = sorted((row["batch_size"], row["tokens_per_second"]) for row in rows if title(row) == name)
        axes.plot(*zip(*mine, strict=True), **style, linestyle="-" if _kind(name) in KINDS else "--", label=name)
    sizes = sorted({int(row["batch_size"]) for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="requests at once", ylabel="tokens per second")
    axes.minorticks_off()
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,g}")


def _speed_bars(rows: Sequence[Row], styles: dict[str, dict[str, str]], axes: Any) -> None:
    colours = [styles[title(row)]["color"] for row in rows]
    bars = axes.barh([title(row) for row in rows], [row["tokens_per_second"] for row in rows], 0.6, color=colours)
    axes.bar_label(bars, fmt="{:,.0f}", padding=4)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.15)
    axes.set(xlabel=f"tokens per second, requests at once: {rows[0]['batch_size']}")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.figure.set_figheight(1.2 + 0.4 * len(rows))


def cost(rows: Sequence[Row], axes: Any) -> None:
    """Milliseconds per forward over the average width of a window: a line for every batch size."""
    for size in sorted({int(row["batch_size"]) for row in rows}):
        mine = [row for row in rows if row["batch_size"] == size and row["width"]]
        points = sorted((row["width"], row["ms_per_forward"]) for row in mine)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"batch size {size}")
    axes.set(xlabel="tokens in a window, on average", ylabel="milliseconds per forward")
    axes.set_ylim(bottom=0)


def by_category(rows: Sequence[Row], axes: Any) -> None:
    """Speed of ``exact`` over that of one-token for every category: a marker for every batch size."""
    mine = [row for row in rows if row.get("category") is not None and title(row) == "exact"]
    categories = list(dict.fromkeys(row["category"] for row in mine))[::-1]
    for number, size in enumerate(sorted({int(row["batch_size"]) for row in mine})):
        some = [row for row in mine if row["batch_size"] == size]
        points = [(row["ratio_to_one_token"], categories.index(row["category"])) for row in some]
        style = {"color": f"C{number + 1}", "marker": MARKERS[number % len(MARKERS)], "linestyle": ""}
        axes.plot(*zip(*points, strict=True), **style, label=f"{size} at once")
    axes.axvline(1, color="C0", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(categories)), categories)
    axes.set(xlabel="tokens per second, one-token = 1")
    axes.figure.set_figheight(1.5 + 0.26 * len(categories))


def _kind(name: str) -> str:
    return re.split("[ =:]", name)[0]


def _styles(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Colour and marker for each name; names of one kind share a colour."""
    known = list(dict.fromkeys(names))
    colours = list(dict.fromkeys([*KINDS, *map(_kind, known)]))
    styles: dict[str, dict[str, str]] = {}
    used: Counter[str] = Counter()
    for name in known:
        kind = _kind(name)
        number = colours.index(kind)
        styles[name] = {"color": f"C{number}", "marker": MARKERS[(number + used[kind]) % len(MARKERS)]}
        used[kind] += 1
    return styles
