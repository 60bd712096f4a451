"""The asynchronous path: vLLM with the plugin generates what it generates without.

On a GPU where there is one, else with vLLM's and our kernels interpreted.
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
from tests.integrations.vllm.conftest import tiny, tiny_gated

SECONDS = 900
pytest.importorskip("triton")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """``mars`` has a gated adapter, and ``windows`` a trained model; the weights are the same."""
    folder = tmp_path_factory.mktemp("models")
    save_checkpoint(tiny(), folder / "trained")
    save_checkpoint(tiny_gated(), folder / "gated")
    root, names = Path(__file__).parents[3], (str(folder / "trained"), str(folder / "gated"))
    command = [sys.executable, "-m", "tests.integrations.vllm.asynchronous", *names]
    done = subprocess.run(command, cwd=root, env=os.environ, timeout=SECONDS, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("kind", ["one", "many", "penalties", "short", "long", "logprobs", "seeded"])
@pytest.mark.parametrize("engine", ["mars", "windows"])
def test_the_same_text(told: dict[str, Any], engine: str, kind: str) -> None:
    """Near the end of the context, too; ``windows`` has fewer masks with more requests, and preempts."""
    assert told[engine][kind] == told["plain"][kind]


@pytest.mark.parametrize(("engine", "kind"), [("mars", "greedy"), ("windows", "many")])
def test_greedy_sequences_take_the_argmax(told: dict[str, Any], engine: str, kind: str) -> None:
    """With a gated adapter that is the base model's; a trained model does not generate its mask."""
    assert told[engine]["greedy"] == told["plain"][kind]
    assert told[engine]["one-token"] == told["plain"][kind][:4]


def test_the_scheduler_counts_what_the_device_counts(told: dict[str, Any]) -> None:
    """But for the steps that were dispatched for requests before it was known that they had ended."""
    for metrics, state in (("metrics", "state"), ("windows metrics", "windows state")):
        assert told[metrics]["accepted_tokens"] == pytest.approx(told[state]["accepted"], rel=0.05, abs=4)
        assert told[metrics]["draft_tokens"] == pytest.approx(told[state]["drafts"], rel=0.05)
        assert told[state]["accepted"] == told[state]["agreed"] > 20
        assert told[state]["tokens"] == told[state]["forwards"] + told[state]["accepted"]


def test_the_scheduler_measures_steps(told: dict[str, Any]) -> None:
    """A step may have been dispatched for a sequence that had already ended, and writes nothing of it."""
    assert sum(count for count, _ in told["measured"]) > 20
    assert all(0.5 < tokens <= 4 for _, tokens in told["measured"])


@pytest.mark.parametrize("dial", ["relaxed=0.1", "threshold=0.1"])
def test_looser_dials_write_faster(told: dict[str, Any], dial: str) -> None:
    assert told[dial]["text"] == told[dial]["decided"]  # by the kernel, and by the plain version
    before, after = told[dial]["before"], told[dial]["after"]
    tokens, forwards = (after[name] - before[name] for name in ("tokens", "forwards"))
    assert tokens / forwards > before["tokens"] / before["forwards"]
    assert after["agreed"] - before["agreed"] < after["accepted"] - before["accepted"]
    assert told[dial]["metrics"]["draft_tokens"] == pytest.approx(after["drafts"] - before["drafts"], rel=0.25)


def test_a_cached_prompt_brings_no_drafts(told: dict[str, Any]) -> None:
    """vLLM would pad it to a window's length, and a lossy dial would accept the padding."""
    assert told["cached"][0] == told["cached"][1]


@pytest.mark.parametrize("kind", ["", "plain "])
def test_a_seed_gives_one_text_with_and_without_windows(told: dict[str, Any], kind: str) -> None:
    """At a temperature, with penalties and truncation, and at a load that has other windows."""
    texts = [told[name][f"{kind}{dial}"] for name in ("random", "windows random") for dial in ("exact", "one-token")]
    assert texts[1:] == texts[:-1]
    assert len({tuple(each) for each in texts[0]}) > 1


def test_no_dial_accepts_what_truncation_removes(told: dict[str, Any]) -> None:
    assert told["lossy"]["relaxed=0.000001"] == told["lossy"]["exact"] == told["lossy"]["one-token"]


def test_scheduler_and_workers_know_the_server_s_dial(told: dict[str, Any]) -> None:
    """If no request uses masks, sequences feed one token as they do without the plugin."""
    before, after = told["turned"]["before"], told["turned"]["after"]
    assert told["turned"]["text"] == told["plain"]["greedy"][: len(told["turned"]["text"])]
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
