"""The files of ``mars eval`` and ``mars bench``, read and checked for a report."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from mars.errors import MarsError
from mars.evaluation.statistics import paired
from mars.evaluation.tables import title

PLAIN = "one-token"


class Run(BaseModel):
    command: str
    commit: str
    date: str
    machine: str
    versions: dict[str, str]
    task: str | None = None
    dial: str | None = None


class Score(BaseModel):
    dial: str
    score: float
    low: float
    high: float
    tokens_per_forward: float


class Difference(BaseModel):
    better: int
    worse: int
    difference: float
    low: float
    high: float
    p: float


class TaskScore(Score):
    task: str
    items: int
    tokens_per_second: float | None
    cut: float
    same_text: float
    against: Difference | None


class Example(BaseModel):
    task: str
    item: int | str
    dial: str
    prompt: str | None
    pieces: list[str]


class Plan(BaseModel):
    name: str
    tasks: list[str]
    dials: list[str]
    max_new_tokens: int
    block_size: int | None


class Weights(BaseModel):
    name: str
    hash: str
    block_size: int | None


class Evaluation(BaseModel):
    plan: Plan
    model: Weights
    rows: list[TaskScore]
    averages: list[Score] = []
    examples: list[Example]
    runs: list[Run]


class Speed(BaseModel):
    dial: str | None = None
    peer: str | None = None
    window: str | None
    batch_size: int
    tokens_per_second: float
    tokens_per_forward: float | None
    ratio_to_one_token: float
    requests: int = 0
    same_text: float = 0.0  # of the requests
    category: str | None = None

    @property
    def name(self) -> str:
        return title(self.model_dump())


class BenchOptions(BaseModel):
    model: str
    adapter: str | None
    dials: list[str]
    batch_sizes: list[int]
    peers: list[str]
    prompts: str | None
    max_new_tokens: int
    dtype: str


class Bench(BaseModel):
    options: BenchOptions
    provenance: Run
    rows: list[Speed]

    @property
    def model(self) -> str:
        return " with ".join(filter(None, (self.options.model, self.options.adapter)))


@dataclass(slots=True)
class Origin:
    """Runs of one command on one machine, with the same versions of everything."""

    number: int  # its tag: what a report puts beside the numbers that come from it
    model: str
    run: Run
    days: set[str] = field(default_factory=set)

    @property
    def facts(self) -> dict[str, str]:
        return {
            "command": self.run.command,
            "commit": self.run.commit,
            "model": self.model,
            "machine": self.run.machine,
            "versions": ", ".join(f"{name} {version}" for name, version in self.run.versions.items()),
            "date": " to ".join(sorted({min(self.days), max(self.days)})),
        }


@dataclass(slots=True)
class Checkpoint:
    """A folder of ``mars eval``."""

    folder: Path
    found: Evaluation
    label: str = ""
    origins: dict[tuple[str | None, str | None], set[int]] = field(default_factory=lambda: defaultdict(set))
    """Tags by task and dial"""
    is_complete: bool = False  # has it every task that another checkpoint has?

    @property
    def labels(self) -> tuple[str, str, str]:
        """Its name; with the block size or the folder, for when others have the same name."""
        name, block_size = self.found.plan.name, self.found.plan.block_size or self.found.model.block_size
        return name, f"{name}, B = {block_size}", f"{name}, {self.folder}"

    def row(self, task: str, dial: str) -> TaskScore | None:
        return next((row for row in self.found.rows if (row.task, row.dial) == (task, dial)), None)

    def scores(self, task: str | None = None) -> Sequence[Score]:
        """One for each dial, of a task or on average."""
        if task is not None:
            return [row for row in self.found.rows if row.task == task]
        return (self.found.averages or self.found.rows) if self.is_complete else []

    def speed(self, task: str | None, dial: str, unit: str) -> float | None:
        """``tokens per forward`` or ``tokens per second``, of a task or on average."""
        rows = [row for row in self.found.rows if row.dial == dial and task in (None, row.task)]
        known = [value for row in rows if (value := getattr(row, unit.replace(" ", "_"))) is not None]
        return sum(known) / len(known) if known else None

    def tags(self, task: str | None = None, dial: str | None = None) -> list[int]:
        """Where the numbers come from: of one task or all, of one dial or all."""
        fitting = (tags for key, tags in self.origins.items() if task in (None, key[0]) and dial in (None, key[1]))
        return sorted(set[int]().union(*fitting))

    def compared_with(self, other: Checkpoint, task: str) -> tuple[Difference, int]:
        """The difference on the items that both answered with one-token, and how many these are."""
        mine, theirs = self._item_scores(task), other._item_scores(task)
        both = [item for item in mine if item in theirs]
        outcome = paired([mine[item] for item in both], [theirs[item] for item in both])
        return Difference.model_validate(outcome), len(both)

    def _item_scores(self, task: str) -> dict[int | str, float]:
        file = self.folder / "samples" / f"{task}.{PLAIN}.jsonl"
        try:
            lines = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
            return {line["item"]: float(line["score"]) for line in lines}
        except OSError as error:
            raise MarsError(f"{self.folder} is half: {file} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise MarsError(f"{file} is not what `mars eval` writes: each line needs an item and its score") from None


@dataclass(frozen=True, slots=True)
class Sources:
    checkpoints: Sequence[Checkpoint]
    benches: Sequence[tuple[int, Bench]]  # with their tags
    origins: Sequence[Origin]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for each in self.checkpoints for task in each.found.plan.tasks))

    @property
    def has_averages(self) -> bool:
        return any(each.found.averages for each in self.checkpoints)


def read_all(paths: Sequence[Path]) -> Sources:
    """Read all sources and number their origins."""
    paths = [path.parent if path.name == "results.json" else path for path in paths]
    origins: dict[tuple[object, ...], Origin] = {}
    checkpoints: list[Checkpoint] = []
    benches: list[tuple[int, Bench]] = []

    def cite(path: Path, run: Run, model: str) -> int:
        key = (path, run.command, run.commit, run.machine, *run.versions.items())
        origin = origins.setdefault(key, Origin(len(origins) + 1, model, run))
        origin.days.add(run.date[:10])
        return origin.number

    for number, path in enumerate(paths):
        if not path.exists():
            raise MarsError(f"there is no {path}")
        if any(path.samefile(other) for other in paths[:number]):
            raise MarsError(f"{path} is given twice")
        if path.is_dir():
            checkpoints.append(Checkpoint(path, found := _read_evaluation(path)))
            for run in found.runs:
                tag = cite(path, run, f"{found.model.name}, {found.model.hash}")
                checkpoints[-1].origins[run.task, run.dial].add(tag)
        else:
            bench = _read_bench(path)
            benches.append((cite(path, bench.provenance, bench.model), bench))
    tasks = {task for each in checkpoints for task in each.found.plan.tasks}
    times = Counter(label for each in checkpoints for label in each.labels)
    for each in checkpoints:
        each.is_complete = set(each.found.plan.tasks) == tasks
        each.label = next(label for label in each.labels if times[label] == 1)
    return Sources(checkpoints, benches, list(origins.values()))


Kind = TypeVar("Kind", bound=BaseModel)


def _read(kind: type[Kind], file: Path, command: str) -> Kind:
    try:
        return kind.model_validate_json(file.read_bytes())
    except OSError as error:
        raise MarsError(f"{file} cannot be read: {error.strerror}; give what `{command}` wrote") from None
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            raise MarsError(f"{file} is no whole JSON file: {first['msg']}") from None
        where = ".".join(map(str, first["loc"]))
        raise MarsError(f"{file} is not what `{command}` writes: {where}: {first['msg']}") from None


def _read_evaluation(folder: Path) -> Evaluation:
    found = _read(Evaluation, folder / "results.json", "mars eval")
    there, planned = len(found.rows), len(found.plan.tasks) * len(found.plan.dials)
    if there < max(planned, 1):
        raise MarsError(f"{folder} is half: it has {there} of {planned} scores; run `mars eval` again")
    return found


def _read_bench(file: Path) -> Bench:
    found = _read(Bench, file, "mars bench")
    asked = found.options
    categories = {row.category for row in found.rows} or {None}
    there, planned = len(found.rows), len(asked.batch_sizes) * (len(asked.dials) + len(asked.peers)) * len(categories)
    if there < planned:
        raise MarsError(f"{file} is half: it has {there} of {planned} measurements; run `mars bench` again")
    return found
