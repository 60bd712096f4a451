"""OpenAI's client and the built-in model: chats, streams, functions and JSON, from a server process of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest
from pydantic import BaseModel

from mars.models.builtin import NAME
from tests.serving.conftest import serving

ASK = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"model": NAME, "temperature": 0, "max_tokens": 24}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
OUTSIDE = [{"role": "user", "content": "What is the weather like in Paris, in celsius? Use the function."}]


class City(BaseModel):
    name: str
    country: str
    inhabitants: int


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving("--rows", 4, model=NAME, name=NAME) as address:
        yield f"{address}/v1"


@pytest.fixture
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=address, api_key="none", max_retries=0)


def test_exact_says_what_one_token_says(client: openai.OpenAI) -> None:
    """How wide its windows are is up to this machine; those of `relaxed` are not."""
    found = {
        dial: client.chat.completions.create(messages=ASK, extra_body={"dial": dial}, **GREEDY)
        for dial in ("one-token", "exact", "relaxed=0.3")
    }
    texts = {dial: each.choices[0].message.content for dial, each in found.items()}
    assert texts["exact"] == texts["one-token"] != ""
    forwards = {dial: each.model_extra["mars"]["forwards"] for dial, each in found.items()}
    assert forwards["relaxed=0.3"] < forwards["one-token"] >= forwards["exact"]


def test_streams_side_by_side(address: str) -> None:
    async def read(client: openai.AsyncOpenAI, question: str) -> str:
        stream = await client.chat.completions.create(
            messages=[{"role": "user", "content": question}], stream=True, **GREEDY
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def both() -> None:
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            questions = ("Name a colour.", ASK[0]["content"])
            alone = [await read(client, each) for each in questions]
            assert alone == await asyncio.gather(*(read(client, each) for each in questions))
            assert alone[0] != alone[1]

    asyncio.run(both())


def test_json_follows_its_schema(client: openai.OpenAI) -> None:
    """By the client's own parser; and several accepted tokens are followed as one at a time are."""
    question = [{"role": "user", "content": "Describe the city of Rome as JSON: name, country, inhabitants."}]
    texts = []
    for dial in ("one-token", "exact"):
        found = client.chat.completions.parse(
            model=NAME,
            messages=question,
            temperature=0,
            max_tokens=80,
            response_format=City,
            extra_body={"dial": dial},
        )
        assert isinstance(found.choices[0].message.parsed, City)
        texts.append(found.choices[0].message.content)
    assert texts[0] == texts[1]


def test_any_json_object(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "Give me a JSON object with one key, colour."}],
        response_format={"type": "json_object"},
        temperature=0.7,
        seed=1,
        max_tokens=60,
    )
    choice = found.choices[0]
    assert choice.message.content and choice.message.content.lstrip().startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_function_that_must_be_called_is(client: openai.OpenAI, choice: object) -> None:
    found = client.chat.completions.create(
        model=NAME, messages=OUTSIDE, tools=[WEATHER], tool_choice=choice, temperature=0, max_tokens=80
    )
    answer = found.choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    (call,) = answer.message.tool_calls or []
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}

    result = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21, "sky": "clear"}'}
    chat = [*OUTSIDE, answer.message.model_dump(), result]
    said = client.chat.completions.create(messages=chat, tools=[WEATHER], **GREEDY)
    assert said.choices[0].message.content or said.choices[0].message.tool_calls


def test_a_streamed_call(client: openai.OpenAI) -> None:
    """As the client's own accumulator understands it, and without chunks that say nothing."""
    with client.chat.completions.stream(
        model=NAME, messages=OUTSIDE, tools=[WEATHER], tool_choice="required", temperature=0, max_tokens=80
    ) as stream:
        chunks = [event.chunk.choices[0] for event in stream if event.type == "chunk"]
        final = stream.get_final_completion()
    assert all(each.delta.model_dump(exclude_none=True) or each.finish_reason for each in chunks)
    (call,) = final.choices[0].message.tool_calls or []
    assert final.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments)["unit"] in ("celsius", "fahrenheit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "?"}}}}, "type"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "extra_body": {"dial": "threshold=0.9"}}, "threshold=0.9"),
        ({"response_format": {"type": "json_object"}, "extra_body": {"min_tokens": 5}}, "grammar"),
        ({"response_format": {"type": "json_object"}, "tools": [WEATHER]}, "tool_choice none"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "same name"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "name"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(client: openai.OpenAI, options: dict, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(messages=ASK, **GREEDY, **options)
