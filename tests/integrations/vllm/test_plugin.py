"""vLLM with the plugin writes what vLLM writes without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.conftest import MARS, SEQUENCES, engine

SYSTEM = "You answer questions about the world, shortly and to the point, and never make anything up."
QUESTIONS = (
    "List the planets.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Why is the sky blue?",
    "Tom has 3 boxes with 12 apples each. He eats 5. How many are left?",
    "Hello",
    "Name five fruits.",
    "Translate into French: The weather is nice today, let us go for a walk.",
    "What is 12 times 12?",
)
LENGTHS = (48, 17, 33, 64, 5, 40, 25, 1)


def chats(count: int) -> list[list[dict[str, str]]]:
    """Every other one begins like the others, and all have different lengths."""
    asked = []
    for number in range(count):
        question = QUESTIONS[number % len(QUESTIONS)] + " Please." * (number // len(QUESTIONS))
        system = [{"role": "system", "content": SYSTEM}] if number % 2 else []
        asked.append([*system, {"role": "user", "content": question}])
    return asked


def write(llm: Any, count: int, dial: str | None = None, **options: Any) -> list[list[int]]:
    from vllm import SamplingParams

    extra = None if dial is None else {"dial": dial}
    params = [
        SamplingParams(**{"temperature": 0.0, "max_tokens": LENGTHS[n % len(LENGTHS)], "extra_args": extra, **options})
        for n in range(count)
    ]
    return [list(each.outputs[0].token_ids) for each in llm.chat(chats(count), params, use_tqdm=False)]


def state(llm: Any) -> dict[str, Any]:
    return next(each for each in llm.collective_rpc("mars_state") if each)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Any]:
    """What vLLM writes without the plugin."""
    with engine(model) as llm:
        return {
            **{str(count): write(llm, count) for count in (1, 4, 16)},
            "penalties": write(llm, 4, repetition_penalty=1.3, presence_penalty=0.5),
            "stop": write(llm, 4, stop=["3", "return"], min_tokens=4),
        }


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[Any]:
    with engine(model, **MARS) as running:
        yield running


@pytest.mark.parametrize("count", [1, 4, 16])
def test_the_same_text(llm: Any, expected: dict[str, Any], count: int) -> None:
    before = state(llm)
    assert write(llm, count) == expected[str(count)]
    assert write(llm, count) == expected[str(count)]  # with all prompts known
    after = state(llm)
    tokens, forwards = (after[name] - before[name] for name in ("tokens", "forwards"))
    assert tokens / forwards > 1.5
    assert after["accepted"] == after["agreed"] <= after["drafts"]


def test_as_many_tokens_per_forward_as_our_engine(llm: Any, model: Path) -> None:
    """But for the forward that reads the end of a prompt, which has no masks here: later windows begin elsewhere."""
    from vllm import SamplingParams

    import mars

    prompts = [
        list(llm.get_tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        for chat in chats(4)
    ]
    before = state(llm)
    params = SamplingParams(temperature=0.0, max_tokens=160, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    forwards = state(llm)["forwards"] - before["forwards"] - len(prompts)
    ours = mars.load(model, dtype="float32").generate(
        prompts, dial="exact", window="chain", block_size=4, max_new_tokens=160, ignore_end=True
    )
    assert [list(each.outputs[0].token_ids) for each in answers] == [each.token_ids for each in ours]
    assert forwards == pytest.approx(sum(each.forwards for each in ours), rel=0.03)


def test_penalties_and_stops(llm: Any, expected: dict[str, Any]) -> None:
    assert write(llm, 4, repetition_penalty=1.3, presence_penalty=0.5) == expected["penalties"]
    assert write(llm, 4, stop=["3", "return"], min_tokens=4) == expected["stop"]


def test_a_prompt_that_is_known_brings_no_drafts(llm: Any) -> None:
    """vLLM would pad it to a window's length, and a lenient dial would keep the padding."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8, extra_args={"dial": "threshold=0.1"})
    prompt = {"prompt_token_ids": list(range(500, 629))}
    first, again = (llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2))
    assert again.num_cached_tokens == 128
    assert first.outputs[0].token_ids == again.outputs[0].token_ids


def test_one_token_is_the_same_text_without_drafts(llm: Any, expected: dict[str, Any]) -> None:
    before = state(llm)
    assert write(llm, 4, "one-token") == expected["4"]
    after = state(llm)
    assert after["drafts"] == before["drafts"]
    assert after["tokens"] - before["tokens"] == after["forwards"] - before["forwards"]


@pytest.mark.parametrize("dial", ["relaxed=0.1", "threshold=0.3"])
def test_looser_dials_write_faster(llm: Any, expected: dict[str, Any], dial: str) -> None:
    before = state(llm)
    write(llm, 16)
    between = state(llm)
    assert write(llm, 16, dial) != expected["16"]
    after = state(llm)

    def rate(start: dict[str, Any], end: dict[str, Any]) -> float:
        return (end["tokens"] - start["tokens"]) / (end["forwards"] - start["forwards"])

    assert rate(between, after) > rate(before, between)
    assert after["agreed"] < after["accepted"]


def test_the_dial_of_all_and_of_one(llm: Any, expected: dict[str, Any]) -> None:
    llm.collective_rpc("mars_turn", args=("threshold=0.3",))
    try:
        assert write(llm, 4) != expected["4"]
        assert write(llm, 4, "exact") == expected["4"]
    finally:
        llm.collective_rpc("mars_turn", args=("exact",))
    assert write(llm, 4) == expected["4"]


def test_a_dial_that_is_none(llm: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="unknown dial 'sloppy'"):
        write(llm, 1, "sloppy")


def test_masks_are_never_seen(llm: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=5, prompt_logprobs=2)
    answer = llm.chat(chats(2), params, use_tqdm=False)[1]
    mask = 16
    shown = [*answer.outputs[0].logprobs, *filter(None, answer.prompt_logprobs)]
    assert all(value.logprob > -100 for each in shown for value in each.values())
    assert not any(mask in each for each in answer.outputs[0].logprobs)


def test_json(llm: Any) -> None:
    import json

    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
    params = SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=StructuredOutputsParams(json=schema))
    answer = llm.chat(chats(1), params, use_tqdm=False)[0]
    assert set(json.loads(answer.outputs[0].text)) == {"name"}


def test_the_same_text_when_pages_run_out(model: Path, expected: dict[str, Any]) -> None:
    with engine(model, **MARS, block_size=32, max_model_len=256, num_gpu_blocks_override=12) as llm:
        assert write(llm, SEQUENCES) == expected["16"]
        counted = {metric.name.removeprefix("vllm:"): metric for metric in llm.get_metrics()}
        assert counted["num_preemptions"].value > 0
        own = state(llm)  # masks are no drafts: what the proposer counts is what vLLM reports
        assert counted["spec_decode_num_accepted_tokens"].value == own["accepted"]
        assert counted["spec_decode_num_draft_tokens"].value == pytest.approx(own["drafts"], rel=0.02)


def test_fewer_masks_with_more_requests(model: Path, expected: dict[str, Any]) -> None:
    options = {"speculative_config": {"method": "mars", "masks": 2, "windows": {"4": 1, "16": 0}}}
    with engine(model, **options) as llm:
        for count in (1, 4, 16):
            assert write(llm, count) == expected[str(count)]
