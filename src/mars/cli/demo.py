"""``mars demo``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer import Option

from mars.cli.loading import load_warm
from mars.cli.output import by_forward, has_colours, stdout

if TYPE_CHECKING:
    from mars.api import Model
    from mars.core.output import RequestOutput

PROMPTS = (
    "Write a Python function that checks whether a number is even.",
    "Count from 1 to 20.",
    "Tom has 3 boxes with 12 apples each. How many apples does he have?",
)
DIALS = ("one-token", "exact", "threshold=0.9")
MAX_NEW_TOKENS = 192
NARROWEST, GAP = 36, 2  # characters: of a column, and between two
FRAME = 0.1  # seconds between two redraws


@dataclass
class Column:
    """What a dial has written so far, by forward, and the figures of the finished answer."""

    dial: str
    pieces: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)


def demo(
    dtype: Annotated[str, Option(help="bfloat16, float16, float32, or int8 on a CPU.")] = "bfloat16",
) -> None:
    """Show one-token, exact and threshold side by side on the built-in model."""
    console = stdout()
    marks = "Each colour is one forward" if has_colours(console) else "Bars stand between forwards"
    console.print(
        f"MARS: several tokens per forward pass. {marks}. The model is smollm2-135m in {dtype}; text and speed come "
        "from this machine, now, one answer at a time. Code, lists and sums, as here, gain most; "
        "free prose gains least."
    )
    model = load_warm("smollm2-135m", dtype=dtype)
    for dial in DIALS:
        model.generate("Hello", dial=dial, max_new_tokens=16)  # the first forwards of a process are slow
    answers = [show(console, model, prompt) for prompt in PROMPTS]
    console.print()
    console.print(memory_speed(model, max(plain.tokens_per_second for plain, *_ in answers)), style="dim")
    console.print(f"\n{verdict(answers, model.checkpoint.form)}", style="bold")


def show(console: Console, model: Model, prompt: str) -> list[RequestOutput]:
    """Answer a prompt with one dial after the other, with as many columns in a row as there is room for."""
    console.print(f"\n{prompt}", style="bold", markup=False)
    model.generate(prompt, max_new_tokens=1)  # the first dial finds the prompt cached, as the others do
    answers: list[RequestOutput] = []
    across = min(len(DIALS), max(1, (console.width + GAP) // (NARROWEST + GAP)))
    for first in range(0, len(DIALS), across):
        columns = [Column(dial) for dial in DIALS[first : first + across]]
        draw = partial(side_by_side, console, columns, (console.width + GAP) // across - GAP)
        console.print()
        draw_now = partial(draw, console.height)
        with Live(get_renderable=draw_now, console=console, auto_refresh=False, transient=True) as live:
            for column in columns:
                answers.append(write(column, model, prompt, live))
                column.figures = figures(answers[-1], answers[0])
        console.print(draw())
    return answers


def write(column: Column, model: Model, prompt: str, live: Live) -> RequestOutput:
    """Stream an answer into a column. Its seconds are those of decoding: drawing takes turns with that."""
    stream = model.stream(prompt, dial=column.dial, max_new_tokens=MAX_NEW_TOKENS)
    drawing = drawn = 0.0
    for piece in stream:
        column.pieces.append(piece)
        began = time.perf_counter()
        if began - drawn >= FRAME and not stream.is_finished:
            live.refresh()
            drawn = time.perf_counter()
            drawing += drawn - began
    answer = stream.result
    answer.seconds -= drawing
    if answer.finish_reason == "length":
        column.pieces.append(" …")
    return answer


def side_by_side(console: Console, columns: Sequence[Column], width: int, height: int | None = None) -> Table:
    """The columns, each with its heading and figures; of what is higher than ``height``, the last lines."""
    table = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    texts = [by_forward(console, column.pieces).wrap(console, width) for column in columns]
    room = 0 if height is None else max(1, height - 7)  # 7: heading, figures, and the lines before and after
    for _ in columns:
        table.add_column(width=width)
    table.add_row(*(Text(column.dial, "bold") for column in columns))
    table.add_row(*(Text("\n").join(lines[-room:]) for lines in texts))  # [-0:] is all
    table.add_row(*(Text("\n".join(["", *column.figures]), "dim") for column in columns))
    return table


def figures(answer: RequestOutput, plain: RequestOutput) -> list[str]:
    """What is said below an answer; ``plain`` is that of one-token."""
    lines = [f"{answer.tokens_per_forward:.2f} tokens per forward", f"{answer.tokens_per_second:.0f} tokens per second"]
    if answer is plain:
        return lines
    same = answer.token_ids == plain.token_ids
    return [*lines, "same text as one-token" if same else f"another text, agreement {answer.agreement:.2f}"]


def verdict(answers: Sequence[Sequence[RequestOutput]], form: str) -> str:
    """What was shown, by the figures of all answers, and what to try next. ``form`` is the model's."""
    plain, exact = [each[0] for each in answers], [each[1] for each in answers]
    same = sum(one.token_ids == other.token_ids for one, other in zip(plain, exact, strict=True))
    per_forward = round(sum(each.num_tokens for each in exact) / sum(each.forwards for each in exact), 1)
    ratio = round(_speed(exact) / _speed(plain), 1)
    is_faster = per_forward > 1 and ratio > 1  # at one token per forward, a difference is chance
    gain = f"at {ratio} times the speed" if is_faster else "but no faster here"
    further = "mars demo --dtype bfloat16, " if form == "int8" and not is_faster else ""
    return (
        f"exact wrote the same text as one-token in {same} of {len(answers)} answers, with {per_forward} tokens per "
        f"forward, {gain}. Try next: {further}mars chat, mars serve."
    )


def _speed(answers: Sequence[RequestOutput]) -> float:
    return sum(each.num_tokens for each in answers) / sum(each.seconds for each in answers)


def memory_speed(model: Model, tokens_per_second: float) -> str:
    """What one token at a time takes from memory, beside what memory gives."""
    from mars.evaluation.provenance import machine
    from mars.evaluation.speed import copy_bandwidth

    weights, checkpoint = model.engine().weight_bytes, model.checkpoint
    read, copied = weights * tokens_per_second, copy_bandwidth(checkpoint.device)
    return (
        f"{machine()}. One token at a time reads {weights / 1e6:.0f} MB of weights per token ({checkpoint.form}) at "
        f"{read / 1e9:.1f} GB/s, {read / copied:.0%} of what a copy in memory reads and writes."
    )
