"""Which windows `exact` takes on a CPU while other processes use its cores.

python benchmarks/contention.py [--model NAME] [--others 2] [--engines 6] [--answers 2] [--max-new-tokens 64]

The others compute for a fraction of a second and pause for another, all the time. Every engine is a new one, which
measures its costs anew. Prints how many steps of each answer had a window of which width, and the tokens per second.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter

import mars
from mars.core.request import Request
from mars.engine import Engine

OTHERS = """
import random, sys, time, torch
torch.set_num_threads(1)
matrix, draw = torch.ones(512, 512), random.Random(int(sys.argv[1]))
print("ready", flush=True)
while True:
    end = time.time() + draw.uniform(0.1, 0.5)
    while time.time() < end:
        matrix @ matrix
    time.sleep(draw.uniform(0.1, 0.5))
"""
PROMPT = "Write a Python function that checks whether a number is prime, then list the first forty prime numbers."


def answer(engine: Engine, request: Request) -> tuple[Counter[int], float]:
    """Steps by the width of their window, and tokens per second, of one answer."""
    sequence = engine.add_request(request)
    widths: Counter[int] = Counter()
    started = time.perf_counter()
    while not sequence.is_finished:
        fed, steps = engine.num_fed, engine.num_steps
        engine.step()
        if engine.num_steps > steps:
            widths[engine.num_fed - fed] += 1
    return widths, sequence.output.num_tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--others", type=int, default=2, help="other processes, a core each")
    parser.add_argument("--engines", type=int, default=6)
    parser.add_argument("--answers", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()

    model = mars.load(options.model, device="cpu")
    request = model.request(PROMPT, dial="exact", max_new_tokens=options.max_new_tokens, ignore_end=True)
    command = [sys.executable, "-c", OTHERS]
    others = [subprocess.Popen([*command, str(each)], stdout=subprocess.PIPE) for each in range(options.others)]
    try:
        for each in others:
            assert each.stdout is not None and each.stdout.readline()
        for number in range(options.engines):
            engine = Engine(model.checkpoint, memory=2**28)
            for _ in range(options.answers):
                widths, speed = answer(engine, request)
                steps = ", ".join(f"{steps} of width {width}" for width, steps in sorted(widths.items()))
                print(f"engine {number}: {speed:5.1f} tokens/s; steps: {steps}", flush=True)
    finally:
        for each in others:
            each.kill()
            each.wait()


if __name__ == "__main__":
    main()
