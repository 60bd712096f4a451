"""A training run's progress: a bar for a person, lines for a log file."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from transformers import TrainerCallback, TrainerState

WARM_UP = 3
"""Steps that may compile, and say nothing about the speed"""
SHOWN = ("loss", "clean_loss", "labels_loss", "distill_loss", "base_loss")


class Progress(TrainerCallback):
    """The time left is judged by the last steps' speed: neither compilation nor a resumed start confuses it."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        self._bar: Bar | None = None
        self._steps = 0
        self._mark = (0, 0.0)
        """Step and time from which the speed is measured"""

    def on_train_begin(self, _args: Any, state: TrainerState, _control: Any, **_: Any) -> None:
        self._mark = state.global_step, time.perf_counter()
        if not state.is_world_process_zero:
            return
        columns: list[ProgressColumn] = [TextColumn("training"), BarColumn(), MofNCompleteColumn()]
        left = [TimeRemainingColumn(), TextColumn("left {task.fields[note]}")]
        self._bar = Bar(*columns, *left, console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("", total=state.max_steps, completed=state.global_step, note="")
        self._bar.start()

    def on_step_end(self, _args: Any, state: TrainerState, _control: Any, **_: Any) -> None:
        self._steps += 1
        if self._steps == WARM_UP:
            self._mark = state.global_step, time.perf_counter()
        if self._bar:
            self._bar.advance(self._task, state.global_step - self._bar.tasks[0].completed)

    def on_log(
        self, _args: Any, state: TrainerState, _control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        if self._bar is None or not logs or "train_runtime" in logs:
            return
        if "loss" not in logs:
            measured = "  ".join(f"{name} {value:.3f}" for name, value in logs.items() if name != "epoch")
            self._bar.console.print(measured, soft_wrap=True)
            return
        step, now = state.global_step, time.perf_counter()
        per_step = (now - self._mark[1]) / max(1, step - self._mark[0])
        self._mark = step, now
        losses = "  ".join(f"{name} {logs[name]:.3f}" for name in SHOWN if name in logs)
        note = f"{losses}  {self._tokens_per_step / per_step:,.0f} tokens/s"
        self._bar.update(self._task, note=note)
        if self._bar.disable:
            left = timedelta(seconds=round(per_step * (state.max_steps - step)))
            self._bar.console.print(f"step {step}/{state.max_steps}  {note}  {left} left", soft_wrap=True)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._bar:
            self._bar.stop()
