"""Training data that a model generates itself, which changes its one-token mode least: answers, and prompts too."""

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
from mars.training.files import open_lines, read_lines
from mars.training.generator import Generated, Job, TextGenerator
from mars.training.rows import Chat, read_rows, to_prompt, warn

REPORT_SECONDS = 20
"""Between two lines of progress where there is no terminal to draw a bar on"""


@dataclass(frozen=True, slots=True)
class Filters:
    """What is left out of the training data."""

    min_tokens: int = 4
    max_prompt_tokens: int = 512
    max_repetition: float = 0.6
    """Largest share of four-token sequences that occurred before in the same text"""
    keep_cut: bool = True
    """Keep answers that hit the length limit; they are marked, so that training does not learn to stop there"""


@dataclass(frozen=True, slots=True)
class Distillation:
    """What to generate."""

    temperatures: Sequence[float] = (0.0, 0.8)
    """Each prompt gets one answer at each of these"""
    max_new_tokens: int = 256
    own_prompts: int = 0
    """How many prompts the model generates itself"""
    max_num_seqs: int = 64
    """Texts decoded together"""
    seed: int = 0
    filters: Filters = field(default_factory=Filters)

    def __post_init__(self) -> None:
        least = {"rows": (self.max_num_seqs, 1), "max_new_tokens": (self.max_new_tokens, 1)}
        least["own_prompts"] = (self.own_prompts, 0)
        wrong = [f"{name} must be {low} or more" for name, (value, low) in least.items() if value < low]
        if wrong or not self.temperatures or min(self.temperatures) < 0:
            raise MarsError((*wrong, "temperatures must be numbers of 0 or more")[0])


def distill(checkpoint: Checkpoint, sources: Sequence[str], out: Path, plan: Distillation) -> Counter[str]:
    """Answer the prompts of all sources and the model's own; returns counts of what was kept and left out.

    ``out`` gets one chat per line; what it has already is continued.
    """
    if not sources and not plan.own_prompts:
        raise MarsError("there is nothing to answer: give --prompts, or --own-prompts for the model's own")
    if out.is_dir():
        raise MarsError(f"{out} is a folder: name a file to write")
    out.parent.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    length = min(plan.filters.max_prompt_tokens + plan.max_new_tokens, checkpoint.context or sys.maxsize)
    own_prompts = out.with_suffix(".prompts.jsonl")
    done = len(read_lines(out)) + len(read_lines(own_prompts))  # a continued run must not repeat its random draws
    generator = TextGenerator(checkpoint, plan.max_num_seqs, length, plan.seed + done)
    given = _given(sources, counts)
    prompts = list(_unique([*given, *_own(checkpoint, generator, own_prompts, plan, counts)], counts))
    random.Random(plan.seed).shuffle(prompts)  # a run that is stopped early leaves some of every kind
    _answer(checkpoint, generator, prompts, out, plan, counts)
    return counts


def _given(sources: Sequence[str], counts: Counter[str]) -> Iterator[Chat]:
    def on_bad_row(message: str) -> None:
        counts["unreadable prompts"] += 1
        warn(f"skipped {message}")

    for source in sources:
        for row in read_rows(source, on_bad_row=on_bad_row, convert=to_prompt):
            yield row.messages


def _own(
    checkpoint: Checkpoint, generator: TextGenerator, path: Path, plan: Distillation, counts: Counter[str]
) -> list[Chat]:
    """Prompts that the model generates after the header of a user's turn; they are kept in a file of their own."""
    missing = plan.own_prompts - len(read_lines(path))
    if missing > 0:
        header = _header(checkpoint)
        jobs = [Job(number, header, 1.0, plan.filters.max_prompt_tokens // 2) for number in range(missing)]

        def keep(found: Generated) -> dict[str, Any] | None:
            text = _text(checkpoint, found.tokens).strip()
            if not text or not found.ended or _why_not(found, plan.filters):
                counts["own prompts filtered"] += 1
                return None
            return {"messages": [{"role": "user", "content": text}]}

        _generate(generator, jobs, path, keep, "writing prompts", missing)
    return [row["messages"] for row in read_lines(path)][: plan.own_prompts]


def _answer(
    checkpoint: Checkpoint,
    generator: TextGenerator,
    prompts: Sequence[Chat],
    out: Path,
    plan: Distillation,
    counts: Counter[str],
) -> None:
    """Answer the prompts at every temperature, except for answers that are in the file already."""
    done = {row["id"] for row in read_lines(out)}
    counts["answers found"] = len(done)

    def jobs() -> Iterator[Job]:
        for messages in prompts:
            try:
                tokens = checkpoint.encode(messages)
            except MarsError as error:
                counts["prompts refused"] += 1
                warn(f"skipped a prompt: {error}")
                continue
            if len(tokens) >= min(generator.length, plan.filters.max_prompt_tokens + 1):
                counts["prompts too long"] += 1
                continue
            for number, temperature in enumerate(plan.temperatures):
                key = f"{_digest(messages)}-{number}"
                if key not in done:
                    yield Job((key, messages), tokens, temperature, plan.max_new_tokens)

    def keep(found: Generated) -> dict[str, Any] | None:
        reason = _why_not(found, plan.filters)
        counts[reason or "answers"] += 1
        if reason:
            return None
        counts["answer tokens"] += len(found.tokens)
        key, messages = found.job.key
        answer = {"role": "assistant", "content": _text(checkpoint, found.tokens)}
        row = {"id": key, "messages": [*messages, answer], "temperature": found.job.temperature}
        return row | ({} if found.ended else {"ended": False})

    _generate(generator, jobs(), out, keep, "writing answers", len(prompts) * len(plan.temperatures) - len(done))


def _generate(
    generator: TextGenerator,
    jobs: Iterable[Job],
    path: Path,
    keep: Callable[[Generated], dict[str, Any] | None],
    title: str,
    total: int,
) -> None:
    """Run the jobs and append what is kept to a file, a line each."""
    note = TextColumn("left {task.fields[note]}")
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), note)
    started = reported = time.perf_counter()
    tokens = 0
    with (
        open_lines(path) as file,
        Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar,
    ):
        task = bar.add_task(title, total=total, note="")
        for done, found in enumerate(generator.generate(jobs), 1):
            row = keep(found)
            if row is not None:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            tokens += len(found.tokens)
            speed = f"{tokens:,} tokens, {tokens / (time.perf_counter() - started):,.0f} per second"
            bar.update(task, advance=1, note=speed)
            if (bar.disable and time.perf_counter() > reported + REPORT_SECONDS) or done == total:
                reported = time.perf_counter()
                bar.console.print(f"{title} {done}/{total}: {speed}")


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


def _why_not(found: Generated, filters: Filters) -> str | None:
    """Why a text is left out; None: it is kept."""
    if len(found.tokens) < filters.min_tokens:
        return "too short"
    if not found.ended and not filters.keep_cut:
        return "cut at the limit"
    return "too repetitive" if repetition(found.tokens) > filters.max_repetition else None


def repetition(tokens: Sequence[int]) -> float:
    """Share of four-token sequences that occurred before."""
    grams = list(zip(*(tokens[offset:] for offset in range(4)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _header(checkpoint: Checkpoint) -> list[int]:
    """The chat template's tokens before the text of a user's turn."""
    mark = "7f3c1d"
    text = checkpoint.tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    head, found, _ = text.partition(mark)
    if not found or not head:
        raise MarsError(f"the chat template of {checkpoint.name} does not show where a user's turn begins")
    return list(checkpoint.tokenizer(head, add_special_tokens=False)["input_ids"])


def _text(checkpoint: Checkpoint, tokens: Sequence[int]) -> str:
    return checkpoint.tokenizer.decode(tokens, skip_special_tokens=True)
