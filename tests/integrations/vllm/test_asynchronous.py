"""The asynchronous road: scheduled ahead, vLLM with the plugin writes what it writes without.

On a GPU where there is one, with vLLM's and our kernels interpreted where there is none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mars.models import save_checkpoint
from tests.conftest import tiny_checkpoint

SECONDS = 900
pytest.importorskip("triton")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_checkpoint(tiny_checkpoint("llama", hidden_size=128, intermediate_size=128, head_dim=32), folder)
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "tests.integrations.vllm.ahead", str(folder)]
    done = subprocess.run(command, cwd=root, env=os.environ, timeout=SECONDS, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("kind", ["one", "many", "penalties", "short", "long", "likelihoods", "seeded"])
@pytest.mark.parametrize("engine", ["mars", "windows"])
def test_the_same_text(told: dict[str, Any], engine: str, kind: str) -> None:
    """Near the end of the context, too; ``windows`` has fewer masks with more requests, and preempts."""
    assert told[engine][kind] == told["plain"][kind]


@pytest.mark.parametrize("engine", ["mars", "windows"])
def test_greedy_rows_need_no_sampler(told: dict[str, Any], engine: str) -> None:
    assert told[engine]["greedy"] == told["plain"]["many"]
    assert told[engine]["one-token"] == told["plain"]["many"][:4]


def test_the_scheduler_counts_what_the_device_counts(told: dict[str, Any]) -> None:
    for metrics, state in (("metrics", "state"), ("windows metrics", "windows state")):
        assert told[metrics]["accepted_tokens"] == pytest.approx(told[state]["accepted"], rel=0.05)
        assert told[metrics]["draft_tokens"] == pytest.approx(told[state]["drafts"], rel=0.05)
        assert told[state]["accepted"] == told[state]["agreed"] > 20
        assert told[state]["tokens"] == told[state]["forwards"] + told[state]["accepted"]


@pytest.mark.parametrize("dial", ["relaxed=0.1", "threshold=0.1"])
def test_looser_dials_write_faster(told: dict[str, Any], dial: str) -> None:
    assert told[dial]["text"] == told[dial]["sampler's text"]
    before, after = told[dial]["before"], told[dial]["after"]
    tokens, forwards = (after[name] - before[name] for name in ("tokens", "forwards"))
    assert tokens / forwards > before["tokens"] / before["forwards"]
    assert after["agreed"] - before["agreed"] < after["accepted"] - before["accepted"]
    assert told[dial]["metrics"]["draft_tokens"] == pytest.approx(after["drafts"] - before["drafts"], rel=0.25)


def test_a_prompt_that_is_known_brings_no_drafts(told: dict[str, Any]) -> None:
    """vLLM would pad it to a window's length, and a lenient dial would keep the padding."""
    assert told["known"][0] == told["known"][1]


def test_a_turned_dial_is_heard_by_all(told: dict[str, Any]) -> None:
    """Where nobody wants drafts, rows feed one token as they do without the plugin."""
    before, after = told["turned"]["before"], told["turned"]["after"]
    assert told["turned"]["text"] == told["plain"]["many"][: len(told["turned"]["text"])]
    assert after["tokens"] - before["tokens"] == after["forwards"] - before["forwards"]
    assert told["turned"]["metrics"]["drafts"] == 0


def test_sampling_has_the_same_distribution(told: dict[str, Any]) -> None:
    """Roughly, since few texts are drawn: of the commonest of them, neither way has many more."""
    mine, theirs = ({tuple(each[:-1]): each[-1] for each in told[name]} for name in ("mars sampled", "plain sampled"))
    common = sorted(mine.keys() | theirs.keys(), key=lambda text: -mine.get(text, 0) - theirs.get(text, 0))[:5]
    for text in common:
        assert abs(mine.get(text, 0) - theirs.get(text, 0)) < 4 * (mine.get(text, 0) + theirs.get(text, 0)) ** 0.5


def test_a_crowd_comes_and_goes(told: dict[str, Any]) -> None:
    assert told["crowd"]["finished"] == told["crowd"]["asked"]
    assert told["crowd"]["busy"] == [0, 0, 0]
    assert told["crowd"]["preempted"] > 0
