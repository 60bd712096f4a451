"""``mars bench``: every dial and peer at every batch size, on the same prompts, in one run."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
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
from mars.evaluation.speed import Decoder, Run, Traffic, measure, to_row, with_dial, with_vllm
from mars.evaluation.vllm import PLUGIN, load_vllm
from mars.models import Checkpoint
from mars.training.files import write_whole


def bench(checkpoint: Checkpoint, plan: Plan) -> tuple[list[dict[str, Any]], list[Path]]:
    """Measure what the plan says; returns the rows and the files that were written."""
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
    return running.rows, [plan.out, plan.out.with_suffix(".md"), *draw(running.rows, plan.out)]


def progress_bar() -> Progress:
    """Shown on terminals only."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())


class _Bench:
    """A run so far. The files are replaced after every measurement, so that a killed run leaves whole ones."""

    def __init__(self, checkpoint: Checkpoint, plan: Plan, bar: Progress) -> None:
        self.rows: list[dict[str, Any]] = []
        self._checkpoint = checkpoint
        self._plan = plan
        self._prompts = plan.encode(checkpoint)
        self._length = max(len(each) for prompts in self._prompts.values() for each in prompts) + plan.max_new_tokens
        self._traffic = Traffic.of(checkpoint)
        self._one_token: dict[tuple[int, str | None], Run] = {}
        """The runs that others are compared with, by batch size and category"""
        self._facts = {
            "options": plan.options() | {"dtype": checkpoint.form},
            "provenance": collect(),
            "bandwidth_bytes_per_second": self._traffic.bandwidth,
        }
        self._source = source_of(plan.model, plan.adapter, checkpoint)
        self._bar = bar
        self._task = bar.add_task(
            "", total=len(plan.batch_sizes) * (len(plan.dials) + len(plan.peers)) * len(self._prompts)
        )

    def dials(self) -> None:
        largest = max(self._plan.batch_sizes)
        model = Model(
            self._checkpoint, max_num_seqs=largest, memory=memory_for(self._checkpoint, largest, self._length)
        )
        if self._plan.engine == "vllm":
            options = {"speculative_config": PLUGIN}
            with load_vllm(self._checkpoint, self._source, largest, self._length, **options) as llm:
                self._measure_dials(lambda name: with_vllm(llm, model, name))
        else:
            model.warm_up(self._bar)
            self._traffic = replace(self._traffic, weights=model.engine().weight_bytes)
            self._measure_dials(lambda name: with_dial(model, *split_dial(name)))

    def _measure_dials(self, decoder_of: Callable[[str], Decoder]) -> None:
        for batch_size in self._plan.batch_sizes:
            for name in self._plan.dials:
                self._measure(decoder_of(name), batch_size)

    def peer(self, name: str) -> None:
        sizes = self._plan.batch_sizes
        with open_peer(name, self._checkpoint, self._source, max(sizes), self._length) as peer:
            for batch_size in sizes:
                self._measure(peer, batch_size)

    def _measure(self, decoder: Decoder, batch_size: int) -> None:
        """Measure one decoder on the prompts, or on each category of them by itself, and keep the rows."""
        for category, prompts in self._prompts.items():
            title = ", ".join(filter(None, (tables.title(decoder.label), f"batch size {batch_size}", category)))
            self._bar.update(self._task, description=title)
            options = {"requests": self._plan.min_requests, "max_new_tokens": self._plan.max_new_tokens}
            run = measure(decoder, prompts, batch_size=batch_size, **options)
            one_token = self._one_token.setdefault((batch_size, category), run)  # the first dial's
            row = to_row(decoder, batch_size, run, one_token, self._traffic)
            self.rows.append(row if category is None else {"category": category, **row})
            write_whole(self._plan.out, json.dumps(self._facts | {"rows": self.rows}, indent=2) + "\n")
            write_whole(self._plan.out.with_suffix(".md"), tables.markdown(tables.bench_table(self.rows)))
            self._bar.advance(self._task)
            if self._bar.disable:
                line = f"{title}: {run.tokens_per_second:,.1f} tokens/s"
                self._bar.console.print(line, markup=False, highlight=False)
