"""What the method takes, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mars.errors import MarsError
from mars.integrations.vllm.launch import _checkpoint
from mars.models import save_checkpoint
from tests.integrations.vllm.conftest import tiny_gated


def config(model: Path, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    asked = {"speculative_config": {"method": "mars"}, "max_model_len": 256, "dtype": "float32", **options}
    return EngineArgs(model=str(model), **asked).create_engine_config()


def test_what_vllm_is_told(model: Path) -> None:
    found = config(model)
    assert found.speculative_config.num_speculative_tokens == 6
    told = found.additional_config["mars"]
    expected = {"mask": 49152, "masks": 3, "dial": "exact", "windows": {}, "measures": False, "adapter": str(model)}
    assert told == expected | {"adapter_revision": None, "adapter_digest": told["adapter_digest"]}


@pytest.fixture
def gated(tmp_path: Path) -> Path:
    save_checkpoint(tiny_gated(), tmp_path / "gated")
    return tmp_path / "gated"


def test_a_gated_adapter_in_the_checkpoint_or_beside_it(gated: Path, tmp_path: Path) -> None:
    found = config(gated)
    told = found.additional_config["mars"]
    assert (told["mask"], told["masks"], told["adapter"]) == (12, 3, str(gated))
    alone = tmp_path / "adapter"
    alone.mkdir()
    (gated / "mars").rename(alone / "mars")
    with pytest.raises(MarsError, match="no MARS settings"):
        config(gated)
    with pytest.raises(MarsError, match=r"is an adapter without its model: use --model tiny .*\"adapter\""):
        config(alone)
    apart = config(gated, speculative_config={"method": "mars", "adapter": str(alone)})
    assert apart.additional_config["mars"]["adapter"] == str(alone)
    assert apart.compute_hash() != found.compute_hash()  # their compiled code must not be mixed up
    assert _checkpoint(str(gated), str(alone), tmp_path) == (["--model", str(gated)], {"adapter": str(alone)})
    assert _checkpoint(str(alone), None, tmp_path) == (["--model", "tiny"], {"adapter": str(alone)})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"enable_lora": True}, "leave out --enable-lora"),
        ({"enable_dbo": True}, "leave out --enable-dbo"),
        ({"speculative_config": {"method": "mars", "adapter": "nowhere"}}, "no gated adapter in 'nowhere'"),
    ],
)
def test_what_gated_adapters_refuse(gated: Path, options: dict[str, Any], says: str) -> None:
    assert _checkpoint(str(gated), None, gated) == (["--model", str(gated)], {})
    with pytest.raises(MarsError, match=says):
        config(gated, **options)


def test_adapters_of_other_models_are_refused(gated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the weights as vLLM reads them."""
    from safetensors.torch import load_file, save_file
    from vllm import LLM

    weights = load_file(gated / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"] += 0.01
    save_file(weights, gated / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "enforce_eager": True}
    with pytest.raises(MarsError, match=r"belongs to tiny: the weights of this one are others"):
        LLM(str(gated), speculative_config={"method": "mars"}, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"speculative_config": {"method": "mars", "colour": 1}}, "has no 'colour' for mars"),
        ({"speculative_config": {"method": "mars", "masks": 6}}, "masks go from 1 to 5"),
        ({"speculative_config": {"method": "mars", "windows": 4}}, "windows must be"),
        ({"speculative_config": {"method": "mars", "windows": {"many": 1}}}, "windows must be"),
        ({"speculative_config": {"method": "mars", "dial": "sloppy"}}, "unknown dial"),
        ({"speculative_config": {"method": "mars", "dial": ["exact"]}}, "a dial is text"),
        ({"worker_extension_cls": "other.Extension"}, "--worker-extension-cls"),
        ({"pipeline_parallel_size": 2}, "use --tensor-parallel-size"),
    ],
)
def test_what_is_refused(model: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(MarsError, match=says):
        config(model, **options)


@pytest.mark.parametrize("dial", ["threshold:margin=0.5", "threshold:entropy=0.5"])
def test_every_measure_of_confidence_is_known(model: Path, dial: str) -> None:
    found = config(model, speculative_config={"method": "mars", "dial": dial})
    assert found.additional_config["mars"]["dial"] == dial


def test_a_model_that_was_not_trained(model: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(model, plain, ignore=shutil.ignore_patterns("mars"))
    with pytest.raises(MarsError, match="no MARS settings"):
        config(plain)


@pytest.mark.parametrize("version", ["0.23.1", "0.33.0", "1.0"])
def test_other_versions(version: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    with pytest.raises(MarsError, match=f"0.24 to 0.32, and this is {version}"):
        config(model)


def test_without_the_method_nothing_changes(model: Path) -> None:
    found = config(model, speculative_config=None)
    assert found.speculative_config is None and not found.additional_config


def asynchronous(model: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """What vLLM would be told on a GPU."""
    from vllm.engine.arg_utils import EngineArgs

    from mars.integrations.vllm import config as translation

    monkeypatch.setattr(translation, "_is_asynchronous", lambda _: True)
    monkeypatch.setenv(translation.RUNNER, "1")
    asked = EngineArgs(model=str(model), **{"speculative_config": {"method": "mars"}, **options})
    translation.translate(asked)
    return asked


def test_on_a_gpu_scheduling_is_asynchronous(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asynchronous(model, monkeypatch, max_num_seqs=20)
    assert asked.speculative_config == {"method": "ngram_gpu", "model": "mars", "num_speculative_tokens": 6}
    assert asked.scheduler_cls.endswith("AsyncMarsScheduler")
    told = asked.additional_config["mars"]
    assert (told["windows"], told["measures"]) == ({257: 1, 258: 0}, True)  # a small model has windows at any load
    assert asked.cudagraph_capture_sizes[:3] == [7, 14, 21]
    assert 140 in asked.cudagraph_capture_sizes and asked.cudagraph_capture_sizes[-1] >= 140 + 512
    assert all(size % 7 == 0 for size in asked.cudagraph_capture_sizes)


def test_windows_and_graphs_that_a_user_asks_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asynchronous(model, monkeypatch, speculative_config={"method": "mars", "windows": {"9": 0}})
    assert not asked.additional_config["mars"]["measures"]
    assert asked.cudagraph_capture_sizes[:6] == [7, 14, 21, 28, 42, 56]
    assert asked.cudagraph_capture_sizes[-1] > 512  # for single tokens, which all others have
    assert asynchronous(model, monkeypatch, max_cudagraph_capture_size=70).cudagraph_capture_sizes is None


def test_a_large_model_has_windows_for_fewer_sequences(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from transformers import Qwen2Config

    from mars.integrations.vllm.config import _most_sequences

    Qwen2Config(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, vocab_size=152064).save_pretrained(
        tmp_path
    )
    asked = SimpleNamespace(
        hf_config_path=None, model=str(tmp_path), revision=None, trust_remote_code=False, tensor_parallel_size=1
    )
    assert (_most_sequences(asked, 3), _most_sequences(asked, 1)) == (46, 107)
    asked.tensor_parallel_size = 4
    assert 46 < _most_sequences(asked, 3) < 256


@pytest.mark.parametrize(("version", "runs"), [("0.25.1", False), ("0.26.0", True)])
def test_older_versions_are_synchronous_with_sliding_windows(
    version: str, runs: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import MistralConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    from mars.integrations.vllm.config import _is_asynchronous

    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    monkeypatch.setattr("vllm.__version__", version)
    MistralConfig(sliding_window=4096).save_pretrained(tmp_path)
    assert _is_asynchronous(EngineArgs(model=str(tmp_path))) is runs
    assert not _is_asynchronous(EngineArgs(model=str(tmp_path), async_scheduling=False))
    assert _is_asynchronous(EngineArgs(model=str(model)))
