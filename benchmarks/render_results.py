"""Render the tables of docs/results.md from the measurements in results/.

    python benchmarks/render_results.py            # or: make results
    python benchmarks/render_results.py --check    # writes nothing; exits with 1 if the page is stale

A table stands behind its marker, ``<!-- table: NAME -->`` and a blank line. Files in results/ have the shape that the
script named in their provenance writes with ``--out``, so a new measurement replaces a file as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MARKERS = (  # with what stands behind them
    re.compile(r"(<!-- table: ([\w-]+) -->\n\n)(?:\|.*\n)*\n*"),
    re.compile(r"(<!-- text: ([\w-]+) -->\n\n)(?:.+\n)*\n*"),
)

Read = Callable[[str], Any]
"""Returns the content of a file in results/, by its name without ``.json``"""
Row = dict[str, Any]
Table = Sequence[Sequence[str]]
"""The header, then the rows"""

QWEN = "conversion-qwen2.5-coder-0.5b"
SIZES = (1, 8, 32, 128, 256)
CHANCE = {"mmlu_pro": 10, "gpqa": 25}  # percent, by guessing among ten and four choices
TASKS = ("ifeval", "bbh", "mmlu_pro", "gpqa", "gsm8k", "humaneval")
TITLES = ("IFEval", "BBH", "MMLU-Pro", "GPQA", "GSM8K", "HumanEval")


def find(rows: Sequence[Row], **wanted: object) -> Row:
    """The first row with these values."""
    for row in rows:
        if all(row.get(key) == value for key, value in wanted.items()):
            return row
    raise LookupError(f"no row with {wanted}")


def whole(number: float) -> str:
    return f"{number:,.0f}"


def times(ratio: float, digits: int = 1) -> str:
    return f"{ratio:.{digits}f} ×"


def conversion(read: Read) -> Table:
    gated, merged, ties = read("conversion-smollm2-135m-gated"), read("conversion-smollm2-135m"), read("near-ties-h200")
    others = [merged, read(QWEN), read(f"{QWEN}-kl-only")]

    def same(count: int, requests: int) -> str:
        return f"{count} of {requests}"

    def rows() -> Iterator[list[str]]:
        names = dict.fromkeys((*gated["dials"], *merged["dials"]))
        for name in sorted(names, key=lambda name: not name.startswith("exact")):
            if name == "one-token":
                continue
            row = [name.replace(" lookup=15", ", drafts from the text too").replace(" ", ", ", 1)]
            for found in (gated, *others):
                mine = found["dials"].get(name, {}).get("all")
                row += [f"{mine['tokens_per_forward']:.2f}", f"{mine['agreement']:.3f}"] if mine else ["", ""]
                if found in (gated, merged):
                    count = round(mine["same_as_one_token"] * found["requests"]) if mine else 0
                    row.append(same(count, found["requests"]) if mine else "")
            yield row
        yield ["exact, bfloat16", "", "", "", "", "", same(ties["identical"], ties["requests"]), *[""] * 4]

    figures = ["agreement", "answers equal to one-token's"]
    return [
        [
            "",
            "gated: tokens per forward",
            *figures,
            "merged",
            *figures,
            "Qwen",
            "agreement",
            "Qwen, KL alone",
            "agreement",
        ],
        *rows(),
    ]


def ar_cost(read: Read) -> Table:
    found = [read(name)["drift"] for name in ("conversion-smollm2-135m", QWEN, f"{QWEN}-kl-only")]
    lines = {
        "the base model's greedy answers": ("base_on_base", "model_on_base"),
        "answers of people and other models": ("base_on_texts", "model_on_texts"),
        "the base's loss on its own greedy answers → on the trained model's": ("base_on_base", "base_on_model"),
    }
    rows = [
        [name, *(f"{each[before]:.4g} → {each[after]:.4g}" for each in found)]
        for name, (before, after) in lines.items()
    ]
    return [["loss in nats per token, base → trained", "SmolLM2", "Qwen", "Qwen, KL alone"], *rows]


def engine(read: Read) -> Table:
    rows = read("engine-h200")["rows"]

    def line(size: int) -> list[str]:
        vllm = find(rows, peer="vllm", batch_size=size)["tokens_per_second"]
        one, exact, relaxed, threshold = (
            find(rows, dial=dial, batch_size=size) for dial in ("one-token", "exact", "relaxed=0.3", "threshold=0.95")
        )
        speeds = [row["tokens_per_second"] for row in (one, exact, relaxed, threshold)]
        return [
            *(str(size), whole(vllm), whole(speeds[0]), f"**{whole(speeds[1])}**", f"**{times(speeds[1] / vllm)}**"),
            *(times(exact["ratio_to_one_token"], 2), f"{exact['tokens_per_forward']:.2f}"),
            *map(whole, speeds[2:]),
        ]

    head = ["requests", "vLLM", "one-token", "exact", "over vLLM", "over one-token", "tokens per forward"]
    return [[*head, "relaxed=0.3, chain", "threshold=0.95"], *map(line, SIZES)]


def shape(read: Read) -> Table:
    ours, plugin = (read(f"{name}-7b-shape")["rows"] for name in ("engine-h200", "vllm-plugin-h200"))

    def line(size: int) -> list[str]:
        vllm, one, chain, two, tree = (
            find(ours, who=who, batch_size=size)
            for who in ("vllm", "one-token", "exact chain", "exact tree=2", "exact tree")
        )
        cells = [f"{vllm['ms_per_step']:.2f}", f"{one['ms_per_step']:.2f}", f"{one['bandwidth_share']:.0%}"]
        cells += [f"{chain['ms_per_step']:.2f} ({times(chain['ratio'], 2)})"]
        cells += [f"{each['ms_per_step']:.2f}" for each in (two, tree)]
        steps = {row["variant"]: row["ms_per_step"] for row in plugin if row["requests"] == size}
        for each in (steps[variant] for variant in ("mars", "all-kept") if variant in steps):
            cells.append(f"{each:.2f} ({times(each / steps['plain'], 2)})")
        return [str(size), *cells, *[""] * (8 - len(cells))]

    head = ["requests", "vLLM", "one-token", "of the copy bandwidth", "chain", "tree=2", "tree"]
    return [[*head, "plugin, exact", "plugin, threshold=0"], *map(line, (1, 4, 16, 64))]


def adapter(read: Read) -> Table:
    shapes = [read(f"adapter-speed-{name}")["rows"] for name in ("h200", "h200-7b")]

    def cells(rows: Sequence[Row], size: int, window: str) -> str:
        mine = [row for row in rows if (row["batch_size"], row["window"]) == (size, window)]
        return next(
            (f"{row['ms_per_step']:.2f} ({times(row['ratio'], 2)})" for row in mine if row["form"] != "merged"), ""
        )

    def line(size: int) -> list[str]:
        return [str(size), *(cells(rows, size, window) for rows in shapes for window in ("one-token", "chain"))]

    head = ["requests", "built-in, one-token", "chain", "7B shape, one-token", "chain"]
    return [head, *map(line, sorted({row["batch_size"] for row in shapes[0]}))]


def adapter_cpu(read: Read) -> Table:
    rows = [row for row in read("adapter-speed-cpu")["rows"] if row["form"] != "merged"]
    forms = list(dict.fromkeys(row["form"] for row in rows))

    def line(size: int) -> list[str]:
        found = [
            find(rows, batch_size=size, window=window, form=form) for form in forms for window in ("one-token", "chain")
        ]
        return [str(size), *(f"{row['ms_per_step']:.2f} ({times(row['ratio'], 2)})" for row in found)]

    head = ["requests", *(name for form in forms for name in (f"{form.removeprefix('gated, ')}, one-token", "chain"))]
    return [head, *map(line, sorted({row["batch_size"] for row in rows}))]


def decoders(read: Read) -> Table:
    rows = read("paper-decoders-h200")["rows"]
    named = {
        "engine, one-token": {"dial": "one-token"},
        "engine, exact": {"dial": "exact"},
        "vLLM": {"peer": "vllm"},
        "transformers `generate`": {"peer": "transformers"},
        "block cache of 32": {"peer": "block-cache=32"},
        "sliding window without a cache": {"peer": "sliding-window"},
    }

    def cells(row: Row) -> list[str]:
        milliseconds = row["ms_per_forward"]
        speed = [whole(row["tokens_per_second"]), f"{row['tokens_per_forward']:.2f}"]
        return [*speed, "" if milliseconds is None else f"{milliseconds:.1f}"]

    head = ["", "1 request: tokens/s", "per forward", "ms per forward", "8 requests: tokens/s", "per forward", "ms"]
    body = [
        [name, *(cell for size in (1, 8) for cell in cells(find(rows, batch_size=size, **who)))]
        for name, who in named.items()
    ]
    return [head, *body]


def vllm(read: Read) -> Table:
    rows = read("vllm-plugin-h200")["rows"]

    def line(size: int) -> list[str]:
        plain, sync, mars, one, ours = (
            find(rows, variant=variant, requests=size)["tokens_per_second"]
            for variant in ("plain", "plain-sync", "mars", "one-token", "engine")
        )
        return [
            *(str(size), whole(plain), whole(sync), f"**{whole(mars)}**", f"**{times(mars / plain)}**"),
            f"{find(rows, variant='mars', requests=size)['tokens_per_forward']:.2f}",
            *(whole(one), whole(ours), times(ours / plain)),
        ]

    head = ["requests", "plain", "plain, synchronous", "plugin, exact", "over plain", "tokens per forward"]
    return [[*head, "plugin, one-token", "our engine", "over plain"], *map(line, SIZES)]


def training(read: Read) -> Table:
    def line(name: str, found: Row) -> list[str]:
        ar, mars = (find(found["results"], stage=stage) for stage in ("ar", "mars"))
        speeds = [whole(each["clean_tokens_per_second"]) for each in (ar, mars)]
        memory = f"{ar['peak_gib']:.1f} → {mars['peak_gib']:.1f} GiB ({times(found['memory_ratio'], 2)})"
        return [name, *speeds, times(found["time_ratio"], 2), memory]

    head = ["", "clean tokens/s, AR", "clean tokens/s, MARS", "time per clean token", "peak memory, AR → MARS"]
    full, lora = read("training-speed-h200"), read("training-speed-h200-lora")
    return [head, line("all weights", full), line(f"LoRA, rank {lora['options']['lora']}", lora)]


def scores(read: Read) -> Table:
    wanted = (
        ("base", "base", "one-token"),
        ("AR SFT", "ar-sft", "one-token"),
        ("the paper's losses", "paper", "one-token"),
        ("ours", "ours", "one-token"),
        ("ours, exact", "ours", "exact"),
        ("ours, relaxed=0.3", "ours", "relaxed=0.3"),
    )

    def line(model: str, slug: str, name: str, which: str, dial: str) -> list[str]:
        found = read(f"eval-{slug}-{which}")
        average = find(found["averages"], dial=dial)
        percent = {task: 100 * find(found["rows"], dial=dial, task=task)["score"] for task in TASKS}
        cells = [f"{each:.1f}{' †' * (each < CHANCE.get(task, 0))}" for task, each in percent.items()]
        others = [each for task, each in percent.items() if task not in CHANCE]
        error = f" ± {50 * (average['high'] - average['low']):.1f}" if "low" in average else ""
        return [
            f"{model}, {name}",
            *cells,
            f"{100 * average['score']:.1f}{error}",
            f"{sum(others) / len(others):.1f}",
            f"{average['tokens_per_forward']:.2f}",
        ]

    head = ["", *TITLES, "average"]
    head += ["without MMLU-Pro and GPQA", "tokens per forward"]
    models = (("SmolLM2", "smollm2-135m"), ("Qwen", "qwen2.5-coder-0.5b"))
    return [head, *(line(*model, *each) for model in models for each in wanted)]


def same_answers(read: Read) -> Table:
    rows = read("same-answers-smollm2-135m")["rows"]

    def line(dial: str) -> list[str]:
        mine = [find(rows, task=task, dial=dial) for task in TASKS]
        return [dial, *(f"{row['identical']} of {row['items']}" for row in mine)]

    return [["", *TITLES], line("one-token"), line("exact")]


def server(read: Read) -> Table:
    found = read("serving-speed-h200")["found"]

    def line(title: str, name: str) -> list[str]:
        each = found[name]
        speed = each["tokens_per_second"]
        cells = [whole(speed), f"{speed / found['engine']['tokens_per_second']:.2f}"]
        for part in ("first_token", "per_token"):
            spread = each.get(part)
            cells.append("{p50_ms:g}, {p99_ms:g} ms".format(**spread) if spread else "")
        return [title, *cells]

    return [
        ["", "tokens/s", "of the engine", "first token, p50 and p99", "per token, p50 and p99"],
        line("the engine, called directly", "engine"),
        line("`mars serve`, `exact`", "mars serve"),
        line("`vllm serve`", "vllm serve"),
    ]


def ramp(read: Read) -> Table:
    def line(row: Row) -> list[str]:
        speeds, latencies = (
            [each[dial] for dial in ("one-token", "exact")] for each in (row["tokens_per_second"], row["p99_ms"])
        )
        return [
            str(row["requests"]),
            *map(whole, speeds),
            f"{row['ratio']:.2f}",
            f"{row['slowest_second']:.2f}",
            *map(str, latencies),
        ]

    head = ["requests", "one-token, tokens/s", "exact", "over one-token", "its slowest second over one-token's mean"]
    return [[*head, "ms per token, p99, one-token", "exact"], *map(line, read("serving-ramp-cpu")["rows"])]


def cpu(read: Read) -> Table:
    measured = read("cpu-speed")["rows"]
    one_token = ["PyTorch, float32", "PyTorch, bfloat16", "llama.cpp", "float32", "bfloat16", "int8"]

    def line(kind: str) -> list[str]:
        here = [row for row in measured if row["kind"] == kind and row["requests"] == 1]
        alone = [whole(find(here, decoder=name, dial="one-token")["tokens_per_second"]) for name in one_token]
        exact = find(here, decoder="int8", dial="exact")
        ratio, per_forward = times(exact["ratio_to_one_token"], 2), f"{exact['tokens_per_forward']:.2f}"
        return [kind, *alone, f"**{whole(exact['tokens_per_second'])}**", ratio, per_forward]

    header = [*one_token, "int8, exact", "over one-token", "tokens per forward"]
    return [["", *header], *(line(kind) for kind in dict.fromkeys(row["kind"] for row in measured))]


def cpu_load(read: Read, name: str) -> Table:
    measured = [row for row in read(name)["rows"] if row["decoder"] == "int8"]
    kinds = list(dict.fromkeys(row["kind"] for row in measured))

    def line(requests: int) -> list[str]:
        cells = []
        for kind in kinds:
            one, exact = (find(measured, kind=kind, requests=requests, dial=dial) for dial in ("one-token", "exact"))
            ratio = times(exact["ratio_to_one_token"], 2)
            cells.append(f"{whole(one['tokens_per_second'])} → {whole(exact['tokens_per_second'])} ({ratio})")
        return [str(requests), *cells]

    return [["requests", *kinds], *(line(size) for size in sorted({row["requests"] for row in measured}))]


def cpu_forms(read: Read) -> Table:
    return [
        ["", "MB of weights", "loss", "same argmax as float32", "KL to float32"],
        *(
            [
                row["form"],
                whole(row["weight_bytes"] / 1e6),
                f"{row['loss']:.4f}",
                f"{row['same_argmax']:.1%}",
                f"{abs(row['kl']):.4f}",
            ]
            for row in read("cpu-forms")["rows"]
        ),
    ]


TABLES: dict[str, Callable[[Read], Table]] = {
    "conversion": conversion,
    "ar-cost": ar_cost,
    "engine": engine,
    "shape": shape,
    "adapter": adapter,
    "decoders": decoders,
    "vllm": vllm,
    "training": training,
    "scores": scores,
    "same-answers": same_answers,
    "server": server,
    "ramp": ramp,
    "cpu": cpu,
    "cpu-load": partial(cpu_load, name="cpu-speed-load"),
    "cpu-slow-memory": partial(cpu_load, name="cpu-speed-slow-memory"),
    "cpu-forms": cpu_forms,
    "adapter-cpu": adapter_cpu,
}


def markdown(table: Table) -> str:
    head, *rows = table
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def render(page: str, results: Path, blocks: Mapping[str, Callable[[Read], str | Table]]) -> str:
    """The page with all its tables and rendered paragraphs made anew."""

    def read(name: str) -> Any:
        return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))

    def block(found: re.Match[str]) -> str:
        made = blocks[found[2]](read)
        return found[1] + (made if isinstance(made, str) else markdown(made)) + "\n"

    for marker in MARKERS:
        page = marker.sub(block, page)
    return page.rstrip("\n") + "\n"


def update(page: Path, blocks: Mapping[str, Callable[[Read], str | Table]]) -> None:
    """Render a page, or with ``--check`` exit with 1 if it is stale."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--page", type=Path, default=page)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is stale")
    args = parser.parse_args()
    old = args.page.read_text(encoding="utf-8")
    new = render(old, args.results, blocks)
    if not args.check:
        args.page.write_text(new, encoding="utf-8")
    elif new != old:
        stale = [line for line in new.splitlines() if line not in old.splitlines()]
        sys.exit("\n".join([f"{args.page} is stale; run `make results`. It should have:", *stale]))


if __name__ == "__main__":
    update(ROOT / "docs" / "results.md", TABLES)
