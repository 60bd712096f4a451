"""Two ranks write what one writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mars.models import save_checkpoint
from tests.conftest import MASK, VOCABULARY, tiny_checkpoint
from tests.integrations.vllm.conftest import MARS, SEQUENCES, engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose heads can be shared out; so small a vocabulary that its masks guess right now and then."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_checkpoint(tiny_checkpoint("llama", hidden_size=128, intermediate_size=128, head_dim=32), folder)
    return folder


def write(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    without_mask = [token for token in range(VOCABULARY) if token != MASK]
    params = SamplingParams(
        temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False, allowed_token_ids=without_mask
    )
    prompts = [{"prompt_token_ids": [(7 * n + 3 * k) % 10 for k in range(3 + n)]} for n in range(SEQUENCES)]
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]


def test_two_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # there may be fewer cores than ranks
    with engine(folder, max_model_len=128) as llm:
        expected = write(llm)
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(folder, max_model_len=128, **MARS, **two) as llm:
        assert write(llm) == expected
        first, second = llm.collective_rpc("mars_state")
        assert first == second and first["accepted"] > 20
        llm.collective_rpc("mars_turn", args=("one-token",))
        assert write(llm) == expected
        assert [each["dial"] for each in llm.collective_rpc("mars_state")] == ["one-token"] * 2
