"""``mars report``: one page in Markdown and in HTML from the files of ``mars eval`` and ``mars bench``."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from mars.errors import MarsError
from mars.evaluation import plots
from mars.evaluation.benchmarks import BENCHMARKS
from mars.evaluation.page import Answers, Cell, Line, Page, Picture, Section, Table, count, render
from mars.evaluation.results import PLAIN, Bench, Checkpoint, Difference, Example, Score, Sources, read_all

EXACT = "exact"
FRONTIER_DIALS = 2  # fewest dials for a plot of accuracy against speed
EXAMPLE_DIALS = 3  # most dials whose answers are shown beside each other
SIGNIFICANT = 0.05
TEST = (
    "In brackets the 95 % interval; below it, items that are better and worse, and p of the exact McNemar test; "
    f"bold: p < {SIGNIFICANT}."
)


def report(paths: Sequence[Path], out: Path) -> list[Path]:
    """Write the page and its plots into the folder ``out``; returns the two files."""
    sources = read_all(paths)
    sections = [_accuracy(sources), _by_dial(sources), _frontiers(sources), _speed(sources), _categories(sources)]
    sections.append(_examples(sources))
    chart = _chart(sections)
    rest = [each._replace(pictures=[picture for picture in each.pictures if picture is not chart]) for each in sections]
    shown = [section for section in rest if section.contents]
    title = f"MARS report: {_and(_models(sources))}"
    findings = list(_findings(sources))
    verdict = list(_verdict(sources)) or findings[:1]
    page = Page(title, _facts(sources), verdict, chart, findings, shown, sources.origins)
    folder = out / "plots"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pages = {out / name: text for name, text in render(page, folder).items()}
        for path, text in pages.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MarsError(f"the report cannot be written to {out}: {error.strerror}") from None
    return list(pages)


def _chart(sections: Sequence[Section]) -> Picture | None:
    """The picture that a report opens with: speed by batch size, or else the first of accuracy against speed."""
    pictures = [picture for section in sections for picture in section.pictures]
    return next((each for each in pictures if each.name.startswith("speed-")), next(iter(pictures), None))


def _accuracy(sources: Sources) -> Section:
    """Checkpoints beside each other, one token per forward."""
    checkpoints = [each for each in sources.checkpoints if PLAIN in each.found.plan.dials]
    tasks, tables = sources.tasks, []
    head = _head(tasks, checkpoints) + [Cell("Average")] * sources.has_averages
    if checkpoints:
        lines = [Line(each.label, _scores(sources, tasks, each, PLAIN), each.tags(dial=PLAIN)) for each in checkpoints]
        tables.append(Table("Accuracy", "Score in percent, with its 95 % interval in brackets.", head, lines))
    if len(checkpoints) > 1:
        first, *others = checkpoints
        lines = [
            Line(each.label, [_compared(first, each, task) for task in tasks], each.tags(dial=PLAIN)) for each in others
        ]
        caption = f"Points above or below {first.label} on the same items. {TEST}"
        tables.append(Table(f"Against {first.label}", caption, head[: len(tasks)], lines))
    text = "The models themselves, decoded in the ordinary way: no dial is at work."
    return Section("Accuracy, one token per forward", text, tables)


def _by_dial(sources: Sources) -> Section:
    """For each checkpoint with several dials: scores and tokens per forward, and what the dial changes."""
    tables = []
    for each in sources.checkpoints:
        first, *others = dials = each.found.plan.dials
        if not others:
            continue
        tasks = [task for task in sources.tasks if each.row(task, first)]
        head = _head(tasks, [each]) + [Cell("Average")] * (sources.has_averages and tasks == sources.tasks)
        cuts = _span({round(100 * row.cut) for row in each.found.rows})
        caption = (
            "Score in percent, with its 95 % interval in brackets; below it, tokens per forward. "
            f"{cuts} % of a cell's answers hit the limit of {each.found.plan.max_new_tokens} tokens."
        )
        scores = {dial: _scores(sources, tasks, each, dial, with_speed=True) for dial in dials}
        lines = [Line(dial, cells, each.tags(dial=dial)) for dial, cells in scores.items()]
        tables.append(Table(each.label, caption, head, lines))
        caption = f"Points above or below {first} on the same items. {TEST} Same: share of answers with the same text."
        lines = [Line(dial, [_against(each, task, dial) for task in tasks], each.tags(dial=dial)) for dial in others]
        tables.append(Table(f"{each.label}: against {first}", caption, head[: len(tasks)], lines))
    text = "What each setting of the dial gains in tokens, and costs in score."
    return Section("Accuracy and tokens per forward by dial", text, tables)


def _head(tasks: Sequence[str], checkpoints: Sequence[Checkpoint]) -> list[Cell]:
    """The tasks, with how many items they have."""
    head = []
    for task in tasks:
        counts = {row.items for each in checkpoints for row in each.found.rows if row.task == task}
        head.append(Cell(_task(task), notes=[f"{_span(counts)} items"] if counts else ()))
    return head


def _scores(
    sources: Sources, tasks: Sequence[str], checkpoint: Checkpoint, dial: str, with_speed: bool = False
) -> list[Cell]:
    """A checkpoint's scores with a dial; if these are all tasks, their average behind them."""
    scores: list[Score | None] = [checkpoint.row(task, dial) for task in tasks]
    if sources.has_averages and tasks == sources.tasks:
        scores.append({score.dial: score for score in checkpoint.scores()}.get(dial))
    cells = []
    for score in scores:
        if score is None:
            cells.append(Cell())
            continue
        speed = [f"{score.tokens_per_forward:.2f} tok/fwd"] if with_speed else []
        low, high = (f"{100 * each:.1f}" for each in (score.low, score.high))
        cells.append(Cell(f"{100 * score.score:.1f}", f"({low} to {high})", speed))
    return cells


def _compared(first: Checkpoint, other: Checkpoint, task: str) -> Cell:
    """Two checkpoints on the items that both answered."""
    if not first.row(task, PLAIN) or not other.row(task, PLAIN):
        return Cell()
    outcome, items = other.compared_with(first, task)
    return _difference(outcome, f"{items:,} items") if items else Cell()


def _against(checkpoint: Checkpoint, task: str, dial: str) -> Cell:
    """A dial against the checkpoint's first one."""
    row = checkpoint.row(task, dial)
    return _difference(row.against, f"{row.same_text:.0%} same") if row and row.against else Cell()


def _difference(outcome: Difference, note: str) -> Cell:
    mean, low, high = (_signed(100 * each) for each in (outcome.difference, outcome.low, outcome.high))
    p = "p < 0.001" if outcome.p < 0.001 else f"p = {outcome.p:.3f}"
    notes = [f"{outcome.better} better, {outcome.worse} worse", f"{p}, {note}"]
    return Cell(mean, f"({low} to {high})", notes, outcome.p < SIGNIFICANT)


def _signed(number: float) -> str:
    return f"{number:+.1f}".replace("-", "−").replace("+0.0", "0.0").replace("−0.0", "0.0")


def _span(numbers: set[int]) -> str:
    return " to ".join(f"{number:,}" for number in sorted({min(numbers), max(numbers)}))


def _task(task: str) -> str:
    return BENCHMARKS[task].title if task in BENCHMARKS else task


def _frontiers(sources: Sources) -> Section:
    """Two for every task with enough dials, and for their average: by tokens per forward and by tokens per second."""
    pictures = []
    for task in (*[None] * sources.has_averages, *sources.tasks):
        scored = [(each, each.scores(task)) for each in sources.checkpoints]
        if max((len(scores) for _, scores in scored), default=0) < FRONTIER_DIALS:
            continue
        name = _task(task) if task else f"Average of {len(sources.tasks)} tasks"
        tags = sorted({tag for each in sources.checkpoints for tag in each.tags(task)})
        for unit in ("tokens per forward", "tokens per second"):
            points = [
                plots.Point(each.label, score.dial, speed, 100 * score.score, 100 * score.low, 100 * score.high)
                for each, scores in scored
                for score in scores
                if (speed := each.speed(task, score.dial, unit)) is not None
            ]
            if points:
                plot = partial(plots.frontier, points, unit)
                file = re.sub(r"[^\w-]+", "-", f"frontier-{name}-{unit}")
                pictures.append(Picture(file, f"{name}, by {unit}", tags, plot))
    text = (
        "Right is faster, up is better. A line is a family of dials, with their settings in small; bars are 95 % "
        "intervals. The dotted line is the score of one token per forward: what stays on it costs nothing."
    )
    return Section("Accuracy against speed", text, pictures=pictures)


def _speed(sources: Sources) -> Section:
    """Tokens per second of dials and peers by batch size, a plot and a table for each bench file."""
    pictures, tables = [], []
    for tag, bench in sources.benches:
        if rows := [row for row in bench.rows if row.category is None]:
            caption = "Tokens per second; below it, times one-token's, and tokens per forward."
            cells = {}
            for row in rows:
                notes = [] if row.name == PLAIN else [f"{row.ratio_to_one_token:.2f} ×"]
                if row.name != PLAIN and row.tokens_per_forward:
                    notes.append(f"{row.tokens_per_forward:.2f} tok/fwd")
                cells[row.name, row.batch_size] = Cell(_rate(row.tokens_per_second), notes=notes)
            tables.append(_by_batch_size(tag, bench, caption, cells))
            plot = partial(plots.speed, [row.model_dump() for row in rows])
            pictures.append(Picture(f"speed-{tag}", f"{_subject(bench)}, tokens per second", [tag], plot))
    text = "All requests start together. A peer is another decoder of the same model, measured in the same run."
    return Section("Speed by batch size", text, tables, pictures)


def _categories(sources: Sources) -> Section:
    """How much faster ``exact`` is on each category of prompts."""
    pictures, tables = [], []
    for tag, bench in sources.benches:
        plain = {(row.category, row.batch_size): row.tokens_per_second for row in bench.rows if row.name == PLAIN}
        if rows := [row for row in bench.rows if row.category is not None and row.name == EXACT]:
            caption = "Tokens per second of exact over one-token's; below it, both, and exact's tokens per forward."
            cells = {}
            for row in rows:
                both = (plain.get((row.category, row.batch_size)), row.tokens_per_second)
                rates = " → ".join(_rate(rate) for rate in both if rate)
                notes = [f"{rates} tok/s", f"{row.tokens_per_forward or 1:.2f} tok/fwd"]
                cells[str(row.category), row.batch_size] = Cell(f"{row.ratio_to_one_token:.2f} ×", notes=notes)
            tables.append(_by_batch_size(tag, bench, caption, cells))
            plot = partial(plots.by_category, [row.model_dump() for row in rows])
            pictures.append(Picture(f"categories-{tag}", f"{_subject(bench)}, exact over one-token", [tag], plot))
    return Section("Speed by kind of prompt", "Each kind is measured on its own prompts alone.", tables, pictures)


def _by_batch_size(tag: int, bench: Bench, caption: str, cells: dict[tuple[str, int], Cell]) -> Table:
    """A table of cells by the title of their line and their batch size."""
    sizes = sorted({size for _, size in cells})
    names = dict.fromkeys(name for name, _ in cells)
    lines = [Line(name, [cells.get((name, size), Cell()) for size in sizes], [tag]) for name in names]
    prompts = Path(bench.options.prompts).name if bench.options.prompts else "the built-in ones"
    caption += f" Prompts: {prompts}; up to {bench.options.max_new_tokens:,} new tokens."
    return Table(_subject(bench), caption, [Cell(f"{size:,}", notes=["at once"]) for size in sizes], lines)


def _rate(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1}f}"


def _subject(bench: Bench) -> str:
    return f"{bench.model}, {bench.options.dtype}, {bench.provenance.machine}"


def _examples(sources: Sources) -> Section:
    """For each task the item that most dials show; of several such, the one with the longest texts per forward."""

    def worth_showing(examples: Sequence[Example]) -> tuple[int, float]:
        pieces = [piece for example in examples for piece in example.pieces]
        return len(examples), len("".join(pieces)) / len(pieces)

    shown = []
    for task in sources.tasks:
        if task in BENCHMARKS and BENCHMARKS[task].is_private:
            continue
        items: dict[tuple[int, int | str], list[Example]] = defaultdict(list)
        for number, each in enumerate(sources.checkpoints):
            for example in each.found.examples:
                if example.task == task and any(example.pieces):
                    items[number, example.item].append(example)
        (number, item), best = max(items.items(), key=lambda pair: worth_showing(pair[1]), default=((0, ""), []))
        if len(best) > 1:
            checkpoint = sources.checkpoints[number]
            pieces = {example.dial: example.pieces for example in best[:EXAMPLE_DIALS]}
            title = f"{checkpoint.label}, {_task(task)}, {item}"
            shown.append(Answers(title, best[0].prompt, pieces, checkpoint.tags(task)))
    text = "The tokens of each forward have one colour; four colours take turns."
    return Section("What a forward writes", text, answers=shown)


def _facts(sources: Sources) -> str:
    machines = dict.fromkeys(origin.run.machine for origin in sources.origins)
    days = sorted({day for origin in sources.origins for day in origin.days})
    tasks, checkpoints = len(sources.tasks), len(sources.checkpoints)
    counted = [count(checkpoints, "checkpoint"), count(tasks, "task")] if checkpoints else []
    return " · ".join([*counted, *machines, *dict.fromkeys(days[:1] + days[-1:])])


def _models(sources: Sources) -> list[str]:
    names = [each.found.plan.name for each in sources.checkpoints] + [bench.model for _, bench in sources.benches]
    return list(dict.fromkeys(names))


def _verdict(sources: Sources) -> Iterator[str]:
    """Does a dial write what one-token writes, and is it faster? A sentence for each, if the sources have it."""
    is_one = len(_models(sources)) == 1  # else each sentence names its own
    for each in sources.checkpoints:
        if (dial := _judged(each.found.plan.dials)) and each.found.plan.dials[0] == PLAIN:
            yield _same_answers(each, dial) + ("." if is_one else f" ({each.label}).")
            break
    for _, bench in sources.benches:
        whole = [row for row in bench.rows if row.category is None and not row.peer]
        if dial := _judged([row.name for row in whole]):
            yield _how_fast(bench, dial) + ("." if is_one else f" ({bench.model}).")
            break


def _judged(dials: Sequence[str]) -> str | None:
    """The dial that a verdict is about: ``exact``, or else the first that is not one-token."""
    return EXACT if EXACT in dials else next((dial for dial in dials if dial != PLAIN), None)


def _same_answers(checkpoint: Checkpoint, dial: str) -> str:
    rows = [row for row in checkpoint.found.rows if row.dial == dial]
    items, same = sum(row.items for row in rows), sum(round(row.same_text * row.items) for row in rows)
    speed = sum(row.tokens_per_forward for row in rows) / len(rows)
    said = f"{dial} writes the same answers as one-token on {same:,} of {count(items, 'item')}"
    if same < items:
        compared = [row.against for row in rows if row.against]
        better, worse = sum(each.better for each in compared), sum(each.worse for each in compared)
        said += f", scores higher on {better:,} and lower on {worse:,}"
    return f"{said}, at {speed:.2f} tokens per forward"


def _how_fast(bench: Bench, dial: str) -> str:
    """At the smallest and the largest batch size; the fastest peer at the smallest."""
    whole = [row for row in bench.rows if row.category is None]
    mine = [row for row in whole if row.name == dial]
    ratios = {row.batch_size: row.ratio_to_one_token for row in mine}
    ends = [(size, ratios[size]) for size in sorted({min(ratios), max(ratios)})]
    times = [
        f"{ratio:.2f} times as fast{' (slower)' * (ratio < 0.995)} at {count(size, 'request')}" for size, ratio in ends
    ]
    said = f"Compared with one-token on {bench.provenance.machine}, {dial} is {_and(times)}"
    if answers := sum(row.requests for row in mine):
        same = sum(round(row.same_text * row.requests) for row in mine)
        said += f", with the same text in {same:,} of {count(answers, 'answer')}"
    if peers := [row for row in whole if row.peer and row.batch_size == min(ratios)]:
        best = max(peers, key=lambda row: row.tokens_per_second)
        who = f"the fastest peer at {count(best.batch_size, 'request')}, {best.name},"
        said += f"; {who} is {best.ratio_to_one_token:.2f} times as fast"
    return said


def _findings(sources: Sources) -> Iterator[str]:
    """All that can be said in sentences."""
    whole = {each.label: {score.dial: score for score in each.scores()} for each in sources.checkpoints}
    plain = [f"{_percent(scores[PLAIN])} for {label}" for label, scores in whole.items() if PLAIN in scores]
    if plain:
        of = f"average of {len(sources.tasks)} tasks" if sources.has_averages else f"score on {_task(sources.tasks[0])}"
        yield f"One token per forward, the {of} is {_and(plain)}."
    for each in sources.checkpoints:
        scores = whole[each.label]
        said = []
        if EXACT in scores:
            rows = [row for row in each.found.rows if row.dial == EXACT]
            same, items = sum(round(row.same_text * row.items) for row in rows), sum(row.items for row in rows)
            told = f"exact writes {scores[EXACT].tokens_per_forward:.2f} tokens per forward on average over "
            told += count(len(rows), "task")
            if each.found.plan.dials[0] == PLAIN:  # whose answers the others are compared with
                told += f", with the same answers on {same:,} of {items:,} items"
            said.append(told)
        fastest = max(scores.values(), key=lambda score: score.tokens_per_forward, default=None)
        if fastest and fastest.dial not in (PLAIN, EXACT):
            speed = f"{fastest.tokens_per_forward:.2f} tokens per forward"
            said.append(f"{fastest.dial} writes the most, {speed}, at {_percent(fastest)}")
        if said:
            yield f"{each.label}: {'; '.join(said)}."
    for _, bench in sources.benches:
        yield from _speed_summary(bench)


def _speed_summary(bench: Bench) -> Iterator[str]:
    """``exact`` and the fastest peer at the smallest and the largest batch size; kinds of prompt at the smallest."""
    where = f"{bench.model} on {bench.provenance.machine}"
    sizes = sorted({row.batch_size for row in bench.rows})
    ends = list(dict.fromkeys((sizes[0], sizes[-1])))
    whole = {(row.name, row.batch_size): row for row in bench.rows if row.category is None}
    mine = [whole[EXACT, size] for size in ends if (EXACT, size) in whole]
    peers = [row for row in whole.values() if row.peer and row.batch_size == ends[0]]
    if mine:
        rates = [_rate(row.tokens_per_second) for row in mine]
        ratios = [f"{row.ratio_to_one_token:.2f}" for row in mine]
        said = f"exact writes {_and(rates)} tokens per second, {_and(ratios)} times one-token's"
        if peers:
            best = max(peers, key=lambda row: row.tokens_per_second).name
            rates = [_rate(whole[best, size].tokens_per_second) for size in ends if (best, size) in whole]
            said += f"; the fastest peer, {best}, writes {_and(rates)}"
        sizes_told = _and([*(f"{size:,}" for size in ends[:-1]), count(ends[-1], "request")])
        yield f"{where}, {sizes_told} at once: {said}."
    kinds = [row for row in bench.rows if row.category and (row.name, row.batch_size) == (EXACT, ends[0])]
    if kinds:
        kinds.sort(key=lambda row: row.ratio_to_one_token)
        low, high = (f"{row.ratio_to_one_token:.2f} ({row.category})" for row in (kinds[0], kinds[-1]))
        asked = f"{count(len(kinds), 'kind')} of prompt, {count(ends[0], 'request')} at once"
        yield f"{where}, {asked}: exact is {low} to {high} times as fast as one-token."


def _percent(score: Score) -> str:
    return f"{100 * score.score:.1f}\N{NO-BREAK SPACE}%"


def _and(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
