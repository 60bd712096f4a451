"""Tables of measurements: in Markdown, and on a terminal."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

Row = Mapping[str, Any]  # a measurement as it stands in a results file
Lines = Sequence[Sequence[str]]  # the cells of a table, the head first


def _rounded(value: float) -> str:
    """To about three digits."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


COLUMNS: dict[str, tuple[Callable[[float], str], tuple[str, ...]]] = {
    "batch": (str, ("batch_size",)),
    "tok/s": (_rounded, ("tokens_per_second",)),
    "expected": (_rounded, ("expected_tokens_per_second",)),
    "× one-token": ("{:.2f}".format, ("ratio_to_one_token",)),
    "tok/fwd": ("{:.2f}".format, ("tokens_per_forward",)),
    "width": ("{:.1f}".format, ("width",)),
    "passed": ("{:.0%}".format, ("drafts_passed",)),
    "ms/fwd": (_rounded, ("ms_per_forward",)),
    "copy bw": ("{:.0%}".format, ("bandwidth_share",)),
    "agree": ("{:.3f}".format, ("agreement",)),
    "same text": ("{:.0%}".format, ("same_text",)),
    "TTFT ms p50/p99": (_rounded, ("ttft_ms_p50", "ttft_ms_p99")),
    "TPOT ms p50/p99": (_rounded, ("tpot_ms_p50", "tpot_ms_p99")),
    "GiB": (lambda size: f"{size / 2**30:.2f}", ("peak_memory_bytes",)),
}  # of ``mars bench``: how values are written, and which ones


def title(row: Row) -> str:
    """``exact``, ``exact tree`` or a peer's name."""
    window = row["window"] if row["window"] != "auto" else None
    return " ".join(filter(None, (row.get("dial") or row.get("peer"), window)))


def bench_table(rows: Sequence[Row]) -> Lines:
    """The rows of ``mars bench`` by batch size and category; within these, in the order of measurement."""

    def cells(row: Row) -> list[str]:
        name = ", ".join(filter(None, (title(row), row.get("category"))))
        return [name, *(" / ".join(cell(row[key], write) for key in keys) for write, keys in COLUMNS.values())]

    ordered = sorted(rows, key=lambda row: (int(row["batch_size"]), row.get("category") or ""))
    return [["", *COLUMNS], *map(cells, ordered)]


def cell(value: Any, write: Callable[[Any], str]) -> str:
    return "–" if value is None else write(value)


def markdown(lines: Lines, names: int = 1) -> str:
    """A table in Markdown; the first columns are ``names``, the others numbers."""
    rules = ["---"] * names + ["---:"] * (len(lines[0]) - names)
    return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], rules, *lines[1:]))


def show(lines: Lines, names: int = 1) -> None:
    """Print a table."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for number, column in enumerate(lines[0]):
        is_name = number < names
        table.add_column(column, justify="left" if is_name else "right", no_wrap=is_name, overflow="fold")
    for line in lines[1:]:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
