"""The Python API as a person would guess it, on the real built-in model."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

import mars

from .conftest import tiny_checkpoint


def test_generate(smollm: mars.Model) -> None:
    out = smollm.generate("Name a colour.", dial="exact", max_new_tokens=12)
    assert out.text and out.token_ids and out.forwards > 0
    assert out.tokens_per_forward == len(out.token_ids) / out.forwards
    assert out.dial == "exact"
    assert out.text == smollm.generate("Name a colour.", max_new_tokens=12).text


def test_a_list_of_prompts_is_a_batch(smollm: mars.Model) -> None:
    questions = ["Name a colour.", "Count to three."]
    batch = smollm.generate(questions, max_new_tokens=8)
    assert [each.text for each in batch] == [smollm.generate(q, max_new_tokens=8).text for q in questions]
    chats = [[{"role": "user", "content": question}] for question in questions]
    assert [each.text for each in smollm.generate(chats, max_new_tokens=8)] == [each.text for each in batch]
    ids = [smollm.checkpoint.encode(question) for question in questions]
    assert [each.text for each in smollm.generate(ids, max_new_tokens=8)] == [each.text for each in batch]
    assert smollm.generate(ids[0], max_new_tokens=8).text == batch[0].text


def test_stream(smollm: mars.Model) -> None:
    messages = [{"role": "user", "content": "Write one sentence with an emoji and the word café."}]
    stream = smollm.stream(messages, dial="exact", max_new_tokens=24)
    pieces = list(stream)
    assert "".join(pieces) == stream.text == stream.result.text
    assert len(pieces) == stream.result.forwards
    assert stream.result.text == smollm.generate(messages, max_new_tokens=24).text


def test_the_dial_of_a_stream_turns(smollm: mars.Model) -> None:
    expected = smollm.generate("Count to twenty.", max_new_tokens=30).text
    stream = smollm.stream("Count to twenty.", dial="one-token", max_new_tokens=30)
    first = [next(stream) for _ in range(5)]
    stream.dial = "exact"
    assert "".join([*first, *stream]) == expected
    assert str(stream.dial) == stream.result.dial == "exact"
    with pytest.raises(mars.MarsError, match="unknown dial"):
        stream.dial = "warp"


def test_a_stream_can_be_left_and_finished_later(smollm: mars.Model) -> None:
    stream = smollm.stream("Name a colour.", max_new_tokens=10)
    next(stream)
    assert stream.result.num_tokens <= 10
    assert list(stream) == []


def test_sampling_options(smollm: mars.Model) -> None:
    options = {"temperature": 0.9, "top_p": 0.9, "seed": 3, "max_new_tokens": 16}
    one = smollm.generate("Tell me a story.", **options)
    assert one.token_ids == smollm.generate("Tell me a story.", **options).token_ids
    assert one.token_ids != smollm.generate("Tell me a story.", **options | {"seed": 4}).token_ids
    with pytest.raises(mars.MarsError, match="top_p"):
        smollm.generate("hi", top_p=3)
    with pytest.raises(mars.MarsError, match="not both"):
        smollm.generate("hi", sampling=mars.SamplingParams(), temperature=1)
    with pytest.raises(mars.MarsError, match="system prompt needs text"):
        smollm.generate([1, 2], system="Be kind.")


def test_stop_and_system(smollm: mars.Model) -> None:
    whole = smollm.generate("Count from one to five.", max_new_tokens=30).text
    cut = smollm.generate("Count from one to five.", max_new_tokens=30, stop=whole[5:8], dial="exact")
    assert cut.text == whole[: whole.index(whole[5:8])] and cut.finish_reason == "stop"
    system = smollm.generate("Who are you?", system="You are a pirate.", max_new_tokens=12)
    assert system.text != smollm.generate("Who are you?", max_new_tokens=12).text


def test_a_tiny_temperature_is_greedy(smollm: mars.Model) -> None:
    greedy = smollm.generate("Name a colour.", max_new_tokens=8).token_ids
    for temperature in (1e-6, 1e-40, 1e-300):
        assert mars.SamplingParams(temperature).greedy
        assert smollm.generate("Name a colour.", max_new_tokens=8, temperature=temperature).token_ids == greedy


def test_none_is_the_default(smollm: mars.Model) -> None:
    names = (
        "dial",
        "max_new_tokens",
        "min_new_tokens",
        "ignore_end",
        "system",
        "stop",
        "window",
        "block_size",
        "sampling",
    )
    names += ("temperature", "top_k", "top_p", "min_p", "seed", "logit_bias", "presence_penalty", "repetition_penalty")
    assert smollm.request("hi", **dict.fromkeys(names)) == smollm.request("hi")


def test_whole_numbers_of_numpy_and_any_seed(smollm: mars.Model) -> None:
    for seed in (-1, 2**63, 2**200, np.int64(7)):
        asked = {"temperature": 1.0, "seed": seed, "top_k": np.int32(5), "max_new_tokens": np.int64(2)}
        assert smollm.generate("hi", **asked).token_ids == smollm.generate("hi", **asked).token_ids


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": 1e308}, "temperature must be between 0 .* and 1e+06"),
        ({"temperature": math.nan}, "temperature must be a finite number"),
        ({"temperature": "1"}, "temperature must be a finite number, not '1'"),
        ({"temperature": True}, "temperature must be a finite number"),
        ({"frequency_penalty": 1e308}, "frequency_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"logit_bias": {1: 1e300}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"top_k": 2.5}, "top_k must be a whole number, not 2.5"),
        ({"top_k": True}, "top_k must be a whole number"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number, not 2.5"),
        ({"max_new_tokens": "5"}, "max_new_tokens must be a whole number, not '5'"),
        ({"max_new_tokens": True}, "max_new_tokens must be a whole number"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"min_new_tokens": 1.0}, "min_new_tokens must be a whole number"),
        ({"block_size": 4.0}, "block_size must be a whole number"),
        ({"block_size": "4", "window": "tree"}, "block_size must be a whole number"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "a stop string is text, not 5"),
        ({"system": 5}, "the system prompt must be text"),
        ({"dial": 0.9}, 'such as "threshold=0.9" or "relaxed=0.9"'),
        ({"dial": ["exact"]}, "a dial is text"),
        ({"sampling": {"temperature": 1}}, "mars.SamplingParams"),
        ({"temprature": 1}, "unknown option 'temprature': did you mean temperature"),
        ({"max_tokens": 5}, "unknown option 'max_tokens': did you mean max_new_tokens"),
        ({"max_lenght": 5}, "did you mean max_new_tokens"),
        ({"do_sample": True}, "did you mean temperature"),
        ({"stop_sequences": ["a"]}, "did you mean stop"),
        ({"stop_strings": None}, "did you mean stop"),
        ({"stream": True}, "did you mean model.stream"),
        ({"xyzzy": 1}, "the options are dial, max_new_tokens"),
    ],
)
def test_options_that_cannot_work(smollm: mars.Model, options: dict, says: str) -> None:
    with pytest.raises(mars.MarsError, match=says.replace("+", r"\+")):
        smollm.generate("hi", **{"max_new_tokens": 2} | options)


@pytest.mark.parametrize("logprobs", [True, 1.5, "2", 10**6])
def test_logprobs_that_cannot_work(smollm: mars.Model, logprobs: object) -> None:
    with pytest.raises(mars.MarsError, match="logprobs must be"):
        smollm.run([replace(smollm.request("hi"), logprobs=logprobs)])


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (b"hi", "the prompt is bytes"),
        ([b"hi"], "the prompt is bytes"),
        ({"role": "user", "content": "hi"}, "put it in a list"),
        ([{"content": "hi"}], "a message needs a role"),
        ([{"role": "user"}], "a message needs its content"),
        ([{"role": "user", "content": 5}], "a message needs its content"),
        ([{"role": "user", "content": "hi"}, "hi"], "a message is a dictionary"),
        ([[["hi"]]], "a message is a dictionary"),
        (5, "a prompt is text, .* not int"),
        (None, "not NoneType"),
        ({1, 2}, "not set"),
        (np.array([1, 2]), "not ndarray"),
        ([1, 2.5], "whole numbers alone, not 2.5"),
        ([1, True], "whole numbers alone, not True"),
        ([], "the prompt is empty"),
    ],
)
def test_prompts_that_cannot_work(smollm: mars.Model, prompt: object, says: str) -> None:
    for ask in (smollm.generate, smollm.stream) if not isinstance(prompt, list) else (smollm.generate,):
        with pytest.raises(mars.MarsError, match=says):
            ask(prompt, max_new_tokens=2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, not 0"),
        ({"max_num_seqs": 2.5}, "max_num_seqs must be a whole number"),
        ({"memory": 0.5}, "a share, which works on a GPU only: give bytes"),
        ({"memory": -1}, "memory must be a number of bytes"),
        ({"memory": "2GB"}, "memory must be a finite number"),
        ({"memory": 1000}, "1000 bytes of memory are too few for llama: give at least 18432"),
    ],
)
def test_limits_that_cannot_work(options: dict, says: str) -> None:
    checkpoint = tiny_checkpoint("llama")
    for make in (mars.Model, mars.Engine):
        with pytest.raises(mars.MarsError, match=says):
            make(checkpoint, **options).engine()
    if options == {"memory": 1000}:
        assert mars.Model(checkpoint, memory=18432).generate([1], max_new_tokens=1).num_tokens == 1


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "mps", "meta", "cuda:99", "cuda"])
def test_devices_that_are_not_there(device: str) -> None:
    if device in ("cuda", "mps") and torch.accelerator.is_available():
        pytest.skip("it may be there")
    with pytest.raises(mars.MarsError, match="device") as error:
        mars.load("smollm2-135m", device=device)
    assert "use" in str(error.value) or "this machine has" in str(error.value)


def test_an_output_can_be_pickled_and_copied(smollm: mars.Model) -> None:
    output = smollm.generate("Write one sentence with the word café.", dial="exact", max_new_tokens=12, stop=["zz"])
    for other in (pickle.loads(pickle.dumps(output)), copy.deepcopy(output), copy.copy(output)):
        assert other == output
        assert (other.text, other.pieces, other.as_dict()) == (output.text, output.pieces, output.as_dict())
    assert len(pickle.dumps(output)) < 10_000
    again = pickle.loads(pickle.dumps(copy.deepcopy(output)))
    assert (again.text, again.pieces, again.times) == (output.text, output.pieces, output.times)
    assert pickle.loads(pickle.dumps(mars.RequestOutput())).text == ""
