"""What windows would bring on another machine: the engine decodes on a CPU, and a clock goes by that machine's steps.

    python benchmarks/replay_load.py --steps results/engine-h200-7b-shape.json --prompts spec_bench.jsonl.gz --out FILE

``--steps`` has milliseconds by requests and window; between and beyond its sizes they lie on straight lines over the
number of tokens. Drafts, acceptance and the policy's choices are real, the time of the host is left out. Counted are
steps in which nearly all requests run. Answers go on behind their end, so that the load stays what it is.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from conversion import read_prompts

import mars
from mars.core.request import Request
from mars.engine import Engine, run
from mars.engine.cuda_graphs import padded_size
from mars.engine.policy import CostPoint, interpolate
from mars.engine.step import StepInputs, StepOutputs
from mars.evaluation.provenance import collect
from mars.method.acceptance import Dial
from mars.method.windows import Window
from mars.models import Checkpoint

SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "one-token": ("one-token", {}),
    "exact": ("exact", {}),
    "exact, candidates": ("exact", {"candidates": 9}),
    "exact, ragged": ("exact", {"ragged": True}),
}
MEASURED_BLOCK = 4  # the block size of the windows in ``--steps``
NEARLY_ALL = 0.9  # of the requests


def read_steps(path: Path) -> list[CostPoint]:
    """Seconds of a step by tokens."""
    windows = {f"exact {each}": each for each in (Window.of(n, MEASURED_BLOCK) for n in (1, 2, MEASURED_BLOCK))}
    windows["one-token"] = Window()
    rows = [row for row in json.loads(path.read_text())["rows"] if row["who"] in windows]
    seconds = {windows[row["who"]].tokens(row["batch_size"]): row["ms_per_step"] / 1000 for row in rows}
    return [CostPoint(*each) for each in sorted(seconds.items())]


def replay(
    checkpoint: Checkpoint, points: list[CostPoint], prompts: list[list[int]], side: str, new_tokens: int
) -> dict[str, Any]:
    """Decode all prompts at once."""
    count, (dial, options) = len(prompts), SIDES[side]

    def cost(num_seqs: int, window: Window) -> float:
        return interpolate(points, window.tokens(padded_size(num_seqs)))

    engine = Engine(checkpoint, max_num_seqs=count, memory=4 * 2**30, async_steps=1, cost=cost, **options)
    step, sums, windows = engine._runner.step, {"seconds": 0.0, "tokens": 0, "forwards": 0}, dict[str, int]()

    def timed(inputs: StepInputs, window: Window, longest: int) -> StepOutputs:
        outputs = step(inputs, window, longest)
        if len(inputs) >= NEARLY_ALL * count:
            sums["seconds"] += cost(len(inputs), window)
            sums["tokens"] += len(inputs) + int(outputs.decisions[:, 0].sum())
            sums["forwards"] += len(inputs)
            name = "ragged" if window.budget else f"{window} of {window.masks + 1}" if window.masks else str(window)
            windows[name] = windows.get(name, 0) + 1
        return outputs

    engine._runner.step = timed  # type: ignore[method-assign]
    requests = [
        Request(each, Dial.parse(dial), max_new_tokens=new_tokens, block_size=engine.block_size, ignore_end=True)
        for each in prompts
    ]
    for _ in run(engine, requests):
        pass
    return {
        "requests": count,
        "who": side,
        "tokens_per_second": sums["tokens"] / sums["seconds"],
        "tokens_per_forward": sums["tokens"] / sums["forwards"],
        "windows": windows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--requests", default="1,16,32,64,128")
    parser.add_argument("--sides", default=";".join(SIDES))
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--longest", type=int, default=512, help="leave out prompts of more tokens")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    checkpoint = mars.load(args.model, dtype="bfloat16").checkpoint
    every, _ = read_prompts([args.prompts], None)
    known = [tokens for each in every if len(tokens := checkpoint.encode(each)) <= args.longest]
    points, rows = read_steps(args.steps), list[dict[str, Any]]()
    for count in map(int, args.requests.split(",")):
        spread = known[:: max(1, len(known) // count)][:count]
        for side in args.sides.split(";"):
            rows.append(replay(checkpoint, points, spread, side, args.new_tokens))
            rows[-1]["ratio"] = rows[-1]["tokens_per_second"] / next(
                row["tokens_per_second"] for row in rows if row["requests"] == count
            )
            print({name: round(each, 3) if isinstance(each, float) else each for name, each in rows[-1].items()})
    if args.out:
        options = {key: str(value) for key, value in vars(args).items()}
        args.out.write_text(json.dumps({"options": options, "rows": rows, "provenance": collect()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
