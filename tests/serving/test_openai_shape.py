"""What OpenAI's clients send and expect: types, names and codes of errors, parameters of no effect, chunks."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
from fastapi import FastAPI

import mars
from mars import MarsError
from mars.core.grammar import json_grammar
from mars.core.schema import explain
from mars.serving import errors
from tests.serving.conftest import CHAT, MODEL, Address, until

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
TEXT = {"model": MODEL, "prompt": "cae", "temperature": 0, "max_tokens": 8}
ITSELF = {"$ref": "#"}
ROUND = {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}}


def refused(response: httpx.Response, param: str | None, *words: str, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    for word in words:
        assert word in error["message"]
    assert not re.search(r"list\[|NamedTool|Part\b|instance of|Input tag", error["message"]), error
    return error


def schema(definition: dict) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": definition}}}


def tools(parameters: dict, **options: object) -> dict:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters, **options}}]}


def said(content: object) -> dict:
    return {"messages": [{"role": "user", "content": content}]}


# --- what was answered and should not have been


@pytest.mark.parametrize("temperature", [1e-38, 1e-6])
def test_a_temperature_next_to_zero_is_greedy(http: httpx.Client, temperature: float) -> None:
    texts = [
        http.post(CHATS, json=CHAT | {"temperature": each, "seed": 3}).json()["choices"][0]["message"]["content"]
        for each in (0, temperature)
    ]
    assert texts[0] and texts[0] == texts[1]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHATS, {"max_tokens": True}, "max_tokens"),
        (CHATS, {"max_tokens": "3"}, "max_tokens"),
        (CHATS, {"temperature": "1"}, "temperature"),
        (CHATS, {"temperature": True}, "temperature"),
        (CHATS, {"n": "2"}, "n"),
        (CHATS, {"stream": "yes"}, "stream"),
        (CHATS, {"stream": 1}, "stream"),
        (CHATS, {"seed": "7"}, "seed"),
        (CHATS, {"logprobs": 1}, "logprobs"),
        (CHATS, {"stream": True, "stream_options": {"include_usage": "true"}}, "stream_options.include_usage"),
        (CHATS, {"logit_bias": {"1": "5"}}, "logit_bias.1"),
        (CHATS, {"logit_bias": {"1": True}}, "logit_bias.1"),
        (CHATS, {"logit_bias": {"one": 5}}, "logit_bias.one"),
        (CHATS, {"logit_bias": {"1.0": 5}}, "logit_bias.1.0"),
        (CHATS, said([{"type": "text", "text": 3}]), "messages.0.content"),
        (TEXTS, {"prompt": ["1", 2]}, "prompt"),
        (TEXTS, {"prompt": [True, 2]}, "prompt"),
        (TEXTS, {"prompt": [[1], ["2"]]}, "prompt"),
        (TEXTS, {"logprobs": True}, "logprobs"),
    ],
)
def test_types_are_what_they_are(http: httpx.Client, path: str, body: dict, param: str) -> None:
    refused(http.post(path, json=(CHAT if path == CHATS else TEXT) | body), param)


def test_whole_numbers_are_numbers_too(http: httpx.Client) -> None:
    body = CHAT | {"temperature": 0, "top_p": 1, "frequency_penalty": 1, "logit_bias": {"1": 5}}
    assert http.post(CHATS, json=body).status_code == 200
    refused(http.post("/detokenize", json={"tokens": ["1"]}), "tokens.0")
    refused(http.post("/detokenize", json={"tokens": [True]}), "tokens.0")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (schema(ITSELF), "response_format"),
        (schema(ROUND), "response_format"),
        (tools(ITSELF) | {"tool_choice": "required"}, "tools"),
        (tools(ROUND, strict=True), "tools"),
    ],
    ids=["itself", "round", "forced", "strict"],
)
def test_a_schema_that_is_nothing_but_a_reference_to_itself(http: httpx.Client, body: dict, param: str) -> None:
    refused(http.post(CHATS, json=CHAT | body), param, "no text can follow", "refers to itself")


@pytest.mark.parametrize(
    "definition",
    [
        {"anyOf": [ITSELF, {"$ref": ""}]},
        {"allOf": [{"type": "object"}, ITSELF]},
        {"$anchor": "me", "$ref": "#me"},
        {"$id": "https://example.org/me", "$ref": "https://example.org/me"},
        {"type": "object", "properties": {"a": ITSELF}, "required": ["a"]},
        {"type": "array", "prefixItems": [{}], "items": ITSELF, "minItems": 2},
    ],
)
def test_texts_without_an_end(definition: dict) -> None:
    with pytest.raises(MarsError, match="no text can follow"):
        json_grammar(definition)


@pytest.mark.parametrize(
    "definition",
    [
        {"anyOf": [ITSELF, {"type": "null"}]},
        {"type": "object", "properties": {"a": ITSELF}},
        {"properties": {"a": ITSELF}, "required": ["a"]},  # or no object at all
        {"type": "array", "items": ITSELF},
        {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, ITSELF]}}, "required": ["next"]},
        {"$ref": "#/$defs/a~1b%20c/0", "$defs": {"a/b c": [{"type": "string"}]}},
    ],
)
def test_references_that_end(definition: dict) -> None:
    assert json_grammar(definition)


# --- OpenAI's shape


def test_a_model_by_its_name(server: str, http: httpx.Client) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    assert client.models.retrieve(MODEL).model_dump() == client.models.list().data[0].model_dump()
    for name in ("gpt", "some/other", "some%2Fother"):
        error = refused(http.get(f"/v1/models/{name}"), "model", "there is no model", status=404)
        assert error["code"] == "model_not_found" and error["type"] == "invalid_request_error"


def test_parameters_of_no_effect_are_in_the_log(server: Address, http: httpx.Client) -> None:
    harmless = {
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "reasoning_effort": "low",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "s",
        "user": "u",
        "verbosity": "low",
    }
    given = http.post(CHATS, json=CHAT | harmless | {"modalities": ["text"]}, headers={"X-Request-ID": "harmless"})
    assert given.status_code == 200, given.text
    assert given.json()["choices"] == http.post(CHATS, json=CHAT).json()["choices"]

    def lines() -> list[dict]:
        return [line for line in server.events("request") if line["request_id"] == "harmless"]

    until(lines)
    (line,) = lines()
    assert line["ignored"] == sorted(harmless)


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (CHATS, {"audio": {"voice": "ash", "format": "wav"}}),
        (CHATS, {"modalities": ["text", "audio"]}),
        (CHATS, {"web_search_options": {}}),
        (CHATS, {"functions": []}),
        (CHATS, {"function_call": "auto"}),
        (CHATS, {"moderation": {"model": "x"}}),
        (CHATS, {"sotre": True}),
        (TEXTS, {"best_of": 2}),
        (TEXTS, {"echo": True}),
        (TEXTS, {"suffix": "x"}),
    ],
)
def test_parameters_that_would_change_the_answer_are_refused(http: httpx.Client, path: str, change: dict) -> None:
    (name,) = change
    error = refused(http.post(path, json=(CHAT if path == CHATS else TEXT) | change), name, f"parameter: {name}")
    assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [(CHATS, CHAT | said("abc" * 200), "messages"), (TEXTS, TEXT | {"prompt": "abc" * 200}, "prompt")],
)
def test_a_prompt_beyond_the_context(http: httpx.Client, path: str, body: dict, param: str) -> None:
    assert refused(http.post(path, json=body), param, "600", "256")["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (CHATS, {"dial": "warp=9"}, "dial"),
        (CHATS, {"dial": "threshold=0.5", "logprobs": True}, "dial"),
        (CHATS, {"logit_bias": {"300": 1}}, "logit_bias"),
        (CHATS, {"min_tokens": 20}, "min_tokens"),
        (CHATS, {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        (CHATS, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHATS, {"max_completion_tokens": 5}, "max_tokens"),
        (CHATS, {"top_logprobs": 2}, "top_logprobs"),
        (CHATS, {"tool_choice": "required"}, "tool_choice"),
        (CHATS, {"tool_choice": "any"}, "tool_choice"),
        (CHATS, {"tool_choice": 5}, "tool_choice"),
        (CHATS, tools({}) | {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        (CHATS, tools({}) | {"response_format": {"type": "json_object"}}, "response_format"),
        (CHATS, {"tools": tools({})["tools"] * 2}, "tools"),
        (CHATS, {"tools": [{"type": "function"}]}, "tools.0.function"),
        (CHATS, {"response_format": {"type": "xml"}}, "response_format.type"),
        (CHATS, {"response_format": {}}, "response_format.type"),
        (CHATS, {"response_format": "json"}, "response_format"),
        (CHATS, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        (CHATS, schema({"type": "?"}), "response_format"),
        (CHATS, tools({"type": "?"}, strict=True), "tools"),
        (CHATS, {"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
        (TEXTS, {"prompt": ""}, "prompt"),
        (TEXTS, {"prompt": [99]}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": None, "messages": []}, "messages"),
    ],
)
def test_the_parameter_to_blame(http: httpx.Client, path: str, change: dict, param: str) -> None:
    body = {CHATS: CHAT, TEXTS: TEXT}.get(path, {})
    error = refused(http.post(path, json=body | change), param)
    assert not {"max_new_tokens", "min_new_tokens", "ignore_end"} & set(error["message"].replace(",", "").split())


def test_a_model_says_what_it_holds_and_whether_the_load_may_change_its_text(http: httpx.Client) -> None:
    (entry,) = http.get("/v1/models").json()["data"]
    assert (entry["max_model_len"], entry["batch_invariant"]) == (256, True)
    assert http.get(f"/v1/models/{entry['id']}").json() == entry


def test_methods_that_there_are(http: httpx.Client) -> None:
    for path, allowed in ((CHATS, "POST"), ("/v1/models", "GET"), ("/v1/dial", "GET, PUT"), ("/health", "GET")):
        response = http.delete(path)
        refused(response, None, f"there is no DELETE {path}", status=405)
        assert response.headers["Allow"] == allowed


def test_usage_is_in_every_chunk_or_in_none(http: httpx.Client) -> None:
    def chunks(**options: bool) -> list[dict]:
        text = http.post(CHATS, json=CHAT | {"stream": True, "stream_options": options}).text
        return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if "{" in line]

    *others, last = chunks(include_usage=True, include_obfuscation=False)
    assert others and all(each["usage"] is None for each in others)
    assert last["usage"]["completion_tokens"] and last["choices"] == []
    assert not any("usage" in each for each in chunks(include_obfuscation=True))


def test_a_chat_with_tools_begins_without_content(http: httpx.Client) -> None:
    """What is said or called is not known by then."""
    text = http.post(CHATS, json=CHAT | {"stream": True} | tools({})).text
    first = json.loads(text.partition("\n\n")[0].removeprefix("data: "))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}


def test_a_message_of_a_client_can_be_sent_back(server: str, letters: Path) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(**CHAT).choices[0].message
    chat = [*CHAT["messages"], answer.model_dump() | {"annotations": []}, *CHAT["messages"]]
    again = client.chat.completions.create(**(CHAT | {"messages": chat}))
    alone = mars.load(letters, device="cpu", dtype="float32").generate(
        [*CHAT["messages"], {"role": "assistant", "content": answer.content}, *CHAT["messages"]],
        dial="one-token",
        max_new_tokens=8,
    )
    assert again.choices[0].message.content == alone.text


# --- nothing of the inside


@pytest.mark.parametrize("pattern", ["(", "a\\b(?=b)", "[z-a]", "^a$b^", "x" * 5000 + "("])
def test_a_bad_pattern_is_named(http: httpx.Client, pattern: str) -> None:
    bodies = [(schema({"type": "string", "pattern": pattern}), "response_format")]
    if len(pattern) < 100:  # the model is told of tools, and holds 256 tokens
        bodies.append((tools({"type": "string", "pattern": pattern}) | {"tool_choice": "required"}, "tools"))
    for body, param in bodies:
        error = refused(http.post(CHATS, json=CHAT | body), param, "the pattern", pattern[:100])
        assert len(error["message"]) < 500 and "\n" not in error["message"]
        assert "%json" not in error["message"] and "1(" not in error["message"]


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("panic: index out of bounds: /root/.cargo/registry/x.rs:12:3", "it is beyond what can be compiled"),
        ("thread '<unnamed>' panicked at src/earley/parser.rs:1:2:\nboom", "it is beyond what can be compiled"),
        ('failed to parse "%json": recursion limit exceeded at line 1 column 9', "it is nested too deeply"),
        ('at 1(8): failed to compile JSON schema: Invalid type: x\n   1 | start: {"x": "panic: "}', "Invalid type: x"),
    ],
)
def test_what_llguidance_says_in_plain_words(text: str, meaning: str) -> None:
    assert explain(text).startswith(meaning)


@pytest.mark.parametrize("step", [2147483648, 123456.7, 1.0000001])
def test_steps_that_take_minutes_to_compile(step: float) -> None:
    with pytest.raises(MarsError, match="digits"):
        json_grammar({"type": "object", "properties": {"a": {"type": "number", "multipleOf": step}}})
    assert json_grammar({"anyOf": [{"multipleOf": 86400}, {"multipleOf": 0.01}, {"multipleOf": 1e9}]})


def test_references_to_nothing(http: httpx.Client) -> None:
    nowhere = {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}, "required": ["a"]}
    refused(
        http.post(CHATS, json=CHAT | schema(nowhere)), "response_format", "the reference #/$defs/none leads nowhere"
    )
    body = CHAT | tools({"properties": {"a": {"$ref": "#/x"}}, "required": ["a"]}) | {"tool_choice": "required"}
    refused(http.post(CHATS, json=body), "tools", "the reference #/x leads nowhere")
    refused(http.post(CHATS, json=CHAT | schema({"$ref": "other"})), "response_format", "other leads out of the schema")
    either = {"oneOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {"b": {"type": "integer"}}}]}
    refused(http.post(CHATS, json=CHAT | schema(either)), "response_format", "use anyOf")


@pytest.mark.parametrize("depth", [150, 800])
def test_what_is_nested_too_deeply(http: httpx.Client, depth: int) -> None:
    deep: dict = {"type": "string"}
    for _ in range(depth):
        deep = {"items": deep}
    call = {"id": "1", "function": {"name": "f", "arguments": json.dumps(deep)}}
    for body, param in (
        (schema(deep), "response_format.json_schema.schema"),
        (tools(deep), "tools.0.function.parameters"),
        ({"messages": [{"role": "assistant", "tool_calls": [call]}]}, "messages.0.tool_calls.0.function.arguments"),
    ):
        refused(http.post(CHATS, json=CHAT | body), param, "nested more than 100 levels deep")


def test_an_error_nobody_expected_tells_only_the_log(caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI()
    errors.install(app)

    @app.get("/")
    async def broken() -> None:
        raise RuntimeError("/secret/path")

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get("/")

    response = asyncio.run(ask())
    assert response.status_code == 500 and "internal error" in response.json()["error"]["message"]
    assert "secret" not in response.text and "RuntimeError" not in response.text
    assert "/secret/path" in caplog.text and "Traceback" in caplog.text


# --- errors in the caller's words


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_json_that_is_not_called_json(http: httpx.Client, kind: str | None) -> None:
    headers = {"Content-Type": kind} if kind else {}
    assert http.post(CHATS, content=json.dumps(CHAT), headers=headers).status_code == 200
    assert refused(http.post(CHATS, content="model=a", headers=headers), None)["code"] == "invalid_json"
    page = http.post(CHATS, content=json.dumps(CHAT), headers=headers | {"Origin": "https://example.org"})
    refused(page, None, "Content-Type: application/json")


@pytest.mark.parametrize(
    ("path", "change", "param", "words"),
    [
        (CHATS, said([{"type": "image_url", "image_url": {}}]), "messages.0.content", ("part 0", "image_url", "text")),
        (CHATS, said([{"type": "text", "text": "a"}, {}]), "messages.0.content", ("part 1",)),
        (CHATS, said({"type": "text", "text": "a"}), "messages.0.content", ("a list of parts",)),
        (CHATS, said(5), "messages.0.content", ("must be a text",)),
        (CHATS, said([{"type": "text", "text": "a", "x": 1}]), "messages.0.content", ("unsupported parameter: x",)),
        (CHATS, {"messages": "abc"}, "messages", ("list",)),
        (TEXTS, {"prompt": [{"type": "text", "text": "abc"}]}, "prompt", ("must be a text, a list of texts",)),
        (TEXTS, {"prompt": []}, "prompt", ("must be a text",)),
        (TEXTS, {"prompt": ["a"] * 200}, "prompt", ("at most 128", "200")),
        (CHATS, {"stop": 5}, "stop", ("must be a text or a list of texts",)),
        (CHATS, {"stop": ["a", 5]}, "stop", ("must be a text or a list of texts",)),
        (CHATS, {"stop": ["a"] * 20}, "stop", ("at most 16", "20")),
        (CHATS, {"stop": ["a"] * 17}, "stop", ("at most 16", "17")),
    ],
)
def test_what_can_be_one_thing_or_another(
    http: httpx.Client, path: str, change: dict, param: str, words: tuple[str, ...]
) -> None:
    response = http.post(path, json=(CHAT if path == CHATS else TEXT) | change)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and error["message"].startswith(f"{param}: ")
    assert all(word in error["message"] for word in words), error["message"]


def test_null_is_as_if_it_were_not_there_at_any_depth(http: httpx.Client) -> None:
    function = {"name": "f", "description": None, "parameters": None, "strict": None}
    call = {"id": "1", "type": None, "function": {"name": "f", "arguments": None}}
    body = CHAT | {
        "messages": [
            {"role": "user", "content": "abc", "name": None, "tool_calls": None, "refusal": None, "audio": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        "stream_options": None,
        "response_format": None,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": None,
        "metadata": None,
    }
    assert http.post(CHATS, json=body).status_code == 200
    options = {"stream": True, "stream_options": {"include_usage": None}}
    assert http.post(CHATS, json=body | options).status_code == 200
    whole = {"type": "json_schema", "json_schema": {"name": "x", "description": None, "schema": {}, "strict": None}}
    assert http.post(CHATS, json=CHAT | {"response_format": whole}).status_code == 500  # it has no letters for JSON
    named = {"prompt": "abc", "model": None, "messages": None, "add_special_tokens": None}
    assert http.post("/tokenize", json=named).status_code == 200
