"""Measurements as a table: in Markdown, and on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

Row = Mapping[str, Any]


def _rounded(value: float) -> str:
    """To about three digits."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


COLUMNS: dict[str, tuple[Callable[[float], str], tuple[str, ...]]] = {
    "batch": (str, ("batch_size",)),
    "tok/s": (_rounded, ("tokens_per_second",)),
    "× one-token": ("{:.2f}".format, ("ratio_to_one_token",)),
    "tok/fwd": ("{:.2f}".format, ("tokens_per_forward",)),
    "width": ("{:.1f}".format, ("width",)),
    "ms/fwd": (_rounded, ("ms_per_forward",)),
    "copy bw": ("{:.0%}".format, ("bandwidth_share",)),
    "agree": ("{:.3f}".format, ("agreement",)),
    "same text": ("{:.0%}".format, ("same_text",)),
    "TTFT ms p50/p99": (_rounded, ("ttft_ms_p50", "ttft_ms_p99")),
    "TPOT ms p50/p99": (_rounded, ("tpot_ms_p50", "tpot_ms_p99")),
    "GiB": (lambda size: f"{size / 2**30:.2f}", ("peak_memory_bytes",)),
}
"""How to write the values, and which ones"""


def title(row: Row) -> str:
    """``exact``, ``exact tree`` or a peer's name."""
    window = row["window"] if row["window"] != "auto" else None
    return " ".join(filter(None, (row.get("dial") or row.get("peer"), window)))


def _title(row: Row) -> str:
    return ", ".join(filter(None, (title(row), row.get("category"))))


def markdown(rows: Sequence[Row]) -> str:
    lines = [["", *COLUMNS], ["---", *["---:"] * len(COLUMNS)], *_cells(rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def terminal(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right", overflow="fold")
    for line in _cells(rows):
        table.add_row(*line)
    return table


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    """By batch size and category; within these, in the order of measurement."""
    ordered = sorted(rows, key=lambda row: (int(row["batch_size"]), row.get("category") or ""))
    return [[_title(row), *(_cell(row, *column) for column in COLUMNS.values())] for row in ordered]


def _cell(row: Row, write: Callable[[float], str], keys: Sequence[str]) -> str:
    return " / ".join("–" if row[key] is None else write(row[key]) for key in keys)
