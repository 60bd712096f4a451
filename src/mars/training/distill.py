"""A model writes its own training data: answers to given prompts, and prompts of its own.

Training on what a model says itself moves its AR mode least and needs no data set. The output is JSONL with a chat a
line; a run that was cut off goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mars.errors import MarsError
from mars.models import Checkpoint
from mars.training.chats import Chat
from mars.training.rows import read_rows, to_prompt
from mars.training.writer import Job, Writer, Written

REPORT_SECONDS = 20
"""Between two lines of progress where there is no terminal to draw a bar on"""


@dataclass(frozen=True, slots=True)
class Filters:
    """What is not worth keeping."""

    min_tokens: int = 4
    max_prompt_tokens: int = 512
    max_repetition: float = 0.6
    """Largest share of four-token sequences that occurred before in the same text"""
    keep_cut: bool = True
    """Keep answers that hit the length limit; they are marked, so that training does not teach to stop there"""


@dataclass(frozen=True, slots=True)
class Distillation:
    """What to write."""

    temperatures: Sequence[float] = (0.0, 0.8)
    """Each prompt gets one answer at each of these"""
    max_new_tokens: int = 256
    own_prompts: int = 0
    """How many prompts the model writes itself"""
    rows: int = 64
    """Texts written at once"""
    seed: int = 0
    filters: Filters = field(default_factory=Filters)

    def __post_init__(self) -> None:
        least = {"rows": 1, "max_new_tokens": 1, "own_prompts": 0}
        wrong = [f"{name} must be {low} or more" for name, low in least.items() if getattr(self, name) < low]
        if wrong or not self.temperatures or min(self.temperatures) < 0:
            raise MarsError((*wrong, "temperatures must be numbers of 0 or more")[0])


def distill(checkpoint: Checkpoint, sources: Sequence[str], out: Path, plan: Distillation) -> Counter[str]:
    """Answer the prompts of all sources and the model's own; returns what became of them."""
    if not sources and not plan.own_prompts:
        raise MarsError("there is nothing to answer: give --prompts, or --own-prompts for the model's own")
    if out.is_dir():
        raise MarsError(f"{out} is a folder: name a file to write")
    out.parent.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    length = min(plan.filters.max_prompt_tokens + plan.max_new_tokens, checkpoint.context or sys.maxsize)
    done = len(_read(out)) + len(_read(_prompts_of(out)))  # a continued run must not draw what it drew before
    writer = Writer(checkpoint, plan.rows, length, plan.seed + done)
    prompts = list(_unique([*_given(sources, counts), *_own(checkpoint, writer, out, plan, counts)], counts))
    random.Random(plan.seed).shuffle(prompts)  # a run that is stopped early leaves some of every kind
    _answer(checkpoint, writer, prompts, out, plan, counts)
    return counts


def _given(sources: Sequence[str], counts: Counter[str]) -> Iterator[Chat]:
    def on_bad_row(message: str) -> None:
        counts["unreadable prompts"] += 1
        Console(stderr=True).print(f"skipped {message}", style="yellow", markup=False, soft_wrap=True)

    for source in sources:
        for row in read_rows(source, on_bad_row=on_bad_row, convert=to_prompt):
            yield row.messages


def _own(checkpoint: Checkpoint, writer: Writer, out: Path, plan: Distillation, counts: Counter[str]) -> list[Chat]:
    """Prompts that the model writes from the bare header of a user's turn."""
    path = _prompts_of(out)
    kept = [row["messages"] for row in _read(path)]
    missing = plan.own_prompts - len(kept)
    if missing <= 0:
        return kept[: plan.own_prompts]
    header = _header(checkpoint)
    jobs = [Job(number, header, 1.0, plan.filters.max_prompt_tokens // 2) for number in range(missing)]

    def keep(written: Written) -> dict[str, Any] | None:
        text = _text(checkpoint, written.tokens).strip()
        if not text or not written.ended or _why_not(written, plan.filters):
            counts["own prompts filtered"] += 1
            return None
        return {"messages": [{"role": "user", "content": text}]}

    _write(writer, jobs, path, keep, "writing prompts", missing)
    return [row["messages"] for row in _read(path)]


def _answer(
    checkpoint: Checkpoint,
    writer: Writer,
    prompts: Sequence[Chat],
    out: Path,
    plan: Distillation,
    counts: Counter[str],
) -> None:
    done = {row["id"] for row in _read(out)}
    counts["answers found"] = len(done)

    def jobs() -> Iterator[Job]:
        for messages in prompts:
            try:
                tokens = checkpoint.encode(messages)
            except MarsError as error:
                counts["prompts refused"] += 1
                Console(stderr=True).print(f"skipped a prompt: {error}", style="yellow", markup=False, soft_wrap=True)
                continue
            if len(tokens) >= min(writer.length, plan.filters.max_prompt_tokens + 1):
                counts["prompts too long"] += 1
                continue
            for number, temperature in enumerate(plan.temperatures):
                key = f"{_digest(messages)}-{number}"
                if key not in done:
                    yield Job((key, messages), tokens, temperature, plan.max_new_tokens)

    def keep(written: Written) -> dict[str, Any] | None:
        reason = _why_not(written, plan.filters)
        counts[reason or "answers"] += 1
        if reason:
            return None
        counts["answer tokens"] += len(written.tokens)
        key, messages = written.job.key
        answer = {"role": "assistant", "content": _text(checkpoint, written.tokens)}
        row = {"id": key, "messages": [*messages, answer], "temperature": written.job.temperature}
        return row | ({} if written.ended else {"ended": False})

    _write(writer, jobs(), out, keep, "writing answers", len(prompts) * len(plan.temperatures) - len(done))


def _write(
    writer: Writer,
    jobs: Iterable[Job],
    path: Path,
    keep: Callable[[Written], dict[str, Any] | None],
    title: str,
    total: int,
) -> None:
    """Run the jobs and append what is kept, a line each."""
    columns = [
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("left {task.fields[note]}"),
    ]
    started = spoken = time.perf_counter()
    tokens = 0
    with (
        path.open("a", encoding="utf-8") as file,
        Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar,
    ):
        task = bar.add_task(title, total=total, note="")
        for done, written in enumerate(writer.write(jobs), 1):
            row = keep(written)
            if row is not None:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            tokens += len(written.tokens)
            note = f"{tokens:,} tokens, {tokens / (time.perf_counter() - started):,.0f} per second"
            bar.update(task, advance=1, note=note)
            if (bar.disable and time.perf_counter() > spoken + REPORT_SECONDS) or done == total:
                spoken = time.perf_counter()
                bar.console.print(f"{title} {done}/{total}: {note}")


def _prompts_of(out: Path) -> Path:
    """Where the model's own prompts are kept."""
    return out.with_suffix(".prompts.jsonl")


def _read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; what a kill left of the last one is removed."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]


def _unique(prompts: Iterable[Chat], counts: Counter[str]) -> Iterator[Chat]:
    seen: set[str] = set()
    for messages in prompts:
        digest = _digest(messages)
        counts["prompts" if digest not in seen else "duplicate prompts"] += 1
        if digest not in seen:
            yield messages
        seen.add(digest)


def _digest(messages: Chat) -> str:
    """The same for prompts that differ in case and spacing alone."""
    plain = [f"{each['role']}: {' '.join(each['content'].lower().split())}" for each in messages]
    return hashlib.sha256("\n".join(plain).encode()).hexdigest()[:16]


def _why_not(written: Written, filters: Filters) -> str | None:
    if len(written.tokens) < filters.min_tokens:
        return "too short"
    if not written.ended and not filters.keep_cut:
        return "cut at the limit"
    if repetition(written.tokens) > filters.max_repetition:
        return "too repetitive"
    return None


def repetition(tokens: Sequence[int]) -> float:
    """Share of four-token sequences that occurred before."""
    grams = list(zip(*(tokens[offset:] for offset in range(4)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _header(checkpoint: Checkpoint) -> list[int]:
    """The chat up to where a user begins to speak."""
    mark = "7f3c1d"
    text = checkpoint.tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    head, found, _ = text.partition(mark)
    if not found or not head:
        raise MarsError(f"the chat template of {checkpoint.name} does not show where a user's turn begins")
    return list(checkpoint.tokenizer(head, add_special_tokens=False)["input_ids"])


def _text(checkpoint: Checkpoint, tokens: Sequence[int]) -> str:
    return checkpoint.tokenizer.decode(tokens, skip_special_tokens=True)
