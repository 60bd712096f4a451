"""Dials and baselines side by side on the same prompts: tokens per forward, agreement, tokens per second.

    python benchmarks/compare_decoders.py [--model NAME] [--prompts N] [--max-new-tokens N] [--out FILE.json]

One-token is the reference: the last column says for how many prompts the text is the same.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

import mars
from mars import Model, RequestOutput
from mars.core.request import Request
from mars.evaluation.provenance import collect
from mars.reference import (
    Decoder,
    block_cache,
    draft_model,
    jacobi,
    paper_block_cache,
    paper_jacobi,
    sliding_window,
)

PROMPTS = [
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "Natalia sold 48 clips in April and half as many in May. How many did she sell in all?",
    "List the planets of the solar system.",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "Translate into French: The weather is nice today.",
    "Give three tips for sleeping well.",
    "What is the difference between a virus and a bacterium?",
]
Runner = Callable[[Model, list[Request]], list[RequestOutput]]


def with_dial(dial: str, window: str = "chain") -> Runner:
    def run(model: Model, requests: list[Request]) -> list[RequestOutput]:
        turned = [model.request(r.prompt, dial=dial, window=window, max_new_tokens=r.max_new_tokens) for r in requests]
        return [Decoder(model.checkpoint, [request]).finish()[0] for request in turned]

    return run


def with_threshold(decoder: Runner) -> Runner:
    """Run a baseline under the paper's threshold of 0.95."""

    def run(model: Model, requests: list[Request]) -> list[RequestOutput]:
        return decoder(
            model,
            [model.request(r.prompt, dial="threshold=0.95", max_new_tokens=r.max_new_tokens) for r in requests],
        )

    return run


RUNNERS: dict[str, Runner] = {
    "one-token": with_dial("one-token"),
    "exact, chain": with_dial("exact"),
    "exact, tree=2": with_dial("exact", "tree=2"),
    "exact, tree": with_dial("exact", "tree"),
    "relaxed=0.3": with_dial("relaxed=0.3"),
    "threshold=0.95": with_dial("threshold=0.95"),
    "sliding window, no cache, τ=0.95": with_threshold(
        lambda model, requests: [sliding_window(model.checkpoint, request) for request in requests]
    ),
    "block cache of 16, batch, τ=0.95": with_threshold(
        lambda model, requests: block_cache(model.checkpoint, requests, 16)
    ),
    "block cache of 16 as in the paper's scripts": with_threshold(
        lambda model, requests: paper_block_cache(model.checkpoint, requests, 16)
    ),
    "Jacobi": lambda model, requests: [jacobi(model.checkpoint, request) for request in requests],
    "Jacobi as in the paper's scripts": lambda model, requests: [
        paper_jacobi(model.checkpoint, request) for request in requests
    ],
    "draft model (itself)": lambda model, requests: [
        draft_model(model.checkpoint, model.checkpoint, request) for request in requests
    ],
    "draft model (itself), target masks": lambda model, requests: [
        draft_model(model.checkpoint, model.checkpoint, request, target_masks=True) for request in requests
    ],
    "draft model (itself), the paper's rule": with_threshold(
        lambda model, requests: [
            draft_model(model.checkpoint, model.checkpoint, request, target_masks=True) for request in requests
        ]
    ),
}


def summary(
    name: str, answers: list[RequestOutput], seconds: float, reference: list[RequestOutput]
) -> dict[str, object]:
    tokens = sum(answer.num_tokens for answer in answers)
    return {
        "decoder": name,
        "tokens_per_forward": tokens / sum(answer.forwards for answer in answers),
        "agreement": sum(answer.num_agreed for answer in answers) / sum(answer.num_verified for answer in answers),
        "tokens_per_second": tokens / seconds,
        "draft_forwards": sum(answer.draft_forwards for answer in answers),
        "same_text": sum(a.token_ids == b.token_ids for a, b in zip(answers, reference, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    model = mars.load(options.model)
    prompts = PROMPTS[: options.prompts]
    requests = [model.request(prompt, max_new_tokens=options.max_new_tokens) for prompt in prompts]
    model.generate(prompts[0], max_new_tokens=8)  # the first forwards of a process are slow
    rows: list[dict[str, object]] = []
    reference: list[RequestOutput] = []
    for name, run in track(RUNNERS.items(), "Decoding", console=Console(stderr=True)):
        start = time.perf_counter()
        answers = run(model, requests)
        reference = reference or answers
        rows.append(summary(name, answers, time.perf_counter() - start, reference))

    table = Table("decoder", "tokens/forward", "agreement", "tokens/s", "draft forwards", "same text")
    for row in rows:
        cells = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()]
        table.add_row(*cells)
    Console(width=120).print(table)
    if options.out:
        found = {"provenance": collect(), "prompts": prompts, "rows": rows}
        options.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
