"""Time of a step for a model of a given shape with random weights, in our engine and in vLLM.

    python benchmarks/model_shapes.py --tokenizer FOLDER --batch-sizes 1,4,16,64 --out shapes.json

The output is random, so acceptance is not measured: one-token, chain and tree are timed by the time per forward of the
median request. vLLM is measured with the same shape, prompts and lengths if it is installed.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.initialization import no_init_weights

from mars import Model
from mars.engine import memory_for
from mars.evaluation.peers import open_vllm
from mars.evaluation.provenance import collect
from mars.evaluation.speed import Traffic
from mars.models import Checkpoint, Settings

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "qwen2",
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
    },
}
WAYS = (("one-token", None), ("exact", "chain"), ("exact", "tree=2"), ("exact", "tree"))
PROMPT_TOKENS = 64


def random_model(shape: dict[str, Any], device: str) -> PreTrainedModel:
    config = AutoConfig.for_model(**shape)
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02) if parameter.ndim > 1 else parameter.data.fill_(1.0)
    return model.eval().requires_grad_(False)


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    chosen = random.Random(0)
    return [[chosen.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def step_ms(times: Sequence[list[float]], steps: Sequence[int]) -> float:
    """Milliseconds between two forwards, from the times of the first and the last tokens."""
    return 1000 * median((each[-1] - each[0]) / (count - 1) for each, count in zip(times, steps, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--tokenizer", required=True, help="any; its tokens mean nothing here")
    parser.add_argument("--batch-sizes", default="1,4,16,64")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--vllm", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sizes = [int(each) for each in args.batch_sizes.split(",")]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = random_model(SHAPES[args.shape], device)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    module.generation_config.eos_token_id = tokenizer.eos_token_id = None
    checkpoint = Checkpoint(args.shape, module, tokenizer, Settings(5, block_size=4, dial="exact"))
    length = PROMPT_TOKENS + args.new_tokens
    traffic = Traffic.of(checkpoint)
    rows: list[dict[str, Any]] = []

    def note(name: str, size: int, ms: float) -> None:
        base = next((row["ms_per_step"] for row in rows if row["batch_size"] == size), ms)
        read = traffic.weights + size * (length - args.new_tokens // 2) * traffic.per_token
        share = read / (ms / 1000) / traffic.bandwidth
        rows.append({"who": name, "batch_size": size, "ms_per_step": ms, "bandwidth_share": share, "ratio": ms / base})
        print(
            f"{name:20} {size:4} requests {ms:8.3f} ms  {ms / base:.3f}x one-token  {share:.0%} of the bandwidth",
            flush=True,
        )

    model = Model(checkpoint, max_num_seqs=max(sizes), memory=memory_for(checkpoint, max(sizes), length))
    for size in sizes:
        for dial, window in WAYS:
            for _ in range(2):  # the first one captures CUDA graphs
                asked = prompts(size, module.config.vocab_size)
                model.engine().clear_prefix_cache()
                answers = model.generate(asked, dial=dial, window=window, max_new_tokens=args.new_tokens)
            note(
                f"{dial} {window or ''}".strip(),
                size,
                step_ms([a.times for a in answers], [len(a.steps) for a in answers]),
            )

    if args.vllm:
        with tempfile.TemporaryDirectory() as folder:
            module.config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            with open_vllm(checkpoint, folder, max(sizes), length + 1, load_format="dummy") as decode:
                for size in sizes:
                    for _ in range(2):
                        answers = decode(prompts(size, module.config.vocab_size), args.new_tokens).answers
                    note("vllm", size, step_ms([a.times for a in answers], [a.num_tokens for a in answers]))
    facts = {"shape": args.shape, "provenance": collect(), "bandwidth_bytes_per_second": traffic.bandwidth}
    args.out.write_text(json.dumps(facts | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
