"""``mars eval``: a model's answers to the benchmarks with every dial, and their scores. A killed run is continued.

The folder it writes::

    eval.json                    the model and the options; answers of another model are not mixed in
    answers/gsm8k.exact.jsonl    one line per answer, in the order they came
    runs.jsonl                   when and where answers were generated, and how fast
    samples/gsm8k.exact.jsonl    answers with their scores
    results.json, results.md     the scores

GPQA's authors ask that its questions be not shown. An answer may quote its question, so its text is not kept: only a
digest, the letter that it chooses, and its scores.
"""

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
from mars.core.output import RequestOutput
from mars.core.request import Request
from mars.errors import MarsError
from mars.evaluation import prompts, sandbox, vllm
from mars.evaluation.benchmarks import ALL, BENCHMARKS
from mars.evaluation.plan import Engine, check_counts, check_dials, list_of, source_of, split_dial
from mars.evaluation.provenance import collect, fingerprint
from mars.evaluation.statistics import paired, wilson
from mars.evaluation.tables import Lines, cell, markdown
from mars.evaluation.tasks import Chat, Exam, Item, digest, open_exam
from mars.method.windows import parse_window
from mars.models import Checkpoint
from mars.training.files import open_lines, read_lines, write_whole

EXAMPLES = 3  # items of each task whose answers are kept with the text of every forward, for a report
Generate = Callable[[Sequence[Request]], Generator[tuple[int, RequestOutput], None, None]]


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The options of ``mars eval``."""

    model: str
    adapter: str | None
    name: str  # what a report calls the model
    tasks: Sequence[str]
    dials: Sequence[str]  # the others are compared with the first; a window may follow after a space: ``exact tree``
    limits: Mapping[str, int | None]
    max_new_tokens: int
    block_size: int | None
    dtype: str | None
    seed: int
    engine: Engine
    max_num_seqs: int
    data: Path | None
    out: Path

    def exams(self, chat: Chat | None) -> list[Exam]:
        options: dict[str, Any] = {"data": self.data, "seed": self.seed, "max_new_tokens": self.max_new_tokens}
        return [open_exam(task, chat=chat, limit=self.limits[task], **options) for task in self.tasks]


def plan_evaluation(*, tasks: str, dials: str, limit: str | None, name: str | None, **options: Any) -> EvalPlan:
    """Read and check the options, of which lists have commas between their items."""
    wanted = list(ALL) if tasks == "all" else list_of("--tasks", tasks)
    if unknown := [task for task in wanted if task not in BENCHMARKS]:
        raise MarsError(f"--tasks has no {unknown[0]!r}: choose from {', '.join(BENCHMARKS)}, or all")
    wanted_dials = list_of("--dials", dials)
    check_dials(options["engine"], wanted_dials)
    counts = {"--max-new-tokens": "max_new_tokens", "--block-size": "block_size", "--rows": "max_num_seqs"}
    check_counts({flag: options[name] for flag, name in counts.items()})
    data, out = options["data"], options["out"]
    if data is not None and not data.is_dir():
        raise MarsError(f"--data-dir {data} is no folder")
    if file := next((each for each in (out, *out.parents) if each.is_file()), None):
        raise MarsError(f"--out must name a folder, and {file} is a file")
    if "humaneval" in wanted:
        sandbox.check()  # rather than after an hour of answers
    label = name or Path(options["adapter"] or options["model"]).name
    return EvalPlan(tasks=wanted, dials=wanted_dials, limits=_limits(limit, wanted), name=label, **options)


def _limits(text: str | None, tasks: Sequence[str]) -> dict[str, int | None]:
    """``200`` for all tasks, or ``gsm8k=200,bbh=500``."""
    limits: dict[str, int | None] = dict.fromkeys(tasks)
    for item in [] if text is None else list_of("--limit", text):
        task, sign, number = item.rpartition("=")
        if not number.isdecimal() or int(number) < 1 or (sign and task not in tasks):
            raise MarsError(f"--limit must be a number of items, or such as gsm8k=200,bbh=500, not {item!r}")
        limits |= {task: int(number)} if sign else dict.fromkeys(tasks, int(number))
    return limits


def evaluate(model: Model, plan: EvalPlan, bar: Progress) -> dict[str, Any]:
    """Generate the answers that are missing, then score all; returns the content of ``results.json``."""
    for dial in plan.dials:
        model.dial(split_dial(dial)[0])  # raises before anything is generated
    folder = _Folder(plan)
    folder.assign_to(model.checkpoint)
    can_chat = model.checkpoint.tokenizer.chat_template
    exams = plan.exams(partial(prompts.render_chat, model.checkpoint) if can_chat else None)
    todo = [(exam, dial, folder.missing(exam, dial)) for exam in exams for dial in plan.dials]
    if any(missing for *_, missing in todo):
        with _open_engine(model, plan, bar) as run:
            answering = bar.add_task("", total=sum(len(exam.items) for exam, *_ in todo))
            for exam, dial, missing in todo:
                title = f"{exam.benchmark.title}, {dial}"
                bar.update(answering, description=title, advance=len(exam.items) - len(missing))
                for _ in folder.answer(model, run, exam, dial, missing):
                    bar.advance(answering)
    return score(plan, bar, exams)


@contextmanager
def _open_engine(model: Model, plan: EvalPlan, bar: Progress) -> Iterator[Generate]:
    """The function that answers requests, without the help of prompts cached earlier."""
    if plan.engine == "mars":
        model.warm_up(bar)

        def run(requests: Sequence[Request]) -> Generator[tuple[int, RequestOutput], None, None]:
            model.engine(requests[0].block_size).clear_prefix_cache()
            return model.run(requests)

        yield run
        return
    checkpoint = model.checkpoint
    source = source_of(plan.model, plan.adapter, checkpoint)
    options = {"speculative_config": vllm.PLUGIN} if checkpoint.settings else {}
    with vllm.load_vllm(checkpoint, source, plan.max_num_seqs, checkpoint.context, **options) as llm:
        yield partial(vllm.generate, llm, checkpoint)


def score(plan: EvalPlan, bar: Progress, exams: Sequence[Exam] | None = None) -> dict[str, Any]:
    """Score the answers in the folder and write the results. Needs no model."""
    folder = _Folder(plan)
    known = folder.known()
    exams = plan.exams(None) if exams is None else exams
    scoring = bar.add_task("scoring", total=len(exams) * len(plan.dials))
    rows, examples, runs = [], [], []
    for exam in exams:
        first: list[dict[str, Any]] = []
        for dial in plan.dials:
            samples = folder.scored(exam, dial)
            first = first or samples
            mine = folder.runs(exam.name, dial)
            rows.append(_row(exam, dial, samples, mine) | _compare(samples, first, plan.dials[0], dial))
            for item, sample in zip(exam.items, samples, strict=True):
                if "pieces" in sample:
                    example = {"task": exam.name, "item": item.id, "dial": dial, "prompt": item.prompt}
                    examples.append(example | {"pieces": sample["pieces"]})
            runs += mine
            bar.advance(scoring)
    results = {
        "plan": known["plan"] | {"tasks": plan.tasks, "dials": plan.dials, "limits": plan.limits},
        "model": known["model"],
        "rows": rows,
        "averages": [_average(rows, dial) for dial in plan.dials] if len(plan.tasks) > 1 else [],
        "examples": examples,
        "runs": runs,
    }
    write_whole(plan.out / "results.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    write_whole(plan.out / "results.md", markdown(table(results), names=2))
    return results


class _Folder:
    """The answers on disk."""

    def __init__(self, plan: EvalPlan) -> None:
        self._plan = plan
        self._out = plan.out

    def known(self) -> dict[str, Any]:
        path = self._out / "eval.json"
        if not path.is_file():
            raise MarsError(f"{self._out} holds no answers yet")
        return json.loads(path.read_text())

    def assign_to(self, checkpoint: Checkpoint) -> None:
        """Store whose answers the folder holds; raises if it has those of another model or of other options."""
        plan, settings = self._plan, checkpoint.settings
        options = {name: getattr(plan, name) for name in ("model", "adapter", "name", "max_new_tokens", "block_size")}
        options |= {"dtype": checkpoint.form, "seed": plan.seed, "engine": plan.engine}
        facts = {
            "plan": options,
            "model": {
                "name": checkpoint.name,
                "hash": fingerprint(checkpoint),
                "parameters": sum(weight.numel() for weight in checkpoint.module.parameters()),
                "block_size": settings.block_size if settings else None,
            },
        }
        path = self._out / "eval.json"
        if not path.is_file():
            (self._out / "answers").mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(facts, indent=2) + "\n")
        for part, stored in self.known().items():
            known = {"engine": "mars"} | stored  # older folders name another engine alone
            for name, value in facts[part].items():
                if name not in ("name", "model", "adapter") and known.get(name) != value:
                    raise MarsError(
                        f"{self._out} has answers with {name}={known.get(name)}, not {value}: "
                        "choose another --out, or use the same options"
                    )

    def missing(self, exam: Exam, dial: str) -> list[Item]:
        there = self._answers(exam.name, dial)
        return [item for item in exam.items if there.get(item.id, {}).get("asked") != _hash(item)]

    def answer(self, model: Model, run: Generate, exam: Exam, dial: str, items: Sequence[Item]) -> Iterator[None]:
        """Generate and store the answers to some items."""
        if not items:
            return
        requests = [self._request(model, item, dial) for item in items]
        numbers = {item.id: number for number, item in enumerate(exam.items)}
        started, count, tokens = time.perf_counter(), 0, 0
        try:
            with open_lines(self._path("answers", exam.name, dial)) as file, closing(run(requests)) as answers:
                for index, answer in answers:
                    number = numbers[items[index].id]
                    kept = _kept(items[index], answer, model, with_pieces=number < EXAMPLES)
                    file.write(_line(_redacted(exam, number, kept)))
                    file.flush()
                    count, tokens = count + 1, tokens + answer.num_tokens
                    yield
        finally:
            facts = {"task": exam.name, "dial": dial, "answers": count, "tokens": tokens}
            facts |= {"seconds": time.perf_counter() - started, "rows": self._plan.max_num_seqs, **collect()}
            with open_lines(self._out / "runs.jsonl") as file:
                file.write(json.dumps(facts) + "\n")

    def scored(self, exam: Exam, dial: str) -> list[dict[str, Any]]:
        """An exam's answers with their scores, which are written to the folder of samples."""
        there = self._answers(exam.name, dial)
        if missing := [item.id for item in exam.items if item.id not in there]:
            raise MarsError(
                f"{self._out} has no answer to {len(missing)} items of {exam.name} with {dial}, {missing[0]} first: "
                "run without --score-only"
            )
        if exam.benchmark.is_private and any("text" in answer for answer in there.values()):
            there = self._redact_all(exam, dial, there)
        answers = [there[item.id] for item in exam.items]
        for item, answer in zip(exam.items, answers, strict=True):
            if answer.get("row", item.row) != item.row:
                raise MarsError(
                    f"{item.id} was another question when {self._out} was written: score it with the same data"
                )
        if exam.benchmark.is_private:
            figures = [answer["metrics"] for answer in answers]
        else:
            figures = exam.score([answer["text"] for answer in answers])
        samples = [
            {"item": item.id, "score": each[exam.benchmark.score], "metrics": each} | answer
            for item, answer, each in zip(exam.items, answers, figures, strict=True)
        ]
        path = self._path("samples", exam.name, dial)
        path.parent.mkdir(exist_ok=True)  # answers may come from another machine
        write_whole(path, "".join(map(_line, samples)))
        return samples

    def _redact_all(self, exam: Exam, dial: str, answers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Replace answers that an earlier version kept with their text; those to other items are dropped."""
        numbers = {item.id: number for number, item in enumerate(exam.items)}
        kept = {id: _redacted(exam, numbers[id], answer) for id, answer in answers.items() if id in numbers}
        lines = [_line({"item": id} | answer) for id, answer in kept.items()]
        write_whole(self._path("answers", exam.name, dial), "".join(lines))
        return kept

    def runs(self, task: str, dial: str) -> list[dict[str, Any]]:
        return [run for run in read_lines(self._out / "runs.jsonl") if (run["task"], run["dial"]) == (task, dial)]

    def _request(self, model: Model, item: Item, dial: str) -> Request:
        plan = self._plan
        setting, window = split_dial(dial)
        block_size = plan.block_size or model.checkpoint.block_size
        return Request(
            prompt=prompts.encode(model.checkpoint, item.prompt, plan.max_new_tokens),
            dial=model.dial(setting),
            max_new_tokens=plan.max_new_tokens,
            stop=item.stop,
            block_size=block_size,
            window=None if window is None else parse_window(window, block_size),
        )

    def _answers(self, task: str, dial: str) -> dict[str, dict[str, Any]]:
        """By item; of several answers to one item the last."""
        return {answer.pop("item"): answer for answer in read_lines(self._path("answers", task, dial))}

    def _path(self, kind: str, task: str, dial: str) -> Path:
        return self._out / kind / f"{task}.{dial.replace(' ', '-')}.jsonl"


def _kept(item: Item, answer: RequestOutput, model: Model, with_pieces: bool) -> dict[str, Any]:
    text = model.checkpoint.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    kept = {
        "item": item.id,
        "asked": _hash(item),
        "row": item.row,
        "text": prompts.cut(text, item.stop),
        "tokens": answer.num_tokens,
        "forwards": answer.forwards,
        "checked": answer.num_verified,
        "agreed": answer.num_agreed,
        "finish_reason": answer.finish_reason,
    }
    return kept | ({"pieces": answer.pieces} if with_pieces else {})


def _redacted(exam: Exam, number: int, kept: dict[str, Any]) -> dict[str, Any]:
    """What is kept of the answer to an item of a private benchmark; of others, all."""
    if not exam.benchmark.is_private or "text" not in kept:
        return kept
    rest = {name: value for name, value in kept.items() if name not in ("text", "pieces")}
    return rest | exam.redact(number, kept["text"])


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _hash(item: Item) -> str:
    """Digest of the question as it is asked: an answer to another question is not used."""
    return digest(json.dumps([item.prompt, item.stop]))


def _row(
    exam: Exam, dial: str, samples: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The results of one task with one dial."""
    items = len(samples)
    low, high = wilson(right := sum(sample["score"] for sample in samples), items)
    tokens, forwards, checked, agreed = (
        sum(sample[name] for sample in samples) for name in ("tokens", "forwards", "checked", "agreed")
    )
    seconds = sum(run["seconds"] for run in runs)
    metrics = list(samples[0]["metrics"])
    return {
        "task": exam.name,
        "dial": dial,
        "items": items,
        "score": right / items,
        "low": low,
        "high": high,
        "metric": exam.benchmark.score,
        "metrics": {name: sum(sample["metrics"][name] for sample in samples) / items for name in metrics},
        "tokens": tokens,
        "forwards": forwards,
        "tokens_per_forward": tokens / max(1, forwards),
        "agreement": agreed / checked if checked else None,
        "seconds": seconds,
        "tokens_per_second": sum(run["tokens"] for run in runs) / seconds if seconds else None,
        "rows": runs[-1]["rows"] if runs else None,
        "cut": sum(sample["finish_reason"] == "length" for sample in samples) / items,
    }


def _compare(
    samples: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]], first_dial: str, dial: str
) -> dict[str, Any]:
    """The results of one task with one dial, compared with those of the first dial."""
    kept = "text" if "text" in samples[0] else "digest"
    same = sum(mine[kept] == theirs[kept] for mine, theirs in zip(samples, first, strict=True))
    scores = ([sample["score"] for sample in some] for some in (samples, first))
    against = None if dial == first_dial else {"dial": first_dial, **paired(*scores)}
    return {"same_text": same / len(samples), "against": against}


def _average(rows: Sequence[Mapping[str, Any]], dial: str) -> dict[str, Any]:
    """The mean of a dial's scores over all tasks, with an interval computed from theirs."""
    mine = [row for row in rows if row["dial"] == dial]
    mean, speed = (sum(row[name] for row in mine) / len(mine) for name in ("score", "tokens_per_forward"))
    half = sqrt(sum(((row["high"] - row["low"]) / 2) ** 2 for row in mine)) / len(mine)
    interval = {"low": max(0.0, mean - half), "high": min(1.0, mean + half)}
    return {"dial": dial, "score": mean, **interval, "tokens_per_forward": speed}


def table(results: Mapping[str, Any]) -> Lines:
    """Results as text: a line for every task and dial, then the averages."""
    lines = [["task", "dial", "items", "score", "95 % interval", "tok/fwd"]]
    lines[0] += ["tok/s", "agree", "same text", "better/worse", "p"]
    for row in results["rows"]:
        against = row["against"]
        name = [BENCHMARKS[row["task"]].title, row["dial"], str(row["items"])]
        speed = [cell(row["tokens_per_second"], "{:,.0f}".format), cell(row["agreement"], "{:.3f}".format)]
        compared = [f"{against['better']}/{against['worse']}", f"{against['p']:.2g}"] if against else ["", ""]
        lines.append([*name, *_scores(row), *speed, f"{row['same_text']:.0%}", *compared])
    for row in results["averages"]:
        lines.append(["average", row["dial"], "", *_scores(row), "", "", "", "", ""])
    return lines


def _scores(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['score']:.1%}", f"{row['low']:.1%} – {row['high']:.1%}", f"{row['tokens_per_forward']:.2f}"]
