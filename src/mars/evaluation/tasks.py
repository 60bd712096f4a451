"""Questions and scorers of the benchmarks: lm-eval's tasks, over data from the hub or from local files."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import random
import re
import sys
import zipfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mars.errors import MarsError, how_to_install
from mars.evaluation.benchmarks import BENCHMARKS, Benchmark
from mars.evaluation.sandbox import run_all
from mars.models.builtin import cache_home

try:
    import langdetect  # noqa: F401
    import lm_eval
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise MarsError(f"evaluation needs more packages ({error.name}): {how_to_install('eval')}") from None

SEED = 1234
GPQA_PASSWORD = b"deserted-untie-orchid"  # published with the data; it keeps them out of training sets
Chat = Callable[..., str]  # from messages, and whether an answer begins after them, to text


@dataclass(frozen=True, slots=True)
class Item:
    """A question."""

    id: str  # lm-eval's task, and the row's number there
    prompt: str
    stop: tuple[str, ...]
    row: str = ""  # digest of the data row, which does not depend on the model's chat template


@dataclass(slots=True)
class Exam:
    """A benchmark's questions, or some of them, in a fixed order, and the scorer of their answers."""

    name: str
    items: list[Item] = field(default_factory=list)
    _parts: list[tuple[Any, list[Any]]] = field(default_factory=list)  # lm-eval's tasks, each with its instances

    @property
    def benchmark(self) -> Benchmark:
        return BENCHMARKS[self.name]

    def score(self, texts: Sequence[str]) -> list[dict[str, float]]:
        """All metrics that lm-eval has for the answer to each item."""
        if len(texts) != len(self.items):
            raise ValueError(f"{len(texts)} answers to {len(self.items)} questions")
        if self.name == "humaneval":  # the answer up to the end of its code block, then the tests, in a sandbox
            docs = [instance.doc for _, instances in self._parts for instance in instances]
            programs = [
                f"{doc['prompt']}{text.partition('```')[0]}\n{doc['test']}\ncheck({doc['entry_point']})"
                for doc, text in zip(docs, texts, strict=True)
            ]
            return [{self.benchmark.score: float(outcome.passed)} for outcome in run_all(programs)]
        left = iter(texts)
        return [metrics for task, rows in self._parts for metrics in _judge(task, rows, [next(left) for _ in rows])]

    def redact(self, number: int, text: str) -> dict[str, Any]:
        """What may be kept of an answer that may quote its question: its digest, the letter it chooses, its metrics."""
        task, instance = [(task, instance) for task, instances in self._parts for instance in instances][number]
        (metrics,) = _judge(task, [instance], [text])
        read = str(instance.filtered_resps[self.benchmark.score.rpartition(",")[2]])
        letter = re.fullmatch(r"\(?([A-Z])\)?", read)
        return {"digest": digest(text), "letter": letter[1] if letter else None, "metrics": metrics}


def open_exam(
    name: str,
    *,
    chat: Chat | None,
    data: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    max_new_tokens: int = 256,
) -> Exam:
    """Questions of a benchmark: all, or ``limit`` of them drawn by ``seed``; a larger limit keeps a smaller one's.

    ``chat`` turns messages into the model's prompt; None for models that do not chat. ``data`` is a folder of local
    files; without one, rows come from the hub.
    """
    if name == "ifeval":
        _prepare_ifeval()
    tasks = _load(name, None if data is None else _read(data, BENCHMARKS[name]), max_new_tokens)
    exam = Exam(name)
    for task, numbers in zip(tasks, _drawn([len(task.eval_docs) for task in tasks], limit, seed), strict=True):
        if not numbers:
            continue
        with redirect_stderr(io.StringIO()):  # it shows a progress bar for every task
            task.build_all_requests(
                samples=numbers,
                apply_chat_template=chat is not None,
                fewshot_as_multiturn=chat is not None,
                chat_template=chat,
            )
        asked = dict(zip(numbers, task.instances, strict=True))
        for number, instance in asked.items():
            until = instance.args[1].get("until") or []
            stops = [until] if isinstance(until, str) else until
            row = digest(json.dumps(instance.doc, sort_keys=True, default=str))
            id = f"{task.config.task}/{number}"
            exam.items.append(Item(id, instance.args[0], tuple(stop for stop in stops if stop), row))
        exam._parts.append((task, list(asked.values())))
    return exam


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _drawn(sizes: Sequence[int], limit: int | None, seed: int) -> list[list[int]]:
    """For parts of these sizes, the numbers of the rows that are drawn from all parts together."""
    every = [(part, number) for part, size in enumerate(sizes) for number in range(size)]
    random.Random(seed).shuffle(every)
    numbers: list[list[int]] = [[] for _ in sizes]
    for part, number in sorted(every[:limit]):
        numbers[part].append(number)
    return numbers


def _load(name: str, rows: Rows | None, max_new_tokens: int) -> list[Any]:
    """lm-eval's tasks of a benchmark, over these rows; None: over those of the hub."""
    benchmark = BENCHMARKS[name]
    manager = _manager(benchmark.form_of or name)
    members = list(manager.task_index[benchmark.task].cfg["task"]) if benchmark.parts else [benchmark.task]
    tasks, taken = [], 0
    for member in members:
        shipped = manager.task_index[member].cfg
        greedy = {"do_sample": False, "temperature": 0.0, "max_gen_toks": max_new_tokens}
        config: dict[str, Any] = {
            "task": member,
            "generation_kwargs": {**shipped.get("generation_kwargs", {}), **greedy},
        }
        if benchmark.shots is not None:
            config["num_fewshot"] = benchmark.shots
        if rows is not None:
            mine = rows.of(benchmark.parts, member.removeprefix(f"{benchmark.task}_")) if benchmark.parts else rows
            taken += len(mine)
            if not mine:
                continue
            config |= dict.fromkeys(("training_split", "validation_split", "fewshot_split"))
            config |= {"test_split": "test", "custom_dataset": lambda mine=mine, **_: {"test": mine}}
        spec: Any = {"group": f"mars_{member}", "task": [config]}
        if name == "humaneval":  # its own scorer would run programs without a sandbox
            spec = [deepcopy(shipped) | config | {"metric_list": [{"metric": "acc"}], "filter_list": None}]
        try:
            loaded = manager.load(spec)
        except OSError as error:  # no network, or a gate
            reason = str(error).splitlines()[0]
            raise MarsError(
                f"{benchmark.title} cannot be had from the hub ({reason}): give --data-dir, or leave the task out"
            ) from None
        tasks.append(_prepared(loaded["tasks"][member]))
    if rows is not None and taken < len(rows):
        part = members[0].removeprefix(f"{benchmark.task}_")
        raise MarsError(
            f"{len(rows) - taken} rows of {benchmark.file} belong to no part of {benchmark.title}: "
            f"{benchmark.parts} must be such as {part}"
        )
    return tasks


@cache
def _manager(name: str) -> TaskManager:
    """lm-eval's index of this benchmark only: the full index takes many seconds."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return TaskManager(include_defaults=False, include_path=[str(Path(lm_eval.__file__).parent / "tasks" / name)])


def _prepared(task: Any) -> Any:
    """Let a task process its rows once: GPQA would shuffle its options again at every access."""
    prepare = task.config.process_docs
    if prepare is not None:
        for split in {task.config.training_split, task.config.validation_split, task.config.test_split} - {None}:
            random.seed(SEED)
            task.dataset[split] = prepare(task.dataset[split])
        task.set_config("process_docs", None)
        task.fewshot_cfg.process_docs = None
    task.set_fewshot_seed(SEED)
    return task


def _judge(task: Any, instances: Sequence[Any], texts: Sequence[str]) -> list[dict[str, float]]:
    for instance, text in zip(instances, texts, strict=True):
        instance.resps, instance.filtered_resps = [text], {}
    task._instances = list(instances)
    task.apply_filters()
    scores = []
    for instance in instances:
        random.seed(SEED)  # IFEval draws a letter where a row names none
        metrics: dict[str, float] = {}
        for reading, answer in instance.filtered_resps.items():
            for metric, value in task.process_results(instance.doc, [answer]).items():
                metrics[f"{metric},{reading}"] = sum(value) / len(value) if isinstance(value, list) else float(value)
        scores.append(metrics)
    return scores


class Rows(list[dict[str, Any]]):
    """The part of a dataset's interface that lm-eval uses."""

    @property
    def features(self) -> dict[str, None]:
        return dict.fromkeys(self[0]) if self else {}

    def of(self, column: str, part: str) -> Rows:
        """The rows of one part, whose name may have spaces for underscores."""
        return self.filter(lambda row: row[column].replace(" ", "_") == part)

    def filter(self, keep: Callable[[dict[str, Any]], bool]) -> Rows:
        return Rows(row for row in self if keep(row))

    def map(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Rows:
        return Rows(row | change(row) for row in self)


def _read(folder: Path, benchmark: Benchmark) -> Rows:
    """The rows of a benchmark: a file of JSON lines, plain, gzipped, or in a zip archive."""
    name = benchmark.file
    for suffix in (".jsonl", ".jsonl.gz", ".zip"):
        path = folder / f"{name}{suffix}"
        if path.is_file():
            break
    else:
        raise MarsError(f"{folder} has no {name}.jsonl, {name}.jsonl.gz or {name}.zip")
    try:
        if suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                text = archive.read(archive.namelist()[0], pwd=GPQA_PASSWORD)
        else:
            text = gzip.decompress(path.read_bytes()) if suffix == ".jsonl.gz" else path.read_bytes()
        rows = Rows(json.loads(line) for line in text.decode().split("\n") if line.strip())
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile) as problem:
        raise MarsError(f"{path} cannot be read: {problem}") from None
    if not rows:
        raise MarsError(f"{path} has no rows")
    for number, row in enumerate(rows, 1):
        if absent := [column for column in benchmark.columns if column not in row]:
            raise MarsError(f"{path}: row {number} has no {absent[0]!r}, which {benchmark.title} needs")
    return rows


def _prepare_ifeval() -> None:
    """Seed IFEval's language detector, and provide nltk's sentence splitter.

    If nltk's data cannot be downloaded, empty files take its place: sentences are split without abbreviation lists.
    """
    import nltk
    from langdetect import DetectorFactory

    DetectorFactory.seed = 0
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        if nltk.download("punkt_tab", quiet=True, print_error_to=io.StringIO()):
            return
        print("IFEval: nltk's punkt_tab cannot be downloaded; sentences are split without it", file=sys.stderr)
        folder = cache_home() / "nltk_data"
        english = folder / "tokenizers" / "punkt_tab" / "english"
        english.mkdir(parents=True, exist_ok=True)
        for file in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
            (english / file).touch()
        nltk.data.path.insert(0, str(folder))
