"""``mars bench``: every dial and peer at every batch size, on the same prompts, in one run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mars.api import Model
from mars.engine import memory_for
from mars.evaluation import tables
from mars.evaluation.peers import check_model, open_peer
from mars.evaluation.plan import Plan, source_of, split_dial
from mars.evaluation.plots import draw
from mars.evaluation.provenance import collect
from mars.evaluation.speed import Contender, Run, Traffic, measure, to_row, with_dial, with_vllm
from mars.evaluation.vllm import PLUGIN, load_vllm
from mars.models import Checkpoint


def bench(checkpoint: Checkpoint, plan: Plan) -> tuple[list[dict[str, Any]], list[Path]]:
    """Measure what the plan says; returns the rows, and the files that hold them."""
    model = Model(checkpoint)
    for name in plan.dials:
        model.dial(split_dial(name)[0])  # raises before anything is measured
    for name in plan.peers:
        check_model(name, checkpoint)
    with progress_bar() as bar:
        running = _Bench(checkpoint, plan, bar)
        running.dials()
        for name in plan.peers:
            running.peer(name)
    return running.rows, [plan.out, _table_of(plan.out), *draw(running.rows, plan.out)]


def progress_bar() -> Progress:
    """Shown where somebody looks."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())


class _Bench:
    """A run so far. The files are written anew after every measurement, so that a killed run leaves whole ones."""

    def __init__(self, checkpoint: Checkpoint, plan: Plan, bar: Progress) -> None:
        self.rows: list[dict[str, Any]] = []
        self._checkpoint = checkpoint
        self._plan = plan
        self._prompts = plan.encode(checkpoint)
        self._length = max(len(each) for prompts in self._prompts.values() for each in prompts) + plan.max_new_tokens
        self._traffic = Traffic.of(checkpoint)
        self._one_token: dict[tuple[int, str | None], Run] = {}
        """By batch size and category"""
        dtype = str(checkpoint.module.dtype).removeprefix("torch.")
        self._facts = {
            "options": plan.options() | {"dtype": dtype},
            "provenance": collect(),
            "bandwidth_bytes_per_second": self._traffic.bandwidth,
        }
        self._bar = bar
        self._task = bar.add_task(
            "", total=len(plan.batch_sizes) * (len(plan.dials) + len(plan.peers)) * len(self._prompts)
        )

    def dials(self) -> None:
        rows = max(self._plan.batch_sizes)
        model = Model(self._checkpoint, rows=rows, memory=memory_for(self._checkpoint, rows, self._length))
        if self._plan.engine == "vllm":
            where = (self._checkpoint, self._source, rows, self._length)
            with load_vllm(*where, speculative_config=PLUGIN) as llm:
                self._turn(lambda name: with_vllm(llm, model, name))
        else:
            model.warm_up(self._bar, dials=[split_dial(each)[0] for each in self._plan.dials])
            self._turn(lambda name: with_dial(model, *split_dial(name)))

    def _turn(self, contender: Callable[[str], Contender]) -> None:
        for batch_size in self._plan.batch_sizes:
            for name in self._plan.dials:
                self._take(contender(name), batch_size)

    @property
    def _source(self) -> str | None:
        return source_of(self._plan.model, self._plan.adapter, self._checkpoint)

    def peer(self, name: str) -> None:
        sizes = self._plan.batch_sizes
        with open_peer(name, self._checkpoint, self._source, max(sizes), self._length) as peer:
            for batch_size in sizes:
                self._take(peer, batch_size)

    def _take(self, contender: Contender, batch_size: int) -> None:
        """Measure one thing, on each category by itself where they are apart, and keep the rows."""
        for category, prompts in self._prompts.items():
            what = ", ".join(filter(None, (tables.title(contender.label), f"batch size {batch_size}", category)))
            self._bar.update(self._task, description=what)
            run = measure(
                contender,
                prompts,
                self._checkpoint.device,
                batch_size=batch_size,
                requests=self._plan.min_requests,
                max_new_tokens=self._plan.max_new_tokens,
            )
            one_token = self._one_token.setdefault((batch_size, category), run)  # the first dial's
            row = to_row(contender, batch_size, run, one_token, self._traffic)
            self.rows.append(row if category is None else {"category": category, **row})
            self._write()
            self._bar.advance(self._task)
            if self._bar.disable:
                said = f"{what}: {run.tokens_per_second:,.1f} tokens/s"
                self._bar.console.print(said, markup=False, highlight=False)

    def _write(self) -> None:
        write_whole(self._plan.out, json.dumps(self._facts | {"rows": self.rows}, indent=2) + "\n")
        write_whole(_table_of(self._plan.out), tables.markdown(self.rows))


def _table_of(out: Path) -> Path:
    return out.with_suffix(".md")


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once: whoever looks sees the old content or the new."""
    scratch = path.with_name(f"{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
