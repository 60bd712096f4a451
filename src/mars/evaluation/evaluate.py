"""``mars eval``: a model's answers to the benchmarks with every dial, and their scores. A killed run goes on.

The folder it writes::

    eval.json                    which model, and how it was asked; another one is not mixed in
    answers/gsm8k.exact.jsonl    a line per answer, as it came
    runs.jsonl                   when and where answers were written, and how fast
    samples/gsm8k.exact.jsonl    answers with their scores
    results.json, results.md     the scores
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

from rich.progress import Progress

from mars.api import Model
from mars.decoding.request import Generation, Request
from mars.errors import MarsError
from mars.evaluation import sandbox, vllm, writing
from mars.evaluation.bench import write_whole
from mars.evaluation.plan import Engine, check_engine, items_of, source_of, split_dial
from mars.evaluation.provenance import collect, fingerprint
from mars.evaluation.speed import forget_prompts
from mars.evaluation.statistics import paired, wilson
from mars.evaluation.tasks import BENCHMARKS, Chat, Exam, Item, open_exam
from mars.evaluation.writing import cut, encode
from mars.method.windows import Shape
from mars.models import Checkpoint

EXAMPLES = 3
"""Answers of each kind whose pieces are kept, to be shown in colour"""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What ``mars eval`` was asked for."""

    model: str
    adapter: str | None
    name: str
    """What the report calls the model"""
    tasks: Sequence[str]
    dials: Sequence[str]
    """The others are compared with the first; a window may stand behind a space"""
    limits: Mapping[str, int | None]
    max_new_tokens: int
    block_size: int | None
    dtype: str | None
    seed: int
    engine: Engine
    rows: int
    data: Path | None
    out: Path

    def conditions(self) -> dict[str, object]:
        """What must be the same for answers in one folder."""
        names = ("model", "adapter", "name", "max_new_tokens", "block_size", "dtype", "seed")
        engine = {} if self.engine == "mars" else {"engine": self.engine}
        return {name: getattr(self, name) for name in names} | engine

    def exam(self, task: str, chat: Chat | None) -> Exam:
        return open_exam(
            task,
            chat=chat,
            data=self.data,
            limit=self.limits[task],
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
        )


def plan_evaluation(*, tasks: str, dials: str, limit: str | None, name: str | None, **options: Any) -> Evaluation:
    """Read and check the lists, which have commas between their items."""
    wanted = list(BENCHMARKS) if tasks == "all" else items_of("--tasks", tasks)
    if unknown := [task for task in wanted if task not in BENCHMARKS]:
        raise MarsError(f"--tasks has no {unknown[0]!r}: choose from {', '.join(BENCHMARKS)}, or all")
    turns = items_of("--dials", dials)
    for turn in turns:
        split_dial(turn)
    for option in ("max_new_tokens", "block_size", "rows"):
        if options[option] is not None and options[option] < 1:
            raise MarsError(f"--{option.replace('_', '-')} must be at least 1, not {options[option]}")
    data, out = options["data"], options["out"]
    if data is not None and not data.is_dir():
        raise MarsError(f"--data-dir {data} is no folder")
    if file := next((each for each in (out, *out.parents) if each.is_file()), None):
        raise MarsError(f"--out must name a folder, and {file} is a file")
    if "humaneval" in wanted:
        sandbox.check()  # rather than after an hour of answers
    check_engine(options["engine"], turns)
    label = name or Path(options["adapter"] or options["model"]).name
    return Evaluation(tasks=wanted, dials=turns, limits=_limits(limit, wanted), name=label, **options)


def _limits(text: str | None, tasks: Sequence[str]) -> dict[str, int | None]:
    """``200`` for all tasks, or ``gsm8k=200,bbh=500``."""
    limits: dict[str, int | None] = dict.fromkeys(tasks)
    for item in [] if text is None else items_of("--limit", text):
        task, sign, number = item.rpartition("=")
        if not number.isdecimal() or int(number) < 1 or (sign and task not in tasks):
            raise MarsError(f"--limit must be a number of items, or such as gsm8k=200,bbh=500, not {item!r}")
        limits |= {task: int(number)} if sign else dict.fromkeys(tasks, int(number))
    return limits


def evaluate(model: Model, plan: Evaluation, bar: Progress) -> dict[str, Any]:
    """Write the answers that are not there yet, then score all; returns what ``results.json`` holds."""
    for dial in plan.dials:
        model.dial(split_dial(dial)[0])  # raises before anything is written
    folder = _Folder(plan)
    folder.belongs_to(model.checkpoint)
    chat = chat_of(model.checkpoint)
    exams = [plan.exam(task, chat) for task in plan.tasks]
    todo = {(exam.name, dial): folder.missing(exam, dial) for exam in exams for dial in plan.dials}
    if any(todo.values()):
        with _open_engine(model, plan, bar) as write:
            answering = bar.add_task("", total=sum(len(exam.items) for exam in exams) * len(plan.dials))
            for exam in exams:
                for dial in plan.dials:
                    missing = todo[exam.name, dial]
                    what = f"{exam.benchmark.title}, {dial}"
                    bar.update(answering, description=what, advance=len(exam.items) - len(missing))
                    for _ in folder.answer(model, write, exam, dial, missing):
                        bar.advance(answering)
    return score(plan, bar, exams)


Write = Callable[[Sequence[Request]], Generator[tuple[int, Generation], None, None]]


@contextmanager
def _open_engine(model: Model, plan: Evaluation, bar: Progress) -> Iterator[Write]:
    """What answers requests. It profits from no prompt that it saw before."""
    if plan.engine == "mars":
        model.warm_up(bar, dials=[split_dial(each)[0] for each in plan.dials])

        def write(requests: Sequence[Request]) -> Generator[tuple[int, Generation], None, None]:
            forget_prompts(model.engine(requests[0].block_size))
            return writing.write(model, requests)

        yield write
        return
    checkpoint = model.checkpoint
    source = source_of(plan.model, plan.adapter, checkpoint)
    options = {"speculative_config": vllm.PLUGIN} if checkpoint.settings else {}
    with vllm.load_vllm(checkpoint, source, plan.rows, checkpoint.context, **options) as llm:
        yield partial(vllm.write, llm, checkpoint)


def score(plan: Evaluation, bar: Progress, exams: Sequence[Exam] | None = None) -> dict[str, Any]:
    """Score the answers in the folder and write the results. Needs no model."""
    folder = _Folder(plan)
    known = folder.known()
    exams = [plan.exam(task, None) for task in plan.tasks] if exams is None else exams
    scoring = bar.add_task("scoring", total=len(exams) * len(plan.dials))
    rows, examples = [], []
    for exam in exams:
        first: list[dict[str, Any]] = []
        for dial in plan.dials:
            samples = folder.scored(exam, dial)
            first = first or samples
            rows.append(_row(exam, dial, samples, first, plan.dials[0], folder.runs(exam.name, dial)))
            examples += folder.examples(exam, dial)
            bar.advance(scoring)
    results = {
        "plan": known["plan"] | {"tasks": plan.tasks, "dials": plan.dials, "limits": plan.limits},
        "model": known["model"],
        "rows": rows,
        "averages": _averages(rows, plan),
        "examples": examples,
        "runs": [run for task in plan.tasks for dial in plan.dials for run in folder.runs(task, dial)],
    }
    write_whole(plan.out / "results.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    write_whole(plan.out / "results.md", markdown(results))
    return results


def chat_of(checkpoint: Checkpoint) -> Chat | None:
    """The model's chat template as lm-eval calls it; None if it has none."""
    tokenizer = checkpoint.tokenizer
    if not tokenizer.chat_template:
        return None

    def chat(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    return chat


class _Folder:
    """Answers on disk."""

    def __init__(self, plan: Evaluation) -> None:
        self._plan = plan
        self._out = plan.out

    def known(self) -> dict[str, Any]:
        path = self._out / "eval.json"
        if not path.is_file():
            raise MarsError(f"{self._out} holds no answers yet")
        return json.loads(path.read_text())

    def belongs_to(self, checkpoint: Checkpoint) -> None:
        """Note whose answers the folder holds; raises if they are somebody else's."""
        settings, module = checkpoint.settings, checkpoint.module
        facts = {
            "plan": self._plan.conditions() | {"dtype": str(module.dtype).removeprefix("torch.")},
            "model": {
                "name": checkpoint.name,
                "hash": fingerprint(checkpoint),
                "parameters": sum(weight.numel() for weight in module.parameters()),
                "block_size": settings.block_size if settings else None,
            },
        }
        path = self._out / "eval.json"
        if path.is_file():
            known = self.known()
            for part, mine in facts.items():
                for name, value in mine.items():
                    if name not in ("name", "model", "adapter") and known[part].get(name) != value:
                        raise MarsError(
                            f"{self._out} has answers with {name}={known[part].get(name)}, not {value}: "
                            "choose another --out, or ask in the same way"
                        )
        else:
            (self._out / "answers").mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(facts, indent=2) + "\n")

    def missing(self, exam: Exam, dial: str) -> list[Item]:
        there = self._answers(exam.name, dial)
        return [item for item in exam.items if there.get(item.id, {}).get("asked") != _hash(item)]

    def answer(self, model: Model, write: Write, exam: Exam, dial: str, items: Sequence[Item]) -> Iterator[None]:
        """Write and keep the answers to some items."""
        if not items:
            return
        requests = [self._request(model, item, dial) for item in items]
        path = self._path("answers", exam.name, dial)
        _drop_half_line(path)
        started, written, tokens = time.perf_counter(), 0, 0
        try:
            with path.open("a", encoding="utf-8") as file, closing(write(requests)) as answers:
                for index, answer in answers:
                    kept = _kept(items[index], answer, model, with_pieces=items[index] in exam.items[:EXAMPLES])
                    file.write(json.dumps(kept, ensure_ascii=False) + "\n")
                    file.flush()
                    written, tokens = written + 1, tokens + answer.tokens
                    yield
        finally:
            run = {"task": exam.name, "dial": dial, "answers": written, "tokens": tokens}
            run |= {"seconds": time.perf_counter() - started, "rows": self._plan.rows, **collect()}
            path = self._out / "runs.jsonl"
            _drop_half_line(path)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")

    def scored(self, exam: Exam, dial: str) -> list[dict[str, Any]]:
        """An exam's answers, scored and written."""
        there = self._answers(exam.name, dial)
        if missing := [item.id for item in exam.items if item.id not in there]:
            raise MarsError(
                f"{self._out} has no answer to {len(missing)} items of {exam.name} with {dial}, {missing[0]} first: "
                "run without --score-only"
            )
        answers = [there[item.id] for item in exam.items]
        for item, answer in zip(exam.items, answers, strict=True):
            if answer.get("row", item.row) != item.row:
                raise MarsError(
                    f"{item.id} was another question when {self._out} was written: score it with the same data"
                )
        figures = exam.score([answer["text"] for answer in answers])
        samples = [
            {"item": item.id, "score": each[exam.benchmark.score], "metrics": each, **answer}
            for item, answer, each in zip(exam.items, answers, figures, strict=True)
        ]
        lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        path = self._path("samples", exam.name, dial)
        path.parent.mkdir(exist_ok=True)  # answers may come from another machine
        write_whole(path, lines)
        return samples

    def examples(self, exam: Exam, dial: str) -> list[dict[str, Any]]:
        prompts = {item.id: None if exam.benchmark.is_private else item.prompt for item in exam.items}
        return [
            {"task": exam.name, "item": id, "dial": dial, "prompt": prompts[id], "pieces": answer["pieces"]}
            for id, answer in self._answers(exam.name, dial).items()
            if "pieces" in answer and id in prompts
        ]

    def runs(self, task: str, dial: str) -> list[dict[str, Any]]:
        return [run for run in _lines(self._out / "runs.jsonl") if (run["task"], run["dial"]) == (task, dial)]

    def _request(self, model: Model, item: Item, dial: str) -> Request:
        plan = self._plan
        turned, window = split_dial(dial)
        trained = model.settings.block_size if model.settings else 1
        return Request(
            prompt=encode(model.checkpoint, item.prompt, plan.max_new_tokens),
            dial=model.dial(turned),
            max_new_tokens=plan.max_new_tokens,
            stop=item.stop,
            block_size=plan.block_size or trained,
            shape=None if window is None else Shape.parse(window),
        )

    def _answers(self, task: str, dial: str) -> dict[str, dict[str, Any]]:
        """By item; of several, the last."""
        return {answer.pop("item"): answer for answer in _lines(self._path("answers", task, dial))}

    def _path(self, kind: str, task: str, dial: str) -> Path:
        return self._out / kind / f"{task}.{dial.replace(' ', '-')}.jsonl"


def _kept(item: Item, answer: Generation, model: Model, with_pieces: bool) -> dict[str, Any]:
    text = model.checkpoint.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    kept = {
        "item": item.id,
        "asked": _hash(item),
        "row": item.row,
        "text": cut(text, item.stop),
        "tokens": answer.tokens,
        "forwards": answer.forwards,
        "checked": answer.checked,
        "agreed": answer.agreed,
        "finish_reason": answer.finish_reason,
    }
    return kept | ({"pieces": answer.pieces} if with_pieces else {})


def _hash(item: Item) -> str:
    """Of the question as it is asked: an answer to another one does not count."""
    return hashlib.sha256(json.dumps([item.prompt, item.stop]).encode()).hexdigest()[:16]


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: the last one may have been cut off."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def _drop_half_line(path: Path) -> None:
    if path.is_file():
        whole = path.read_bytes().rpartition(b"\n")
        if whole[2]:
            write_whole(path, (whole[0] + whole[1]).decode())


def _row(
    exam: Exam,
    dial: str,
    samples: Sequence[Mapping[str, Any]],
    first: Sequence[Mapping[str, Any]],
    first_dial: str,
    runs: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    scores = [sample["score"] for sample in samples]
    low, high = wilson(sum(scores), len(scores))
    sums = {name: sum(sample[name] for sample in samples) for name in ("tokens", "forwards", "checked", "agreed")}
    seconds = sum(run["seconds"] for run in runs)
    figures = list(samples[0]["metrics"])
    return {
        "task": exam.name,
        "dial": dial,
        "items": len(samples),
        "score": sum(scores) / len(scores),
        "low": low,
        "high": high,
        "metric": exam.benchmark.score,
        "metrics": {name: sum(sample["metrics"][name] for sample in samples) / len(samples) for name in figures},
        "tokens": sums["tokens"],
        "forwards": sums["forwards"],
        "tokens_per_forward": sums["tokens"] / max(1, sums["forwards"]),
        "agreement": sums["agreed"] / sums["checked"] if sums["checked"] else None,
        "seconds": seconds,
        "tokens_per_second": sum(run["tokens"] for run in runs) / seconds if seconds else None,
        "rows": runs[-1]["rows"] if runs else None,
        "cut": sum(sample["finish_reason"] == "length" for sample in samples) / len(samples),
        "same_text": sum(a["text"] == b["text"] for a, b in zip(samples, first, strict=True)) / len(samples),
        "against": None
        if dial == first_dial
        else {"dial": first_dial, **paired(scores, [sample["score"] for sample in first])},
    }


def _averages(rows: Sequence[Mapping[str, Any]], plan: Evaluation) -> list[dict[str, Any]]:
    """The mean over tasks of every dial; its interval from theirs."""
    averages = []
    for dial in plan.dials if len(plan.tasks) > 1 else ():
        mine = [row for row in rows if row["dial"] == dial]
        mean = sum(row["score"] for row in mine) / len(mine)
        half = sqrt(sum(((row["high"] - row["low"]) / 2) ** 2 for row in mine)) / len(mine)
        speed = sum(row["tokens_per_forward"] for row in mine) / len(mine)
        averages.append(
            {
                "dial": dial,
                "score": mean,
                "low": max(0.0, mean - half),
                "high": min(1.0, mean + half),
                "tokens_per_forward": speed,
            }
        )
    return averages


HEAD = (
    "task",
    "dial",
    "items",
    "score",
    "95 % interval",
    "tok/fwd",
    "tok/s",
    "agree",
    "same text",
    "better/worse",
    "p",
)


def table(results: Mapping[str, Any]) -> list[list[str]]:
    """Results as text, a line for every task and dial; under `HEAD`."""
    lines = []
    for row in results["rows"]:
        against = row["against"]
        lines.append(
            [
                BENCHMARKS[row["task"]].title,
                row["dial"],
                str(row["items"]),
                f"{row['score']:.1%}",
                f"{row['low']:.1%} – {row['high']:.1%}",
                f"{row['tokens_per_forward']:.2f}",
                "–" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}",
                "–" if row["agreement"] is None else f"{row['agreement']:.3f}",
                f"{row['same_text']:.0%}",
                f"{against['better']}/{against['worse']}" if against else "",
                f"{against['p']:.2g}" if against else "",
            ]
        )
    for each in results["averages"]:
        interval = f"{each['low']:.1%} – {each['high']:.1%}"
        start = ["average", each["dial"], "", f"{each['score']:.1%}", interval, f"{each['tokens_per_forward']:.2f}"]
        lines.append(start + [""] * (len(HEAD) - len(start)))
    return lines


def markdown(results: Mapping[str, Any]) -> str:
    lines = [HEAD, ["---", "---", *["---:"] * (len(HEAD) - 2)], *table(results)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
