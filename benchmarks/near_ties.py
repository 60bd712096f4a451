"""The tokens at which `exact` and one-token first differ in low precision, and how close their logits are.

    python benchmarks/near_ties.py --model smollm2-135m --prompts spec_bench.jsonl --batch-size 32 --out near_ties.json

In float32 the two give the same text. In bfloat16 the width of a window changes the order of summation, which can
change the argmax where two logits are almost equal. For every answer that differs, the script takes the first token
that does, and computes the gap between the two candidates' logits with the plain model, in this precision and in
float32. A unit is the distance between neighbouring bfloat16 numbers of the size of these logits; the error is the
difference between the gaps in the two precisions.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import median
from typing import Any

import torch

import mars
from mars.evaluation.plan import read_prompts
from mars.evaluation.provenance import collect
from mars.models import Checkpoint, load_checkpoint
from mars.models.attention import own_attention


@torch.inference_mode()
def logits_after(checkpoint: Checkpoint, tokens: list[int]) -> torch.Tensor:
    with own_attention(checkpoint.module) as model:
        return model(torch.tensor([tokens], device=checkpoint.device)).logits[0, -1].float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--requests", type=int, default=480)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = mars.load(args.model, dtype=args.dtype, max_num_seqs=args.batch_size)
    checkpoint, context = model.checkpoint, model.checkpoint.context or 10**9
    encoded = [checkpoint.encode(each) for each in read_prompts(args.prompts)]
    prompts = [each for each in encoded if len(each) + args.max_new_tokens <= context][: args.requests]
    plain, exact = (
        model.generate(prompts, dial=dial, max_new_tokens=args.max_new_tokens) for dial in ("one-token", "exact")
    )
    precise = load_checkpoint(args.model, dtype="float32")
    ties: list[dict[str, Any]] = []
    for prompt, one, other in zip(prompts, plain, exact, strict=True):
        if one.token_ids == other.token_ids:
            continue
        both = zip(one.token_ids, other.token_ids, strict=False)
        position = next(index for index, (mine, theirs) in enumerate(both) if mine != theirs)
        text, candidates = prompt + one.token_ids[:position], [one.token_ids[position], other.token_ids[position]]
        low, high = (logits_after(each, text) for each in (checkpoint, precise))
        gaps = [(each[candidates[0]] - each[candidates[1]]).item() for each in (low, high)]
        unit = 2.0 ** (math.floor(math.log2(low[candidates].abs().max().item())) - 7)
        probabilities = high.softmax(0)
        ties.append(
            {
                "place": position,
                "candidates": candidates,
                "gap_in_units": abs(gaps[0]) / unit,
                "gap_in_float32": abs(gaps[1]),
                "error": abs(gaps[0] - gaps[1]),
                "ranks_in_float32": [int((high > high[each]).sum()) for each in candidates],
                "probabilities_in_float32": [probabilities[each].item() for each in candidates],
            }
        )
    facts = {
        "requests": len(prompts),
        "identical": len(prompts) - len(ties),
        "identical_share": 1 - len(ties) / len(prompts),
        "largest_gap_in_units": max((tie["gap_in_units"] for tie in ties), default=0.0),
        "largest_gap_in_float32": max((tie["gap_in_float32"] for tie in ties), default=0.0),
        "median_gap_in_float32": median(tie["gap_in_float32"] for tie in ties) if ties else 0.0,
        "median_error": median(tie["error"] for tie in ties) if ties else 0.0,
        "both_among_the_best_two": sum(max(tie["ranks_in_float32"]) <= 1 for tie in ties),
        "tokens_per_forward": sum(each.num_tokens for each in exact) / sum(each.forwards for each in exact),
    }
    print(json.dumps(facts, indent=2))
    args.out.write_text(json.dumps(facts | {"provenance": collect(), "ties": ties}, indent=2) + "\n")


if __name__ == "__main__":
    main()
