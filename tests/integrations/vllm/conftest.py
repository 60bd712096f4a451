"""The built-in model as a checkpoint that vLLM reads, and vLLM with and without the plugin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}

import pytest
import torch

from mars.models import Checkpoint, Settings, load_checkpoint, save_checkpoint
from mars.models.gated import GatedAdapter, layer_sizes
from tests.conftest import VOCABULARY, tiny_checkpoint

NEED_VLLM = ["test_asynchronous.py", "test_config.py", "test_engine.py", "test_plugin.py", "test_tiny.py"]
collect_ignore = [] if find_spec("vllm") else NEED_VLLM
MARS: dict[str, Any] = {"speculative_config": {"method": "mars"}}
SEQUENCES = 16


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    save_checkpoint(load_checkpoint("smollm2-135m", dtype="float32", device="cpu"), folder)
    return folder


def tiny() -> Checkpoint:
    """A random model whose heads can be shared out; so small a vocabulary that its masks guess right now and then."""
    return tiny_checkpoint("llama", hidden_size=128, intermediate_size=128, head_dim=32)


def tiny_gated() -> Checkpoint:
    """The same model with a random gated adapter and a Markov head."""
    base = tiny()
    torch.manual_seed(0)
    adapter = GatedAdapter(layer_sizes(base.module), 4, 128, VOCABULARY, 4).eval().requires_grad_(False)
    for weight in adapter.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    adapter.attach(base.module)
    return Checkpoint("tiny", base.module, base.tokenizer, Settings(VOCABULARY, 4), adapter)


@contextmanager
def engine(model: Path, **options: Any) -> Iterator[Any]:
    """vLLM in float32, with prompts read in pieces and the beginnings of prompts shared."""
    from vllm import LLM

    shared = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": SEQUENCES,
        "max_num_batched_tokens": 128,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    llm = LLM(model=str(model), **shared | options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
