"""Tiny random models of many families, and the real built-in model, shared by all tests."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

import mars
from mars.models import Checkpoint, Settings, save_checkpoint
from mars.models.gated import GatedAdapter, layer_sizes

VOCABULARY = 12
MASK, END = VOCABULARY - 1, VOCABULARY - 2
"""So small a vocabulary that random masks guess right now and then, and runs of every length are accepted."""

SMALL: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": END,
}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "phi": {},
    "gemma2": {"head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8, "layer_types": None},
    "mistral": {"sliding_window": 9},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "gpt_oss": {
        "head_dim": 8,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_neox": {"num_key_value_heads": None},
    "gpt2": {"num_key_value_heads": None, "intermediate_size": None},
}


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Ten letters, an end token and a mask."""
    vocabulary = {letter: index for index, letter in enumerate("abcdefghij")} | {"<end>": END, "<mask>": MASK}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", additional_special_tokens=["<mask>"])


def tiny_checkpoint(family: str, seed: int = 0, **changes: object) -> Checkpoint:
    """A random model with weights large enough that its greedy text is not a constant."""
    torch.manual_seed(seed)
    options = SMALL | FAMILIES.get(family, {}) | changes
    config = AutoConfig.for_model(family, **{key: value for key, value in options.items() if value is not None})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.35)
    return Checkpoint(family, model, tiny_tokenizer(), Settings(MASK, block_size=4, dial="exact"))


def gated_checkpoint(
    family: str,
    dtype: torch.dtype = torch.float32,
    rank: int = 4,
    markov: int = 4,
    seed: int = 0,
    **changes: object,
) -> Checkpoint:
    """A tiny model with a random adapter."""
    base = tiny_checkpoint(family, **changes)
    module = base.module.to(dtype)
    torch.manual_seed(seed)
    rows, hidden = module.get_input_embeddings().weight.shape
    adapter = GatedAdapter(layer_sizes(module), rank, hidden, rows, markov).to(dtype)
    for weight in adapter.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    adapter.eval().requires_grad_(False).attach(module)
    return Checkpoint(base.name, module, base.tokenizer, Settings(rows, 4), adapter)


@pytest.fixture(scope="session")
def smollm() -> mars.Model:
    return mars.load("smollm2-135m", device="cpu", dtype="float32")


CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<end>{% endif %}{% endfor %}"


def save_chat_model(
    folder: Path, *, trained: bool, family: str = "llama", template: str = CHAT_TEMPLATE, **changes: object
) -> Path:
    """A random model that knows ten letters; ``trained``: it has settings as if it were."""
    checkpoint = tiny_checkpoint(family, **changes)
    checkpoint.tokenizer.chat_template = template
    checkpoint.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<end>|."), "isolated")
    save_checkpoint(checkpoint if trained else replace(checkpoint, settings=None), folder)
    return folder


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random model that was never trained."""
    return save_chat_model(tmp_path_factory.mktemp("models") / "tiny", trained=False)
