"""A tiny model: two ranks, sampling, and a crowd that comes and goes."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import mars
from mars.models import save_checkpoint
from tests.integrations.vllm.conftest import MARS, SEQUENCES, engine, tiny, tiny_gated


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_checkpoint(tiny(), folder)
    return folder


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "gated"
    save_checkpoint(tiny_gated(), folder)
    return folder


PROMPTS = [[(7 * n + 3 * k) % 10 for k in range(3 + n)] for n in range(SEQUENCES)]


def write(llm: Any, **options: Any) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False, **options)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]


def write_by_grammar(llm: Any) -> list[int]:
    """A text that a grammar allows: masks are no tokens of it."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    structured = StructuredOutputsParams(regex="[a-d]{12}")
    params = SamplingParams(temperature=0.0, max_tokens=14, detokenize=False, structured_outputs=structured)
    return list(llm.generate([{"prompt_token_ids": PROMPTS[0]}], params, use_tqdm=False)[0].outputs[0].token_ids)


def test_two_ranks_with_a_gated_adapter(gated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is the base model's, and masks predict what they predict in our own engine."""
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.4}
    with engine(gated, max_model_len=128) as llm:
        expected, penalised = write(llm), write(llm, **penalties)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # there may be fewer cores than ranks
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(gated, max_model_len=128, **MARS, **two) as llm:
        assert write(llm) == expected
        first, second = llm.collective_rpc("mars_state")
        assert first == second and first["accepted"] > 20
        unverified = write(llm, extra_args={"dial": "threshold=0"})
        model = mars.load(gated, device="cpu", dtype="float32")
        after_one = [prompt + text[:1] for prompt, text in zip(PROMPTS, unverified, strict=True)]
        ours = model.generate(after_one, dial="threshold=0", window="chain", max_new_tokens=39, ignore_end=True)
        assert [each.token_ids for each in ours] == [text[1:] for text in unverified]  # no masks behind a prompt here
        assert write(llm, **penalties) == penalised
        llm.collective_rpc("mars_turn", args=("one-token",))
        assert write(llm) == expected
        assert [each["dial"] for each in llm.collective_rpc("mars_state")] == ["one-token"] * 2


def sampled(llm: Any) -> Counter[tuple[int, ...]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.7, max_tokens=8, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": [3, 1, 4, 1, 5]}] * 4000, params, use_tqdm=False)
    return Counter(tuple(each.outputs[0].token_ids[2:4]) for each in answers)


def test_sampling_has_the_same_distribution(gated: Path) -> None:
    from scipy.stats import chi2_contingency

    with engine(gated, max_model_len=128) as llm:
        theirs = sampled(llm)
    with engine(gated, max_model_len=128, **MARS) as llm:
        mine = sampled(llm)
        assert llm.collective_rpc("mars_state")[0]["accepted"] > 100
    common = [text for text, count in (mine + theirs).most_common() if count >= 20]
    rest = [sum(count for text, count in each.items() if text not in common) for each in (mine, theirs)]
    table = [[*(each[text] for text in common), other] for each, other in zip((mine, theirs), rest, strict=True)]
    assert len(common) > 10
    assert chi2_contingency(table).pvalue > 0.001


def random_texts(llm: Any, dial: str, **options: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities, of requests with seeds."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0.8,
            seed=number,
            max_tokens=12,
            ignore_eos=True,
            detokenize=False,
            logprobs=1,
            repetition_penalty=1.4,
            frequency_penalty=0.3,
            extra_args={"dial": dial},
            **options,
        )
        for number in range(6)
    ]
    answers = llm.generate([{"prompt_token_ids": [3, 1, 4, 1, 5]}] * len(params), params, use_tqdm=False)
    found = []
    for answer in answers:
        tokens = list(answer.outputs[0].token_ids)
        shown = zip(answer.outputs[0].logprobs, tokens, strict=True)
        found.append((tokens, [round(step[token].logprob, 4) for step, token in shown]))
    return found


@pytest.mark.parametrize(("kind", "mode"), [("folder", "raw_logprobs"), ("gated", "processed_logprobs")])
def test_sampling_with_a_seed(request: pytest.FixtureRequest, kind: str, mode: str) -> None:
    """With windows and without, together or alone: one text, with penalties and truncation. Lossy dials obey both."""
    options = {"logprobs_mode": mode, "structured_outputs_config": {"backend": "guidance"}}
    with engine(request.getfixturevalue(kind), max_model_len=128, **options, **MARS) as llm:
        text = write_by_grammar(llm)
        assert len(text) in (12, 13) and set(text[:12]) <= set(range(4))
        expected = random_texts(llm, "one-token", top_k=6, top_p=0.95)
        before = llm.collective_rpc("mars_state")[0]["accepted"]
        assert random_texts(llm, "exact", top_k=6, top_p=0.95) == expected
        assert llm.collective_rpc("mars_state")[0]["accepted"] > before
        assert len({tuple(tokens) for tokens, _ in expected}) > 1
        only = random_texts(llm, "one-token", top_k=1)
        assert random_texts(llm, "relaxed=0.000001", top_k=1) == only
        assert random_texts(llm, "threshold:margin=1", top_k=1) == only  # a random model is never so confident
        assert random_texts(llm, "threshold:entropy=0", top_k=1) != only


def test_five_hundred_requests_some_of_them_aborted(folder: Path) -> None:
    from vllm import SamplingParams

    draw, dials = random.Random(0), ["exact", "relaxed=0.3", "threshold=0.3", "one-token", None]
    with engine(folder, max_model_len=128, num_gpu_blocks_override=12, **MARS) as llm:
        inner, left, finished, aborted = llm.llm_engine, list(range(500)), set[str](), set[str]()
        while left or inner.has_unfinished_requests():
            for number in [left.pop() for _ in range(min(len(left), draw.randrange(8)))]:
                dial = draw.choice(dials)
                params = SamplingParams(
                    temperature=draw.choice([0.0, 1.0]),
                    max_tokens=draw.randint(1, 40),
                    ignore_eos=True,
                    detokenize=False,
                    extra_args=None if dial is None else {"dial": dial},
                )
                prompt = [draw.randrange(10) for _ in range(draw.randint(1, 60))]
                inner.add_request(str(number), {"prompt_token_ids": prompt}, params)
                if draw.random() < 0.2:
                    aborted.add(str(number))
            for each in inner.step():
                if each.finished:
                    finished.add(each.request_id)
                elif each.request_id in aborted and draw.random() < 0.3:
                    inner.abort_request([each.request_id])
                    finished.add(each.request_id)
        for _ in range(3):  # what was told last, is heard
            write(llm)
        gauges = {each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")}
    assert len(finished) == 500 and len(aborted) > 60
    busy = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    assert [gauges[name] for name in busy] == [0, 0, 0]
