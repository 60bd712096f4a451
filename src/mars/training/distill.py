"""Training data that a model generates itself, which changes its one-token mode least: answers, and prompts too."""

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

from mars.core.request import Request
from mars.errors import MarsError
from mars.models import Checkpoint
from mars.training.chats import render
from mars.training.files import open_lines, read_lines
from mars.training.generator import Key, TextGenerator
from mars.training.rows import Chat, read_rows, to_prompt, warn

REPORT_SECONDS = 20  # between two lines of progress where there is no terminal to draw a bar on


@dataclass(frozen=True, slots=True)
class Filters:
    """What is left out of the training data."""

    min_tokens: int = 4
    max_prompt_tokens: int = 512
    max_repetition: float = 0.6  # largest share of four-token sequences that occurred before in the same text
    keep_cut: bool = True
    """Keep answers that hit the length limit; they are marked, so that training does not learn to stop there"""


@dataclass(frozen=True, slots=True)
class Distillation:
    """What to generate."""

    temperatures: Sequence[float] = (0.0, 0.8)  # each prompt gets one answer at each of these
    max_new_tokens: int = 256
    own_prompts: int = 0  # how many prompts the model generates itself
    max_num_seqs: int = 64  # texts decoded together
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
    length = min(plan.filters.max_prompt_tokens + plan.max_new_tokens, checkpoint.context or sys.maxsize)
    own_prompts = out.with_suffix(".prompts.jsonl")
    done = len(read_lines(out)) + len(read_lines(own_prompts))  # a continued run must not repeat its random draws
    run = _Run(checkpoint, plan, TextGenerator(checkpoint, plan.max_num_seqs, length, plan.seed + done))
    prompts = list(run.unique([*run.given(sources), *run.own(own_prompts)]))
    random.Random(plan.seed).shuffle(prompts)  # a run that is stopped early leaves some of every kind
    run.answer(prompts, out)
    return run.counts


@dataclass(frozen=True)
class _Run:
    checkpoint: Checkpoint
    plan: Distillation
    generator: TextGenerator
    counts: Counter[str] = field(default_factory=Counter)  # how many prompts and answers were kept and left out

    def given(self, sources: Sequence[str]) -> Iterator[Chat]:
        def on_bad_row(message: str) -> None:
            self.counts["unreadable prompts"] += 1
            warn(f"skipped {message}")

        for source in sources:
            for row in read_rows(source, on_bad_row=on_bad_row, convert=to_prompt):
                yield row.messages

    def own(self, path: Path) -> list[Chat]:
        """Prompts that the model generates after the header of a user's turn; they are kept in a file of their own."""
        missing = self.plan.own_prompts - len(read_lines(path))
        if missing > 0:
            header, limit = self._header(), self.plan.filters.max_prompt_tokens // 2
            jobs = ((None, self.generator.request(header, 1.0, limit)) for _ in range(missing))

            def keep(_key: None, tokens: list[int], ended: bool) -> dict[str, Any] | None:
                text = self._text(tokens).strip()
                if not text or not ended or self._why_not(tokens, ended):
                    self.counts["own prompts filtered"] += 1
                    return None
                return {"messages": [{"role": "user", "content": text}]}

            self._generate(jobs, path, keep, "writing prompts", missing)
        return [row["messages"] for row in read_lines(path)][: self.plan.own_prompts]

    def unique(self, prompts: Iterable[Chat]) -> Iterator[Chat]:
        seen: set[str] = set()
        for messages in prompts:
            digest = _digest(messages)
            self.counts["prompts" if digest not in seen else "duplicate prompts"] += 1
            if digest not in seen:
                yield messages
            seen.add(digest)

    def answer(self, prompts: Sequence[Chat], out: Path) -> None:
        """Answer the prompts at every temperature, except for answers that are in the file already."""
        plan, counts = self.plan, self.counts
        done = {row["id"] for row in read_lines(out)}
        counts["answers found"] = len(done)

        def jobs() -> Iterator[tuple[dict[str, Any], Request]]:
            for messages in prompts:
                try:
                    tokens = self.checkpoint.encode(messages)
                except MarsError as error:
                    counts["prompts refused"] += 1
                    warn(f"skipped a prompt: {error}")
                    continue
                if len(tokens) >= min(self.generator.length, plan.filters.max_prompt_tokens + 1):
                    counts["prompts too long"] += 1
                    continue
                for number, temperature in enumerate(plan.temperatures):
                    key = f"{_digest(messages)}-{number}"
                    if key not in done:
                        row = {"id": key, "messages": messages, "temperature": temperature}
                        yield row, self.generator.request(tokens, temperature, plan.max_new_tokens)

        def keep(row: dict[str, Any], tokens: list[int], ended: bool) -> dict[str, Any] | None:
            reason = self._why_not(tokens, ended)
            counts[reason or "answers"] += 1
            if reason:
                return None
            counts["answer tokens"] += len(tokens)
            answer = {"role": "assistant", "content": self._text(tokens)}
            return row | {"messages": [*row["messages"], answer]} | ({} if ended else {"ended": False})

        self._generate(jobs(), out, keep, "writing answers", len(prompts) * len(plan.temperatures) - len(done))

    def _generate(
        self,
        jobs: Iterable[tuple[Key, Request]],
        path: Path,
        keep: Callable[[Key, list[int], bool], dict[str, Any] | None],
        title: str,
        total: int,
    ) -> None:
        """Run the jobs and append what is kept to a file, a line each."""
        note = TextColumn("left {task.fields[note]}")
        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), note)
        started = reported = time.perf_counter()
        total_tokens = 0
        with (
            open_lines(path) as file,
            Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar,
        ):
            task = bar.add_task(title, total=total, note="")
            for done, (key, tokens, ended) in enumerate(self.generator.generate(jobs), 1):
                if (row := keep(key, tokens, ended)) is not None:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                total_tokens += len(tokens)
                speed = f"{total_tokens:,} tokens, {total_tokens / (time.perf_counter() - started):,.0f} per second"
                bar.update(task, advance=1, note=speed)
                if bar.disable and (done == total or time.perf_counter() > reported + REPORT_SECONDS):
                    reported = time.perf_counter()
                    bar.console.print(f"{title} {done}/{total}: {speed}")

    def _why_not(self, tokens: list[int], ended: bool) -> str | None:
        """Why a text is left out; None: it is kept."""
        filters = self.plan.filters
        if len(tokens) < filters.min_tokens:
            return "too short"
        if not ended and not filters.keep_cut:
            return "cut at the limit"
        return "too repetitive" if repetition(tokens) > filters.max_repetition else None

    def _header(self) -> list[int]:
        """The chat template's tokens before the text of a user's turn."""
        mark, tokenizer = "7f3c1d", self.checkpoint.tokenizer
        text = render(tokenizer, [{"role": "user", "content": mark}])
        head, found, _ = text.partition(mark)
        if not found or not head:
            raise MarsError(f"the chat template of {self.checkpoint.name} does not show where a user's turn begins")
        return list(tokenizer(head, add_special_tokens=False)["input_ids"])

    def _text(self, tokens: list[int]) -> str:
        return self.checkpoint.tokenizer.decode(tokens, skip_special_tokens=True)


def _digest(messages: Chat) -> str:
    """The same for prompts that differ in case and spacing alone."""
    plain = [f"{each['role']}: {' '.join(each['content'].lower().split())}" for each in messages]
    return hashlib.sha256("\n".join(plain).encode()).hexdigest()[:16]


def repetition(tokens: Sequence[int]) -> float:
    """Share of four-token sequences that occurred before."""
    grams = list(zip(*(tokens[offset:] for offset in range(4)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
