"""Progress of a training run: a bar on a terminal, lines in a log file."""

import sys
import time
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from transformers import TrainerCallback, TrainerState

WARM_UP = 3  # steps that may compile and do not count for the speed
SHOWN = ("loss", "clean_loss", "labels_loss", "distill_loss", "base_loss")


class Progress(TrainerCallback):
    """The time left is estimated from the speed after the first steps, which are slower."""

    def __init__(self, tokens_per_step: float) -> None:
        self._tokens_per_step = tokens_per_step
        self._bar: Bar | None = None
        self._losses = ""
        self._steps = 0
        self._mark = (0, 0.0)  # step and time from which the speed is measured

    def on_train_begin(self, _args: Any, state: TrainerState, _control: Any, **_: Any) -> None:
        self._mark = state.global_step, time.perf_counter()
        if not state.is_world_process_zero:
            return
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
        self._bar = Bar(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("", total=state.max_steps, completed=state.global_step, note="")
        self._bar.start()

    def on_step_end(self, _args: Any, state: TrainerState, _control: Any, **_: Any) -> None:
        self._steps += 1
        if self._bar:
            self._bar.update(self._task, completed=state.global_step, note=f"{self._losses}  {self._speed(state)}")
        if self._steps == WARM_UP:
            self._mark = state.global_step, time.perf_counter()

    def on_log(
        self, _args: Any, state: TrainerState, _control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        if self._bar is None or not logs or "train_runtime" in logs:
            return
        if "loss" not in logs:
            measured = "  ".join(f"{name} {value:.3f}" for name, value in logs.items() if name != "epoch")
            self._bar.console.print(measured, soft_wrap=True)
            return
        self._losses = "  ".join(f"{name} {logs[name]:.3f}" for name in SHOWN if name in logs)
        if self._bar.disable:
            line = f"step {state.global_step}/{state.max_steps}  {self._losses}  {self._speed(state)}"
            self._bar.console.print(line, soft_wrap=True)

    def _speed(self, state: TrainerState) -> str:
        steps = state.global_step - self._mark[0]
        if not steps:
            return ""
        per_step = (time.perf_counter() - self._mark[1]) / steps
        left = timedelta(seconds=round(per_step * (state.max_steps - state.global_step)))
        return f"{self._tokens_per_step / per_step:,.0f} tokens/s  {left} left"

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._bar:
            self._bar.stop()
