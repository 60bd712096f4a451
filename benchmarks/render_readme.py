"""Render README.md: its table and captions, and its figures, from the measurements in results/.

    python benchmarks/render_readme.py            # or: make results
    python benchmarks/render_readme.py --check    # writes nothing; exits with 1 if the text is stale

Figures go into docs/figures: ``engine-*.svg``, tokens per second over vLLM's by requests at once, and ``race-*.svg``,
one-token beside `exact` as recorded from the chat page, moving.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from race_picture import THEMES, finish, picture, slowed
from render_results import QWEN, ROOT, SIZES, Read, Table, find, times, update, whole

from mars.evaluation import plots

FIGURES = ROOT / "docs" / "figures"
SIDES = (("vLLM", {"peer": "vllm"}), ("one-token", {"dial": "one-token"}), ("exact", {"dial": "exact"}))
BAR = 0.27


def over_vllm(rows: Sequence[dict[str, Any]], axes: Any) -> None:
    """Bars by requests at once, vLLM's being 1; on each its tokens per second."""
    colours = {"vLLM": "C4", "one-token": "C0", "exact": "C1"}
    for number, (name, who) in enumerate(SIDES):
        for place, size in enumerate(SIZES):
            speed = _speed(rows, size, **who)
            ratio = speed / _speed(rows, size, peer="vllm")
            at = place + (number - 1) * BAR
            axes.bar(at, ratio, BAR * 0.92, color=colours[name], label=name if place == 0 else None)
            axes.annotate(f"{speed:,.0f}", (at, ratio), xytext=(0, 3), textcoords="offset points", ha="center", size=8)
    axes.set_xticks(range(len(SIZES)), [f"{size} request{'s' * (size > 1)}" for size in SIZES])
    axes.set(ylabel="tokens per second, vLLM = 1")
    axes.grid(visible=False, axis="x")
    axes.figure.set_size_inches(8.6, 3.1)


def draw(name: str, plot: plots.Plot) -> None:
    """Write a plot in both themes."""
    with tempfile.TemporaryDirectory() as scratch:
        for theme in plots.THEMES:
            svg, _ = plots.save(plot, Path(scratch) / f"{name}-{theme}", theme)
            shutil.copy(svg, FIGURES)


def models(read: Read) -> Table:
    """A column for each model that was converted: tokens per forward of `exact` by kind of text, speed, quality."""
    kinds = {
        "writing": ("writing",),
        "code": ("coding",),
        "sums": ("math_reasoning", "GSM8K"),  # the second name is that of transcribed files
        "summaries": ("summarization", "summaries"),
        "quoting": ("rag", "RAG"),
    }
    engine = read("engine-h200")["rows"]
    speeds = [find(engine, dial="exact", batch_size=size)["ratio_to_one_token"] for size in (1, 128)]
    frontier = read("eval-qwen2.5-coder-0.5b-frontier")["rows"]
    qwen, plain = (find(frontier, task="gsm8k", dial=dial)["tokens_per_second"] for dial in ("exact", "one-token"))
    scores = [
        find(read(f"eval-qwen2.5-coder-0.5b-{which}")["averages"], dial="one-token")["score"]
        for which in ("base", "ours")
    ]

    gated = read("conversion-smollm2-135m-gated")
    share = min(gated["dials"][f"exact {window}"]["all"]["same_as_one_token"] for window in ("chain", "tree"))
    identical = round(share * gated["requests"])

    def column(name: str, adapter: str, conversion: str, *others: str) -> list[str]:
        chain, tree = (read(conversion)["dials"][f"exact {window}"] for window in ("chain", "tree"))
        by_kind = [next(chain[name] for name in names if name in chain) for names in kinds.values()]
        quoting = read(conversion)["dials"].get("exact chain lookup=15", {}).get("all")
        figures = [*by_kind, chain["all"], quoting, tree["all"]]
        return [
            name,
            adapter,
            *("" if each is None else f"{each['tokens_per_forward']:.2f}" for each in figures),
            *others,
        ]

    writing, *others = kinds
    columns = [
        [
            "",
            "adapter",
            f"tokens per forward: {writing}",
            *(f"… {kind}" for kind in (*others, "all", "all, drafts from the text too", "all, windows as trees")),
            "speed over `one-token`",
            "quality",
        ],
        column(
            "SmolLM2-135M-Instruct, built in",
            "gated",
            "conversion-smollm2-135m-gated",
            f"{times(speeds[0])} at 1 request, {times(speeds[1])} at 128 ¹",
            f"the base model's: {identical} of {gated['requests']} answers identical ³",
        ),
        column(
            "Qwen2.5-Coder-0.5B-Instruct",
            "merged into the weights",
            QWEN,
            f"{times(qwen / plain)} at 128 requests ²",
            f"average of six benchmarks: {100 * scores[0]:.1f} before, {100 * scores[1]:.1f} after",
        ),
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def race_caption(read: Read) -> str:
    race = read("race-cpu")
    return _paragraph(
        f"""*A race recorded from the chat page and slowed down {slowed(race):.0f} times: the built-in model in bfloat16
        on {race["provenance"]["machine"]}, the faster of {len(race["ratios"])} turns on each side. {finish(race)}.*"""
    )


def opening(read: Read) -> str:
    """What it does, why it is safe and how fast it is."""
    rows = read("engine-h200")["rows"]
    over_one, over_vllm = (
        [_speed(rows, size, dial="exact") / _speed(rows, size, **other) for size in SIZES]
        for other in ({"dial": "one-token"}, {"peer": "vllm"})
    )
    return _paragraph(
        f"""Mask tokens behind the text draft the next tokens, and the next forward checks the drafts: with the setting
        `exact`, a draft is kept only if it is what the model itself writes there. On one H200, with an earlier adapter,
        this was {min(over_one):.1f} to {max(over_one):.1f} times as fast as one token at a time, and
        {min(over_vllm):.1f} to {max(over_vllm):.1f} times as fast as vLLM."""
    )


def bfloat16(read: Read) -> str:
    ties = read("near-ties-h200")
    return _paragraph(
        f"""In bfloat16 on a GPU the same text is not guaranteed yet: sums over several tokens have another order, and
        two tokens with nearly equal logits can change places. {ties["identical"]} of {ties["requests"]} answers were
        identical on an H200."""
    )


def ways(read: Read) -> str:
    """What each way of using it brings, as a list."""
    server, plugin = read("serving-speed-h200")["found"], read("vllm-plugin-h200")["rows"]
    served = server["mars serve"]["tokens_per_second"] / server["vllm serve"]["tokens_per_second"]
    inside = [
        find(plugin, variant="mars", requests=size)["tokens_per_second"]
        / find(plugin, variant="plain", requests=size)["tokens_per_second"]
        for size in SIZES
    ]
    cpu, later = (read(name)["rows"] for name in ("cpu-speed", "cpu-speed-load"))
    kinds = dict.fromkeys(row["kind"] for row in cpu)
    one, peer = (
        [find(cpu, kind=kind, decoder=decoder, requests=1, dial="one-token")["tokens_per_second"] for kind in kinds]
        for decoder in ("int8", "llama.cpp")
    )
    over_peer = [mine / theirs for mine, theirs in zip(one, peer, strict=True)]
    over_one = [find(later, kind=kind, requests=1, dial="exact")["ratio_to_one_token"] for kind in kinds]
    return (
        _paragraph(
            f"""- **A server** with OpenAI's API, JSON schemas, tool calls, a chat page and a dial that turns while it
            serves: {served:.1f} times the tokens per second of vLLM's server with 32 clients on one H200,
            with an earlier adapter. [Serving](docs/guides/serving.md)"""
        )
        + _paragraph(
            f"""- **Inside vLLM**, as a plugin: {min(inside):.1f} to {max(inside):.1f} times vLLM's own speed at 1 to
            {SIZES[-1]} requests on one H200, with an earlier adapter. [vLLM](docs/guides/vllm.md)"""
        )
        + _paragraph(
            f"""- **On a CPU**, through one C file compiled for your processor: {whole(min(one))} to {whole(max(one))}
            tokens per second on two cores, {min(over_peer):.1f} to {max(over_peer):.1f} times llama.cpp on the same
            file. In int8 single tokens are so cheap that `exact` gains little: {min(over_one):.2f} to
            {max(over_one):.2f} times one-token. [Results](docs/results.md#on-a-cpu)"""
        )
    )


def _speed(rows: Sequence[dict[str, Any]], size: int, **who: str) -> float:
    return float(find(rows, batch_size=size, **who)["tokens_per_second"])


def _paragraph(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(" ".join(text.split()), 120, subsequent_indent=indent, break_on_hyphens=False) + "\n"


BLOCKS: dict[str, Callable[[Read], str | Table]] = {
    "models": models,
    "opening": opening,
    "race": race_caption,
    "bfloat16": bfloat16,
    "ways": ways,
}


def draw_all() -> None:
    def read(name: str) -> Any:
        return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))

    draw("engine", partial(over_vllm, read("engine-h200")["rows"]))
    for theme in THEMES:
        (FIGURES / f"race-{theme}.svg").write_text(picture(read("race-cpu"), theme), encoding="utf-8")


if __name__ == "__main__":
    update(ROOT / "README.md", BLOCKS)
    if "--check" not in sys.argv:
        draw_all()
