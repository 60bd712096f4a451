"""What weights of fewer bits cost in quality on a CPU: loss on held-out text, and agreement with float32.

    python benchmarks/cpu_forms.py --texts gsm8k_test.jsonl [--count 64] [--out FILE.json]

The texts are questions and their reference answers, as chats, each read in one forward. Float32 through PyTorch is what
the others are compared with: the share of positions with the same argmax, and the mean KL divergence.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy

from mars.engine.cpu import CpuModel
from mars.engine.cpu.model import PAGE, CpuCache
from mars.engine.cpu.weights import FORMS
from mars.evaluation.provenance import collect
from mars.method.visibility import Visibility
from mars.models import load_checkpoint
from mars.models.attention import own_attention

MOST = 768  # tokens of a text


def with_compiled(model: CpuModel) -> Callable[[Tensor], Tensor]:
    pages = MOST // PAGE
    model.set_cache(CpuCache(model.shapes, pages + 1))
    table = torch.arange(1, pages + 1)[None]

    def logits(tokens: Tensor) -> Tensor:
        none = torch.zeros(len(tokens), 1, dtype=torch.long)
        where = (torch.zeros(len(tokens), dtype=torch.long), torch.arange(len(tokens)))
        return model.forward(tokens[:, None], Visibility(none, none, none, none), *where, table)

    return logits


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--texts", type=Path, required=True, help="JSON lines with question and answer")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()

    checkpoint = load_checkpoint(asked.model, device="cpu", dtype="float32")
    rows = [json.loads(line) for line in asked.texts.read_text().splitlines()[: asked.count]]
    texts = []
    for row in rows:
        answer = checkpoint.tokenizer(row["answer"], add_special_tokens=False)["input_ids"]
        texts.append(torch.tensor((checkpoint.encode(row["question"]) + answer)[:MOST]))
    models = {form: CpuModel(checkpoint, form) for form in FORMS}
    decoders = {form: with_compiled(model) for form, model in models.items()}
    sums = {form: torch.zeros(3, dtype=torch.float64) for form in ("PyTorch, float32", *FORMS)}
    positions = 0
    for tokens in texts:
        with own_attention(checkpoint.module) as module:
            known = module(tokens[None]).logits[0, :-1].log_softmax(1)
        positions += len(known)
        for form, total in sums.items():
            found = known if form.startswith("PyTorch") else decoders[form](tokens)[:-1].log_softmax(1)  # type: ignore[index]
            same = (found.argmax(1) == known.argmax(1)).sum()
            divergence = (known.exp() * (known - found)).sum()
            sums[form] = (
                total + torch.stack([cross_entropy(found, tokens[1:], reduction="sum"), same, divergence]).double()
            )
    results = [
        {
            "form": form,
            "weight_bytes": models[form].weight_bytes if form in models else 4 * checkpoint.module.num_parameters(),
            **dict(zip(("loss", "same_argmax", "kl"), (total / positions).tolist(), strict=True)),
        }
        for form, total in sums.items()
    ]
    table = Table("form", "MB of weights", "loss", "same argmax", "KL")
    for each in results:
        numbers = (
            f"{each['weight_bytes'] / 1e6:.0f}",
            f"{each['loss']:.4f}",
            f"{each['same_argmax']:.4f}",
            f"{each['kl']:.5f}",
        )
        table.add_row(str(each["form"]), *numbers)
    Console().print(table)
    if asked.out is not None:
        facts = {"provenance": collect(), "texts": len(texts), "positions": positions, "rows": results}
        asked.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
