"""Render the tables of docs/paper.md: the paper's figures, from benchmarks/paper.yaml, beside ours, from results/.

python benchmarks/render_paper.py            # or: make results
python benchmarks/render_paper.py --check    # writes nothing; exits with 1 if the page is stale
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from render_results import CHANCE, ROOT, TASKS, TITLES, Read, Table, find, times, update

PAPER: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text(encoding="utf-8"))
MODELS = {"SmolLM2": "smollm2-135m", "Qwen": "qwen2.5-coder-0.5b"}
OURS = {"base": "base", "AR SFT": "ar-sft", "the paper's losses": "paper", "ours, merged": "ours"}
SWEEP = "eval-smollm2-135m-gated-thresholds"


def one_token(read: Read) -> Table:
    def line(name: str, scores: list[float], average: str) -> list[str]:
        cells = [f"{each:.1f}{' †' * (each < CHANCE.get(task, 0))}" for task, each in zip(TASKS, scores, strict=True)]
        return [name, *cells, average]

    def ours(model: str, name: str) -> list[str]:
        found = read(f"eval-{MODELS[model]}-{OURS[name]}")
        average = find(found["averages"], dial="one-token")
        scores = [100 * find(found["rows"], task=task, dial="one-token")["score"] for task in TASKS]
        error = 50 * (average["high"] - average["low"])
        return line(f"{model}, {name}", scores, f"{100 * average['score']:.1f} ± {error:.1f}")

    theirs = [line(f"*paper, {name}*", scores, f"{mean(scores):.1f}") for name, scores in PAPER["one_token"].items()]
    return [["", *TITLES, "average"], *theirs, *(ours(model, name) for model in MODELS for name in OURS)]


def threshold(read: Read) -> Table:
    def line(name: str, changes: list[float], tokens: list[float]) -> list[str]:
        cells = [f"{change:+.1f} ({each:.2f})" for change, each in zip(changes, tokens, strict=True)]
        return [name, *cells, f"{mean(changes):+.1f} ({mean(tokens):.2f})"]

    def ours(model: str) -> list[str]:
        rows = read(f"eval-{MODELS[model]}-paper")["rows"]
        pairs = [[find(rows, task=task, dial=dial) for dial in ("one-token", "threshold=0.95")] for task in TASKS]
        changes = [100 * (loose["score"] - strict["score"]) for strict, loose in pairs]
        return line(f"{model}, the paper's losses", changes, [loose["tokens_per_forward"] for _, loose in pairs])

    theirs = [line(f"*paper, {name}*", each["change"], each["tokens"]) for name, each in PAPER["threshold"].items()]
    return [["", *TITLES, "average"], *theirs, *map(ours, MODELS)]


def block_cache(read: Read) -> Table:
    rows = read("paper-decoders-h200")["rows"]

    def line(peer: str, paper: dict[int, float]) -> list[str]:
        name = peer.replace("=", " of ").replace("-", " ") if "=" in peer else "sliding window, no cache"
        found = {size: find(rows, peer=peer, batch_size=size)["tokens_per_second"] for size in (1, 8)}
        ours = [
            times(found[size] / find(rows, peer="transformers", batch_size=size)["tokens_per_second"], 2)
            for size in found
        ]
        return [name, *(times(each, 2) for each in paper.values()), *ours]

    head = ["", *(f"*paper, {size} at once*" for size in (4, 8, 16)), "ours, 1", "ours, 8"]
    return [head, *(line(*each) for each in PAPER["block_cache"].items())]


def sweep(read: Read) -> Table:
    """By τ: scores and tokens per forward of GSM8K, and of what the gated built-in model was asked."""
    qwen, gated = read("eval-qwen2.5-coder-0.5b-frontier")["rows"], read(SWEEP)["rows"]

    def cell(rows: list[Any], task: str, *dials: str) -> str:
        row = next((each for each in rows if each["task"] == task and each["dial"] in dials), None)
        return "" if row is None else f"{100 * row['score']:.1f} ({row['tokens_per_forward']:.2f})"

    def line(name: str, paper: list[float] | None, *dials: str) -> list[str]:
        theirs = "" if paper is None else f"{paper[0]:.1f} ({paper[1]:.2f})"
        return [name, theirs, cell(qwen, "gsm8k", *dials), *(cell(gated, task, *dials) for task in ("ifeval", "bbh"))]

    taus = [(f"threshold={tau:g}", PAPER["sweep"].get(tau)) for tau in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)]
    head = ["", "*paper, GSM8K*", "Qwen, ours merged, GSM8K", "built in, gated, IFEval", "BBH"]
    return [
        head,
        line("one-token", PAPER["sweep"][1.0], "one-token"),
        line("exact", None, "exact", "exact chain"),
        *(line(dial, paper, dial) for dial, paper in taus),
    ]


def confidence(read: Read) -> Table:
    rows = read(SWEEP)["rows"]

    def line(dial: str) -> list[str]:
        found = [find(rows, task=task, dial=dial) for task in ("ifeval", "bbh")]
        cells = [
            cell
            for row in found
            for cell in (f"{100 * row['score']:.1f}", f"{row['tokens_per_forward']:.2f}", f"{row['agreement']:.3f}")
        ]
        return [dial, *cells]

    dials = [each for each in dict.fromkeys(row["dial"] for row in rows) if each.startswith("threshold")]
    head = ["", "IFEval", "tokens per forward", "agreement", "BBH", "tokens per forward", "agreement"]
    measures = ("threshold=", "threshold:entropy", "threshold:margin")
    return [head, *(line(dial) for measure in measures for dial in dials if dial.startswith(measure))]


TABLES = {
    "one-token": one_token,
    "threshold": threshold,
    "block-cache": block_cache,
    "sweep": sweep,
    "confidence": confidence,
}

if __name__ == "__main__":
    update(ROOT / "docs" / "paper.md", TABLES)
