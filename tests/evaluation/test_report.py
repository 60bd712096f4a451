"""``mars report`` on made-up results: the numbers on both pages, what is escaped, what is refused, how it looks."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from mars import cli
from mars.errors import how_to_install
from mars.evaluation.report import report
from mars.evaluation.statistics import paired, wilson

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TASKS = {"gsm8k": 60, "humaneval": 40}
DIALS = {"one-token": 1.0, "exact": 2.1, "relaxed=0.3": 2.4, "threshold=0.95": 1.5, "threshold=0.7": 2.6}
"""With their tokens per forward"""
EVIL = "<script>alert(1)</script> & `|*_ $x$"


def provenance(command: str = "mars eval --dials x", **more: object) -> dict[str, Any]:
    versions = {"python": "3.12.3", "torch": "2.11.0", "transformers": "5.17.0", "mars": "0.1.0"}
    facts = {"command": command, "commit": "abc1234", "date": "2026-11-15T18:47:06+00:00", "machine": "Abacus 9"}
    return {**facts, "threads": 2, "versions": versions, **more}


def evaluation(
    folder: Path,
    name: str,
    quality: float = 0.5,
    dials: dict[str, float] = DIALS,
    tasks: dict[str, int] = TASKS,
    block_size: int = 4,
) -> Path:
    """A folder as ``mars eval`` writes it."""
    (folder / "samples").mkdir(parents=True)
    rows, runs, examples, averages = [], [], [], []
    for task, items in tasks.items():
        chance = random.Random(name + task)
        first = [float(chance.random() < quality) for _ in range(items)]
        for dial, speed in dials.items():
            wrong = 0.0 if dial in ("one-token", "exact") else 0.05 * speed
            scores = [score if chance.random() > wrong else 1 - score for score in first]
            lines = [json.dumps({"item": f"{task}/{i}", "score": score}) + "\n" for i, score in enumerate(scores)]
            (folder / "samples" / f"{task}.{dial}.jsonl").write_text("".join(lines))
            low, high = wilson(sum(scores), items)
            rows.append(
                {"task": task, "dial": dial, "items": items, "score": sum(scores) / items, "low": low, "high": high}
                | {"metric": "exact_match,none", "metrics": {}, "tokens": 1000, "forwards": 500, "agreement": None}
                | {"tokens_per_forward": speed, "seconds": 2.0, "tokens_per_second": 900 * speed, "rows": 64}
                | {"cut": 0.05, "same_text": 1 - wrong, "against": None}
            )
            if dial != "one-token":
                rows[-1]["against"] = {"dial": "one-token", **paired(scores, first)}
            runs.append(provenance(task=task, dial=dial, answers=items))
            pieces = {"one-token": ["2", " +", " 2", "\n", "= ", "4 ", EVIL], "exact": ["2 + 2", "\n= 4 ", EVIL]}
            if dial in pieces:
                examples.append({"task": task, "item": f"{task}/0", "dial": dial, "prompt": f"What is 2 + 2? {EVIL}"})
                examples[-1]["pieces"] = pieces[dial]
    for dial, speed in dials.items() if len(tasks) > 1 else ():
        score = sum(row["score"] for row in rows if row["dial"] == dial) / len(tasks)
        averages.append(
            {"dial": dial, "score": score, "low": score - 0.05, "high": score + 0.05, "tokens_per_forward": speed}
        )
    plan = {"model": "m", "adapter": None, "name": name, "tasks": list(tasks), "dials": list(dials), "limits": tasks}
    plan |= {"max_new_tokens": 256, "block_size": block_size, "window": None, "dtype": "bfloat16", "seed": 0}
    model = {"name": "smollm2-135m", "hash": "0123456789abcdef", "parameters": 135_000_000, "block_size": block_size}
    results = {"plan": plan, "model": model, "rows": rows, "averages": averages, "examples": examples, "runs": runs}
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def bench(
    file: Path,
    sizes: tuple[int, ...] = (1, 8, 64),
    categories: tuple[str | None, ...] = (None, "coding", "math"),
    drop: int = 0,
) -> Path:
    """A file as ``mars bench`` writes it."""
    rows = []
    for number, category in enumerate(categories):
        speeds = {"one-token": 1.0, "exact": 2.0 + 0.05 * number, "exact tree": 2.4, "vllm": 0.7}
        for size in sizes:
            for name, speed in speeds.items():
                dial, _, window = name.partition(" ")
                who = {"peer": name, "window": None} if name == "vllm" else {"dial": dial, "window": window or "auto"}
                figures = {"tokens_per_second": 1234 * size**0.8 * speed, "ratio_to_one_token": speed / size**0.05}
                rows.append(who | figures | {"batch_size": size, "tokens_per_forward": max(speed, 1.0)})
                rows[-1] |= {"requests": 16, "same_text": 0.5 if size > 8 else 1.0}
                rows[-1] |= {} if category is None else {"category": category}
    options = {
        "model": "smollm2-135m",
        "adapter": None,
        "dials": ["one-token", "exact", "exact tree"],
        "peers": ["vllm"],
    }
    options |= {"batch_sizes": sizes, "prompts": "/x/spec_bench.jsonl", "max_new_tokens": 256, "dtype": "bfloat16"}
    record = {"options": options, "provenance": provenance("mars bench --dials exact"), "rows": rows[drop:]}
    file.write_text(json.dumps(record))
    return file


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Type ``mars report …``; returns the exit code."""

    def typed(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["mars", "report", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return int(left.value.code or 0)

    return typed


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints and a bench. The first checkpoint lacks an item, and has the others in another order."""
    folder = tmp_path_factory.mktemp("sources")
    base = evaluation(folder / "base", "Base", 0.4, {"one-token": 1.0})
    samples = base / "samples" / "gsm8k.one-token.jsonl"
    samples.write_text("".join(reversed(samples.read_text().splitlines(keepends=True)[1:])))
    return [base, evaluation(folder / "ours", f"Ours {EVIL}", 0.6), bench(folder / "bench.json")]


@pytest.fixture(scope="module")
def out(sources: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["mars", "report", *map(str, sources), "--out", str(folder / "new")])
        with pytest.raises(SystemExit) as left:
            cli.main()
    assert not left.value.code
    return folder / "new"


class Tables(HTMLParser):
    """The text of every cell of a page's tables, by the title of its line; and all ids, links and tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.is_inside = False
        self.feed(page)
        self.tables = [[[" ".join(cell.split()) for cell in line] for line in table] for table in self.tables]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
        elif tag == "small":
            self.handle_data(" / ")

        self.is_inside = tag == "table" or self.is_inside

    def handle_endtag(self, tag: str) -> None:
        self.is_inside = self.is_inside and tag != "table"

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.is_inside and self.tables[-1] and self.tables[-1][-1]:
            self.tables[-1][-1][-1] += data

    def attributes(self, name: str) -> list[str]:
        return [str(attributes[name]) for _, attributes in self.seen if name in attributes]


def markdown_tables(page: str) -> list[list[list[str]]]:
    """As `Tables` has them."""
    tables: list[list[list[str]]] = [[]]
    for line in page.splitlines():
        if line.startswith("| ---"):
            continue
        if line.startswith("| "):
            cells = [each.strip() for each in re.split(r"(?<!\\) \| ", line[2:-2])]
            clean = [re.sub(r"\*\*|</?a[^>]*>", "", each.replace("<br>", " / ")) for each in cells]
            links = [re.sub(r"\[(\\\[\d+\\\])\]\(#source-\d+\)", r"\1", each) for each in clean]
            tables[-1].append([re.sub(r"\\(.)", r"\1", each) for each in links])
        elif tables[-1]:
            tables.append([])
    return [table for table in tables if table]


def percent(row: dict[str, Any], with_speed: bool = False) -> str:
    speed = f" / {row['tokens_per_forward']:.2f} tok/fwd" if with_speed else ""
    return f"{100 * row['score']:.1f} ({100 * row['low']:.1f} to {100 * row['high']:.1f}){speed}"


def difference(outcome: dict[str, float], note: str) -> str:
    def signed(number: float) -> str:
        text = f"{100 * number:+.1f}".replace("-", "−")
        return "0.0" if text[1:] == "0.0" else text

    p = "p < 0.001" if outcome["p"] < 0.001 else f"p = {outcome['p']:.3f}"
    counts = f"{outcome['better']} better, {outcome['worse']} worse"
    mean, low, high = (signed(outcome[name]) for name in ("difference", "low", "high"))
    return f"{mean} ({low} to {high}) / {counts} / {p}, {note}"


@pytest.mark.parametrize("kind", ["md", "html"])
def test_the_numbers(kind: str, sources: list[Path], out: Path) -> None:
    page = (out / f"report.{kind}").read_text()
    plain, compared, by_dial, against, speed, kinds, origins = (
        markdown_tables(page) if kind == "md" else Tables(page).tables
    )
    base, ours = (json.loads((source / "results.json").read_text()) for source in sources[:2])
    name = " ".join(f"Ours {EVIL}".split())

    assert plain[0] == ["", "GSM8K / 60 items", "HumanEval / 40 items", "Average", ""]
    assert plain[1] == ["Base", *map(percent, base["rows"]), percent(base["averages"][0]), "[1]"]
    first = [row for row in ours["rows"] if row["dial"] == "one-token"]
    assert plain[2] == [name, *map(percent, first), percent(ours["averages"][0]), "[2]"]

    def scores(source: Path, task: str) -> dict[str, float]:
        lines = (source / "samples" / f"{task}.one-token.jsonl").read_text().splitlines()
        return {sample["item"]: sample["score"] for sample in map(json.loads, lines)}

    cells = []
    for task, items in {"gsm8k": 59, "humaneval": 40}.items():
        theirs, mine = (scores(source, task) for source in sources[:2])
        cells.append(difference(paired([mine[item] for item in theirs], list(theirs.values())), f"{items} items"))
    assert compared[1:] == [[name, *cells, "[2]"]]

    for number, (dial, _) in enumerate(DIALS.items()):
        rows = [row for row in ours["rows"] if row["dial"] == dial]
        cells = [percent(row, True) for row in (*rows, ours["averages"][number])]
        assert by_dial[1 + number] == [dial, *cells, "[2]"]
        if number:
            cells = [difference(row["against"], f"{row['same_text']:.0%} same") for row in rows]
            assert against[number] == [dial, *cells, "[2]"]

    assert [line[0] for line in speed[1:]] == ["one-token", "exact", "exact tree", "vllm"]
    assert speed[0] == ["", "1 / at once", "8 / at once", "64 / at once", ""]
    assert speed[1][:2] == ["one-token", "1,234"]
    assert speed[2][:2] == ["exact", "2,468 / 2.00 × / 2.00 tok/fwd"]
    assert kinds[1][:2] == ["coding", "2.05 × / 1,234 → 2,530 tok/s / 2.05 tok/fwd"]
    assert [line[0] for line in kinds[1:]] == ["coding", "math"]

    eval_facts = ["mars eval --dials x", "abc1234", "smollm2-135m, 0123456789abcdef", "Abacus 9"]
    versions = "python 3.12.3, torch 2.11.0, transformers 5.17.0, mars 0.1.0"
    assert origins[0][1:] == ["command", "commit", "model", "machine", "versions", "date"]
    assert [line[1:] for line in origins[1:3]] == [[*eval_facts, versions, "2026-11-15"]] * 2
    assert origins[3][1:4] == ["mars bench --dials exact", "abc1234", "smollm2-135m"]


@pytest.mark.parametrize("kind", ["md", "html"])
def test_title_verdict_and_chart_come_first(kind: str, out: Path) -> None:
    text = (out / f"report.{kind}").read_text()
    page = Tables(MarkdownIt("commonmark").enable("table").render(text) if kind == "md" else text)
    said = " ".join(page.text.split())
    title = f"MARS report: Base, Ours {EVIL} and smollm2-135m"
    same = f"exact writes the same answers as one-token on 100 of 100 items, at 2.10 tokens per forward (Ours {EVIL})."
    fast = (
        "Compared with one-token on Abacus 9, exact is 2.00 times as fast at 1 request and 1.62 times as fast at "
        "64 requests, with the same text in 40 of 48 answers; the fastest peer at 1 request, vllm, is 0.70 times as "
        "fast (smollm2-135m)."
    )
    places = [said.index(each) for each in (title, same, fast, "Findings", "Accuracy, one token per forward")]
    assert places == sorted(places)
    assert text.index("speed-3") < text.index("Findings") < text.index("frontier-")
    if kind == "html":
        assert f"<title>{escape(title, quote=False)}</title>" in text


def test_a_verdict_says_when_texts_differ_and_when_it_is_slower(tmp_path: Path) -> None:
    folder = evaluation(tmp_path / "own", "smollm2-135m", dials={"one-token": 1.0, "relaxed=0.3": 2.4})
    rows = json.loads((folder / "results.json").read_text())["rows"]
    lossy = [row for row in rows if row["dial"] == "relaxed=0.3"]
    same = sum(round(row["same_text"] * row["items"]) for row in lossy)
    better, worse = (sum(row["against"][each] for row in lossy) for each in ("better", "worse"))
    slow = json.loads(bench(tmp_path / "bench.json", (1, 8), (None,)).read_text())
    slow["rows"] = [row | {"ratio_to_one_token": 0.5 + 0.0625 * row["batch_size"]} for row in slow["rows"]]
    (tmp_path / "bench.json").write_text(json.dumps(slow))
    report([folder, tmp_path / "bench.json"], tmp_path / "out")
    said = (tmp_path / "out" / "report.html").read_text()
    assert same < 100 and worse
    assert (
        f"<p>relaxed=0.3 writes the same answers as one-token on {same} of 100 items, scores higher on {better} and "
        f"lower on {worse}, at 2.40 tokens per forward.</p>" in said
    )
    assert "exact is 0.56 times as fast (slower) at 1 request and 1.00 times as fast at 8 requests, with" in said


def test_without_a_second_dial_the_verdict_is_the_score(tmp_path: Path) -> None:
    report([evaluation(tmp_path / "base", "Base", dials={"one-token": 1.0})], tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text()
    assert "<p>One token per forward, the average of 2 tasks is" in text
    assert "Compared" not in text and "same answers" not in text and "<svg" not in text


def test_one_batch_size_is_drawn_as_bars(tmp_path: Path) -> None:
    report([bench(tmp_path / "bench.json", (8,), (None,))], tmp_path / "out")
    drawn = (tmp_path / "out" / "plots" / "speed-1-light.svg").read_text()
    assert {"one-token", "exact", "vllm", "13,026"} <= set(re.findall(r">([^<>]+)</text>", drawn))


def test_the_findings(sources: list[Path], out: Path) -> None:
    said = Tables((out / "report.html").read_text()).text.replace("\N{NO-BREAK SPACE}", " ")
    base, ours = (json.loads((source / "results.json").read_text())["averages"] for source in sources[:2])
    assert (
        f"the average of 2 tasks is {100 * base[0]['score']:.1f} % for Base and {100 * ours[0]['score']:.1f} %" in said
    )
    assert "exact writes 2.10 tokens per forward on average over 2 tasks, with the same answers on 100 of 100" in said
    assert f"threshold=0.7 writes the most, 2.60 tokens per forward, at {100 * ours[-1]['score']:.1f} %" in said
    assert (
        "smollm2-135m on Abacus 9, 1 and 64 requests at once: exact writes 2,468 and 68,753 tokens per second, "
        "2.00 and 1.62 times one-token's; the fastest peer, vllm, writes 864 and 24,063." in said
    )
    assert "2 kinds of prompt, 1 request at once: exact is 2.05 (coding) to 2.10 (math) times as fast" in said


@pytest.mark.parametrize("kind", ["md", "html"])
def test_what_others_wrote_is_text(kind: str, out: Path) -> None:
    text = (out / f"report.{kind}").read_text()
    page = Tables(MarkdownIt("commonmark").enable("table").render(text) if kind == "md" else text)
    assert page.text.count(EVIL) >= 8 and len(page.tables) == 7
    assert {tag for tag, _ in page.seen} & {"script", "iframe", "object", "em", "del"} == set()
    assert not any(name.startswith("on") for _, attributes in page.seen for name in attributes)


def test_examples_in_colour(out: Path) -> None:
    page = (out / "report.html").read_text()
    texts = re.findall(r'<div class="answer"><h4>(.*?)</h4>\s*<div class="text">(.*?)</div>', page, re.DOTALL)
    assert [title for title, _ in texts] == ["one-token, 7 forwards", "exact, 3 forwards"] * 2
    pieces = re.findall(r'<span class="tint-(\d)" title="forward (\d)">(.*?)</span>', texts[0][1], re.DOTALL)
    assert [(tint, forward) for tint, forward, _ in pieces] == [(str(i % 4), str(i + 1)) for i in range(7)]
    assert [text for *_, text in pieces[:4]] == ["2", " +", " 2", "\n"]
    written = (out / "report.md").read_text()
    assert "    2│ +│ 2│\n    │= │4 │<script>" in written and "    2 + 2│\n    = 4 │<script>" in written


def test_plots_and_links(out: Path) -> None:
    names = [
        f"frontier-{what}-tokens-per-{unit}"
        for what in ("Average-of-2-tasks", "GSM8K", "HumanEval")
        for unit in ("forward", "second")
    ]
    names = ["speed-3", *names, "categories-3"]
    files = {f"{name}-{theme}.{kind}" for name in names for theme in ("light", "dark") for kind in ("svg", "png")}
    assert {path.name for path in (out / "plots").iterdir()} == files
    written = (out / "report.md").read_text()
    assert re.findall(r'srcset="plots/(.*?)-dark.svg"', written) == names
    assert re.findall(r'src="plots/(.*?)-light.svg"', written) == names

    light, dark = (
        (out / "plots" / f"frontier-GSM8K-tokens-per-second-{theme}.svg").read_text() for theme in ("light", "dark")
    )
    assert light != dark and re.findall(r">([^<>]+)</text>", light) == re.findall(r">([^<>]+)</text>", dark)
    for text in (
        "tokens per second",
        "score, %",
        "Base, one-token",
        "relaxed",
        "0.3",
        "threshold",
        "0.7",
        "0.95",
        "exact",
    ):
        assert f">{text}</text>" in light

    page = Tables((out / "report.html").read_text())
    ids = page.attributes("id")
    assert len(ids) == len(set(ids)) > 100
    links = [*page.attributes("href"), *page.attributes("xlink:href")]
    assert {link for link in links if not link.startswith("#")} == {"data:,"}
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    assert page.attributes("src") == []
    for tag, attributes in page.seen:
        assert (clip := attributes.get("clip-path")) is None or clip[5:-1] in ids, tag


def test_one_task_one_dial_and_block_sizes(tmp_path: Path, run) -> None:
    folders = [
        evaluation(tmp_path / f"b{size}", "MARS", 0.5, {"one-token": 1.0, "exact": 2.0}, {"own": 20}, size)
        for size in (4, 8)
    ]
    samples = folders[1] / "samples" / "own.one-token.jsonl"
    samples.write_text("".join(json.dumps({"item": f"own/{i}", "score": 0.5}) + "\n" for i in range(20)))
    assert run(folders[0] / "results.json", folders[1], "--out", tmp_path / "out") == 0
    tables = markdown_tables((tmp_path / "out" / "report.md").read_text())
    assert [line[0] for line in tables[0][1:]] == ["MARS, B = 4", "MARS, B = 8"]
    assert tables[0][0] == ["", "own / 20 items", ""]
    first = [
        json.loads(line)["score"] for line in (folders[0] / "samples" / "own.one-token.jsonl").read_text().splitlines()
    ]
    assert tables[1][1][1] == difference(paired([0.5] * 20, first), "20 items")
    assert "the score on own is" in (tmp_path / "out" / "report.md").read_text()
    assert len(list((tmp_path / "out" / "plots").glob("frontier-own-*-light.svg"))) == 2


def rewritten(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def break_off(path: Path) -> None:
    path.write_text(path.read_text()[:500])


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda at: shutil.rmtree(at / "ours"), "there is no ours"),
        (lambda at: (at / "bench.json").unlink(), "there is no bench.json"),
        (lambda at: (at / "ours" / "results.json").unlink(), "give what `mars eval` wrote"),
        (lambda at: break_off(at / "ours" / "results.json"), "results.json is no whole JSON file"),
        (lambda at: break_off(at / "bench.json"), "bench.json is no whole JSON file"),
        (lambda at: (at / "bench.json").write_bytes(b"\xff\x00"), "bench.json is no whole JSON file"),
        (lambda at: (at / "bench.json").write_text("[1]"), "bench.json is not what `mars bench` writes"),
        (lambda at: shutil.copy(at / "ours" / "results.json", at / "bench.json"), "writes: options: Field required"),
        (lambda at: shutil.copy(at / "bench.json", at / "ours" / "results.json"), "writes: plan: Field required"),
        (lambda at: rewritten(at / "ours" / "results.json", rows=[{"task": 1}]), "rows.0.dial: Field required"),
        (lambda at: rewritten(at / "ours" / "results.json", rows=[]), "ours is half: it has 0 of 1 scores"),
        (lambda at: rewritten(at / "bench.json", rows=[]), "bench.json is half: it has 0 of 4 measurements"),
        (lambda at: bench(at / "bench.json", (1,), ("math", "qa"), drop=1), "is half: it has 7 of 8 measurements"),
        (lambda at: (at / "ours" / "samples" / "own.one-token.jsonl").unlink(), "ours is half: "),
        (
            lambda at: (at / "ours" / "samples" / "own.one-token.jsonl").write_text('{"a": 1}\n'),
            "an item and its score",
        ),
        (lambda at: (at / "out").write_text(""), "the report cannot be written to out"),
        (
            lambda at: ((at / "bench.json").unlink(), (at / "bench.json").symlink_to("ours")),
            "bench.json is given twice",
        ),
    ],
)
def test_bad_sources_are_one_clear_line(
    harm, says: str, tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("base", "ours"):
        evaluation(tmp_path / name, name, dials={"one-token": 1.0}, tasks={"own": 3})
    bench(tmp_path / "bench.json", sizes=(1,))
    harm(tmp_path)
    assert run("base", "ours", "bench.json", "--out", "out") == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and says in said.err, said.err
    assert not (tmp_path / "out").is_dir()


def test_matplotlib_is_asked_for(tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(bench(tmp_path / "bench.json"), "--out", tmp_path / "out") == 2
    assert how_to_install("bench") in capsys.readouterr().err


@pytest.fixture
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def test_in_a_browser(browser: Any, out: Path) -> None:
    page = browser.new_page()
    logged: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: logged.append(message.text))
    page.on("pageerror", lambda error: logged.append(str(error)))
    page.on("dialog", lambda dialog: logged.append(dialog.message))
    page.on("request", lambda request: asked.append(request.url))
    address = (out / "report.html").as_uri()
    for width in (390, 1280):
        for scheme, other in (("light", "dark"), ("dark", "light")):
            page.set_viewport_size({"width": width, "height": 800})
            page.emulate_media(color_scheme=scheme)
            page.goto(address)
            assert page.evaluate("document.documentElement.scrollWidth") == width, "something sticks out"
            assert page.evaluate("document.body.scrollWidth") == width
            assert (
                page.locator(f".{scheme} svg").first.is_visible()
                and not page.locator(f".{other} svg").first.is_visible()
            )
            paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert all((int(part) > 128) == (scheme == "light") for part in re.findall(r"\d+", paper))
            drawn = page.locator(f".{scheme} svg").first.bounding_box()
            assert drawn and drawn["width"] > min(0.85 * width, 500)
    folds = page.locator("details.section")
    inside = folds.locator("table")
    assert folds.count() == 8 and not any(table.is_visible() for table in inside.all()), "closed at first"
    page.get_by_text("Speed by batch size").click()
    assert [table.is_visible() for table in inside.all()].count(True) == 1
    page.get_by_text("[3]").first.click()
    assert page.locator("#source-3").is_visible(), "a link opens what it leads to"
    page.reload()
    page.emulate_media(media="print", color_scheme="dark")
    assert all(table.is_visible() for table in inside.all()), "paper has everything"
    assert page.locator(".light svg").first.is_visible() and not page.locator(".dark svg").first.is_visible()
    assert logged == []
    assert {url for url in asked if not url.startswith("data:")} == {address}


def test_names_and_averages_are_those_of_like_with_like(tmp_path: Path, run) -> None:
    whole = evaluation(tmp_path / "base", "Base"), evaluation(tmp_path / "b4", "MARS")
    some = evaluation(tmp_path / "b2", "MARS", tasks=dict(list(TASKS.items())[:1]), block_size=2)
    assert run(*whole, some, "--out", tmp_path / "out") == 0
    text = (tmp_path / "out" / "report.md").read_text()
    lines = {line[0]: line for line in markdown_tables(text)[0][1:]}
    assert list(lines) == ["Base", "MARS, B = 4", "MARS, B = 2"]
    assert lines["MARS, B = 2"][-2] == "–" != lines["MARS, B = 4"][-2], "it has no average of the same tasks"
    sentence = next(line for line in text.splitlines() if "One token per forward, the average" in line)
    assert "MARS, B = 4" in sentence and "MARS, B = 2" not in sentence
