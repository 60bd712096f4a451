"""One-token and `exact` on a CPU in int8 and bfloat16; one-token in float32, through PyTorch, and in llama.cpp.

    python benchmarks/cpu_speed.py --prompts spec_bench.jsonl [--turns 3] [--max-new-tokens 128] [--out FILE.json]

All decoders are loaded at once and work in turns; the best of the turns counts for each. Within a turn, one-token and
`exact`, with drafts from the text and without, answer each prompt one after the other: a virtual machine may change its
speed in between. llama.cpp takes part if llama-cpp-python is installed: greedy, with the same prompts as tokens, on the
GGUF file that the model comes from. What `exact` has learnt of costs and chances is kept from turn to turn, as in a
server. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from mars import Engine
from mars.core.request import Request
from mars.engine.cpu import CpuRunner
from mars.engine.run import run
from mars.evaluation.peers import open_peer
from mars.evaluation.provenance import collect
from mars.evaluation.speed import copy_bandwidth
from mars.method.acceptance import Dial
from mars.models import load_checkpoint

CODE = [
    "Write a Python function that checks whether a number is prime.",
    "Write a Python class for a bank account with deposit and withdraw.",
    "Write HTML for a form with a name, an e-mail address and a button.",
    "Write a SQL query that counts the orders of each customer.",
]
LISTS = [
    "List the months of the year and the number of days of each.",
    "Count from 1 to 50.",
    "Write the multiplication table of 7.",
    "List the planets of the solar system, each with one fact.",
    "List the days of the week in English and in French.",
    "List ten European countries and their capitals.",
    "Write the alphabet, one letter per line.",
    "List the first twenty even numbers.",
]
MASKS_ALONE = "exact lookup=0"
CHATS = ("writing", "roleplay", "humanities", "stem")
OTHER_PAGES = 32  # pages of another size than the compiled step's: the engine runs through PyTorch


class Measured(NamedTuple):
    seconds: float
    tokens: int
    forwards: int
    texts: list[list[int]]

    def plus(self, more: Measured) -> Measured:
        sums = (self.seconds + more.seconds, self.tokens + more.tokens, self.forwards + more.forwards)
        return Measured(*sums, self.texts + more.texts)


Decode = Callable[[Sequence[list[int]], int, str], Measured]


def read_prompts(path: Path) -> dict[str, list[str]]:
    """First turns of Spec-Bench by kind, and the prompts of this file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by_category: dict[str, list[str]] = {}
    for row in rows:
        by_category.setdefault(row["category"], []).append(row["turns"][0])
    return {
        "chat": [prompt for category in CHATS for prompt in by_category[category][:2]],
        "code": CODE + by_category["coding"][:4],
        "lists": LISTS,
        "Spec-Bench": [row["turns"][0] for row in rows[:: len(rows) // 8]][:8],
    }


def with_engine(engine: Engine) -> Decode:
    def decode(prompts: Sequence[list[int]], max_new_tokens: int, dial: str) -> Measured:
        engine.clear_prefix_cache()
        block_size = engine.block_size
        name, *words = dial.split()
        requests = [
            Request(
                prompt=each,
                dial=Dial.parse(name),
                max_new_tokens=max_new_tokens,
                block_size=block_size,
                lookup=0 if words else None,
            )
            for each in prompts
        ]
        started = time.perf_counter()
        outputs = dict(run(engine, requests))
        seconds = time.perf_counter() - started
        answers = [outputs[number] for number in range(len(prompts))]
        texts = [answer.token_ids for answer in answers]
        return Measured(seconds, sum(map(len, texts)), sum(answer.forwards for answer in answers), texts)

    return decode


def in_turns(
    decode: Decode, prompts: list[list[int]], most: int, dials: Sequence[str], size: int
) -> dict[str, Measured]:
    """All prompts, ``size`` at once, with each of the dials."""
    measured = {dial: Measured(0.0, 0, 0, []) for dial in dials}
    for dial in dials:
        decode(prompts[:1], 4, dial)
    for first in range(0, len(prompts), size):
        for dial in dials:
            measured[dial] = measured[dial].plus(decode(prompts[first : first + size], most, dial))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench's questions, as JSON lines")
    parser.add_argument("--requests", default="1,2,4,8", help="at once, for the compiled step in int8")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()

    checkpoints = {
        form: load_checkpoint(asked.model, device="cpu", dtype=form) for form in ("float32", "bfloat16", "int8")
    }
    encode = checkpoints["float32"].encode
    prompts = {kind: [encode(each)[:700] for each in texts] for kind, texts in read_prompts(asked.prompts).items()}
    decoders: dict[str, Decode] = {}
    for form in ("float32", "bfloat16"):
        decoders[f"PyTorch, {form}"] = with_engine(Engine(checkpoints[form], page_size=OTHER_PAGES))
    engines = {form: Engine(checkpoint) for form, checkpoint in checkpoints.items()}
    for form, engine in engines.items():
        assert isinstance(engine._runner, CpuRunner), "the compiled step is needed"
        decoders[form] = with_engine(engine)
    sizes = [int(each) for each in asked.requests.split(",")]
    dials = ["one-token", "exact", MASKS_ALONE]
    cells = [("int8", dials, kind, size) for size in sizes for kind in prompts]
    cells += [("bfloat16", dials, kind, 1) for kind in prompts]
    cells += [(name, dials[:1], kind, 1) for name in decoders if name not in ("int8", "bfloat16") for kind in prompts]
    if find_spec("llama_cpp") is not None:
        with open_peer("llama.cpp", checkpoints["int8"], None, 1, 1024) as peer:

            def llama(asked_for: Sequence[list[int]], most: int, _dial: str) -> Measured:
                started = time.perf_counter()
                texts = [answer.token_ids for answer in peer.decode(asked_for, most).answers]
                tokens = sum(map(len, texts))
                return Measured(time.perf_counter() - started, tokens, tokens, texts)

            decoders["llama.cpp"] = llama
            cells += [("llama.cpp", dials[:1], kind, 1) for kind in prompts]

    best: dict[tuple[str, str, str, int], Measured] = {}
    turns: dict[tuple[str, str, str, int], list[float]] = {}
    bandwidths = []
    for _ in range(asked.turns):
        bandwidths.append(copy_bandwidth(checkpoints["int8"].device))
        for name, asked_dials, kind, size in cells:
            mine, most = prompts[kind], asked.max_new_tokens
            if name.startswith("PyTorch"):
                mine, most = mine[:4], most // 4  # it takes long
            for dial, measured in in_turns(decoders[name], mine, most, asked_dials, size).items():
                cell = (name, dial, kind, size)
                turns.setdefault(cell, []).append(measured.tokens / measured.seconds)
                if cell not in best or measured.seconds < best[cell].seconds:
                    best[cell] = measured
    rows = []
    for (name, dial, kind, size), measured in best.items():
        one = best[name, "one-token", kind, size]
        rows.append(
            {
                "decoder": name,
                "dial": dial,
                "kind": kind,
                "requests": size,
                "tokens_per_second": measured.tokens / measured.seconds,
                "ms_per_forward": 1000 * measured.seconds / measured.forwards * size,
                "tokens_per_forward": measured.tokens / measured.forwards,
                "ratio_to_one_token": measured.tokens / measured.seconds / (one.tokens / one.seconds),
                "ratio_by_turn": [
                    mine / other
                    for mine, other in zip(
                        turns[name, dial, kind, size], turns[name, "one-token", kind, size], strict=True
                    )
                ],
                "same_text": sum(a == b for a, b in zip(measured.texts, one.texts, strict=True)) / len(one.texts),
            }
        )
    facts = {
        "provenance": collect(),
        "copy_bytes_per_second": bandwidths,  # before each turn
        "weight_bytes": {form: engine.weight_bytes for form, engine in engines.items()},
        "rows": rows,
    }
    table = Table(
        "decoder", "dial", "kind", "requests", "tokens/s", "tokens per forward", "over one-token", "same text"
    )
    for row in rows:
        numbers = (row["tokens_per_second"], row["tokens_per_forward"], row["ratio_to_one_token"], row["same_text"])
        table.add_row(
            *(str(row[key]) for key in ("decoder", "dial", "kind", "requests")), *(f"{x:.2f}" for x in numbers)
        )
    Console().print(table)
    if asked.out is not None:
        asked.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
