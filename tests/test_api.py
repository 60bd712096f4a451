"""The Python API as a person would guess it, on the real built-in model."""

from __future__ import annotations

import pytest

import mars


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
    with pytest.raises(TypeError, match="temprature"):
        smollm.generate("hi", temprature=1)
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
