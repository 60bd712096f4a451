"""The server through OpenAI's own client and plain HTTP: what it answers, streams, and refuses."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import httpx2 as httpx
import openai
import psutil
import pytest

import mars
from mars import cli
from tests.serving.conftest import MODEL, serving, until

ASK = [{"role": "user", "content": "abc"}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 20}


@pytest.fixture
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def expected(letters: Path) -> mars.RequestOutput:
    return mars.load(letters, device="cpu", dtype="float32").generate(ASK, dial="one-token", max_new_tokens=20)


def test_a_chat(client: openai.OpenAI, expected: mars.RequestOutput) -> None:
    found = client.chat.completions.create(messages=ASK, **GREEDY)
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].finish_reason == expected.finish_reason
    assert found.usage and found.usage.completion_tokens == expected.num_tokens
    figures = found.model_extra["mars"]
    assert figures["dial"] == "exact" and figures["agreement"] == 1.0
    assert figures["tokens_per_forward"] == pytest.approx(expected.num_tokens / figures["forwards"], abs=1e-3)


@pytest.mark.parametrize("dial", ["one-token", "exact", "threshold=0.2"])
def test_a_request_has_its_own_dial(client: openai.OpenAI, letters: Path, dial: str) -> None:
    found = client.chat.completions.create(messages=ASK, extra_body={"dial": dial}, **GREEDY)
    alone = mars.load(letters, device="cpu", dtype="float32").generate(ASK, dial=dial, max_new_tokens=20)
    assert found.choices[0].message.content == alone.text
    assert found.model_extra["mars"]["dial"] == dial


def test_a_stream(client: openai.OpenAI, expected: mars.RequestOutput) -> None:
    everything = {"include_usage": True, "include_forwards": True}
    chunks = list(client.chat.completions.create(messages=ASK, stream=True, stream_options=everything, **GREEDY))
    first, *middle, last, account = chunks
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == expected.text
    assert all(chunk.choices[0].finish_reason is None for chunk in middle)
    assert last.choices[0].finish_reason == expected.finish_reason
    assert not account.choices and account.usage and account.usage.completion_tokens == expected.num_tokens
    sizes = [size for chunk in middle for size in chunk.model_extra["mars"]["forwards"]]
    assert sum(characters for _, characters in sizes) == len(expected.text)
    assert all(chunk.model_extra["mars"]["dial"] == "exact" for chunk in middle)
    assert all(chunk.model_extra["mars"]["agreement"] == 1.0 for chunk in middle)
    assert len({chunk.id for chunk in chunks}) == 1
    plain = list(client.chat.completions.create(messages=ASK, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in plain) == expected.text
    assert not any("mars" in chunk.model_extra for chunk in plain)


def test_many_at_once_with_the_async_client(server: str, expected: mars.RequestOutput) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
            asked = [client.chat.completions.create(messages=ASK, **GREEDY) for _ in range(6)]
            return [each.choices[0].message.content for each in await asyncio.gather(*asked)]

    assert asyncio.run(ask()) == [expected.text] * 6


def test_several_choices_with_a_seed(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": ASK, "n": 3, "seed": 7, "max_tokens": 12}
    texts = [[choice.message.content for choice in client.chat.completions.create(**options).choices] for _ in range(2)]
    assert texts[0] == texts[1] and len(set(texts[0])) > 1
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts[0]


def test_completions(client: openai.OpenAI, letters: Path) -> None:
    model = mars.load(letters, device="cpu", dtype="float32")
    whole = [model.generate(prompt, dial="one-token", max_new_tokens=8).text for prompt in ([0, 1, 2], [3, 4])]
    for prompt in (["abc", "de"], [[0, 1, 2], [3, 4]]):
        found = client.completions.create(prompt=prompt, **(GREEDY | {"max_tokens": 8}))
        assert [choice.text for choice in found.choices] == whole


def test_stop(client: openai.OpenAI, expected: mars.RequestOutput) -> None:
    stop = expected.text[3:5]
    found = client.chat.completions.create(messages=ASK, stop=[stop], **GREEDY)
    assert found.choices[0].message.content == expected.text[: expected.text.index(stop)]
    assert found.choices[0].finish_reason == "stop"


def test_models_tokens_and_health(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [each.id for each in client.models.list()] == [MODEL]
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/version").json() == {"version": mars.__version__}
    tokens = http.post("/tokenize", json={"prompt": "abc"}).json()["tokens"]
    assert tokens == [0, 1, 2]
    assert http.post("/tokenize", json={"messages": ASK}).json()["count"] == 3
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "abc"}
    assert "<title>" in http.get("/").text


def test_logprobs(client: openai.OpenAI, http: httpx.Client, expected: mars.RequestOutput) -> None:
    options = {"messages": ASK, "logprobs": True, "top_logprobs": 2, **GREEDY}
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.logprobs and whole.logprobs.content
    entries = whole.logprobs.content
    assert "".join(each.token for each in entries) == expected.text
    assert all(each.logprob == each.top_logprobs[0].logprob <= 0 and len(each.top_logprobs) == 2 for each in entries)
    streamed = []
    for chunk in client.chat.completions.create(stream=True, **options):
        logprobs = chunk.choices[0].logprobs
        streamed += (logprobs and logprobs.content) or []
    assert [each.token for each in streamed] == [each.token for each in entries]
    asked = {"prompt": "abc", "logprobs": 3, **GREEDY, "max_tokens": 6}
    old = client.completions.create(**asked).choices[0]
    assert old.logprobs and old.logprobs.tokens and "".join(old.logprobs.tokens) == old.text
    assert old.logprobs.text_offset == list(range(len(old.text)))
    chunks = [chunk.choices[0].logprobs for chunk in client.completions.create(stream=True, **asked)]
    assert [at for each in chunks if each for at in each.text_offset or []] == old.logprobs.text_offset
    body = {"messages": ASK, **GREEDY}
    assert_error(http.post("/v1/chat/completions", json=body | {"top_logprobs": 2}), 400, "needs logprobs=true")
    loose = body | {"logprobs": True, "dial": "threshold=0.5"}
    assert_error(http.post("/v1/chat/completions", json=loose), 400, "logprobs")


def test_logprobs_of_text_that_is_held_back(client: openai.OpenAI, expected: mars.RequestOutput) -> None:
    """A token that may begin a stop string is told later, and is not lost."""
    stop = [f"{letter}?" for letter in set(expected.text)]
    options = {"messages": ASK, "logprobs": True, "stop": stop[:4], **GREEDY}
    whole = client.chat.completions.create(**options).choices[0].logprobs
    streamed = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(stream=True, **options)]
    assert whole and whole.content
    assert [one.token for each in streamed if each for one in each.content or []] == [
        one.token for one in whole.content
    ]


def test_null_is_as_if_it_were_not_there(client: openai.OpenAI, expected: mars.RequestOutput) -> None:
    nothing = dict.fromkeys(("top_p", "n", "stream", "presence_penalty", "frequency_penalty", "logprobs", "stop"))
    answer = client.chat.completions.create(messages=ASK, **GREEDY, extra_body=nothing)
    assert answer.choices[0].message.content == expected.text


def test_a_number_that_no_float_holds_is_refused(http: httpx.Client) -> None:
    for name in ("top_k", "min_tokens", "max_tokens", "seed", "n"):
        body = {"messages": ASK, **GREEDY, "temperature": 1} | {name: 10**309}
        assert http.post("/v1/chat/completions", json=body).status_code in (200, 400)
    assert http.get("/health").status_code == 200


# --- the dial


def test_the_dial_is_turned_for_running_requests_too(client: openai.OpenAI, http: httpx.Client) -> None:
    assert http.get("/v1/dial").json() == {"dial": "exact", "floor": None, "auto": False}
    try:
        with client.chat.completions.create(
            messages=ASK,
            stream=True,
            stream_options={"include_usage": True},
            **(GREEDY | {"max_tokens": 240, "logit_bias": {"10": -100}}),  # it does not end before the dial is turned
        ) as stream:
            chunks = iter(stream)
            next(chunks)
            assert http.put("/v1/dial", json={"dial": "one-token"}).json()["dial"] == "one-token"
            *_, last = chunks
        assert last.model_extra["mars"]["dial"] == "one-token"
        assert client.chat.completions.create(messages=ASK, **GREEDY).model_extra["mars"]["tokens_per_forward"] == 1.0
    finally:
        http.put("/v1/dial", json={"dial": "exact"})


def test_mars_dial(server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def typed(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["mars", "dial", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        return int(left.value.code or 0), (said.out + said.err).strip()

    assert typed("relaxed=0.5", "--url", server) == typed("--url", server) == (0, "relaxed=0.5")
    assert typed("auto", "--url", server) == typed("--url", server) == (0, "auto (now exact)")
    assert typed("exact", "--url", server) == (0, "exact")
    assert typed("warp", "--url", server)[0] == 2
    code, said = typed("exact", "--url", "http://127.0.0.1:9")
    assert code == 2 and "no server at" in said and len(said.splitlines()) == 1


def test_keys_and_floor(letters: Path) -> None:
    options = ("--api-key", "use", "--admin-key", "run", "--floor", "threshold=0.8", "--max-new-tokens", 30)
    with serving(*options, model=letters) as address, httpx.Client(base_url=address) as http:
        chat = {"messages": ASK, **GREEDY}

        def post(body: dict, key: str | None = "use") -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            return http.post("/v1/chat/completions", json=body, headers=headers)

        assert post(chat).status_code == post(chat, "run").status_code == 200
        for key in ("wrong", None, ""):
            assert_error(post(chat, key), 401, "key")
        assert_error(post(chat | {"dial": "threshold=0.5"}), 400, "nothing looser than threshold=0.8")
        assert_error(post(chat | {"dial": "relaxed=0.5"}), 400, "nothing looser")
        assert post(chat | {"dial": "threshold=0.9"}).status_code == 200
        assert_error(post(chat | {"max_tokens": 31}), 400, "at most 30")
        headers = {"Authorization": "Bearer use"}
        assert_error(http.put("/v1/dial", json={"dial": "one-token"}, headers=headers), 401, "key")
        headers = {"Authorization": "Bearer run"}
        assert http.put("/v1/dial", json={"dial": "one-token"}, headers=headers).status_code == 200
        assert_error(http.put("/v1/dial", json={"dial": "threshold=0.1"}, headers=headers), 400, "nothing looser")
        assert http.get("/health").status_code == 200


# --- what is refused


def assert_error(response: httpx.Response, status: int, message: str) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    return error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"audio": {}}, "unsupported parameter: audio"),
        ({"temperature": 3}, "temperature: Input should be less than or equal to 2"),
        ({"temperature": "warm"}, "temperature: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user"}]}, "messages.0: a message without tool_calls needs content"),
        ({"messages": None}, "missing parameter: messages"),
        ({"n": 0}, "n: "),
        ({"dial": "warp=9"}, "unknown dial"),
        ({"logit_bias": {"3": 1000}}, "logit_bias"),
        ({"logit_bias": {"300": 1}}, "vocabulary"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "not both"),
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream=true"),
        ({"messages": [{"role": "user", "content": "abc" * 200}]}, "shorten the prompt"),
    ],
)
def test_bad_requests(http: httpx.Client, change: dict, message: str) -> None:
    assert_error(http.post("/v1/chat/completions", json={"messages": ASK, **GREEDY} | change), 400, message)


def test_bad_bodies(http: httpx.Client) -> None:
    def post(body: bytes) -> httpx.Response:
        return http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})

    assert_error(post(b"{"), 400, "not valid JSON")
    assert_error(post(b""), 400, "no body")
    assert_error(post(b'{"model": "\xff"}'), 400, "UTF-8")
    assert_error(post(b"[1]"), 400, "")
    assert_error(post(b" " * (5 * 2**20)), 413, "longer than")
    assert_error(
        http.post("/v1/chat/completions", json={"messages": ASK, "model": "gpt"}), 404, "there is no model gpt"
    )
    assert_error(http.get("/v1/nothing"), 404, "there is no GET /v1/nothing")
    assert_error(http.get("/v1/chat/completions"), 405, "there is no GET")


def test_a_full_queue_says_when_to_come_back(server: str, http: httpx.Client) -> None:
    async def flood() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server, timeout=60) as client:
            body = {"messages": ASK, **GREEDY} | {"max_tokens": 200, "logit_bias": {"10": -100}}
            return await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for _ in range(30)))

    responses = asyncio.run(flood())
    full = [each for each in responses if each.status_code == 429]
    assert full and len(full) < 30 and {each.status_code for each in responses} == {200, 429}
    assert_error(full[0], 429, "try again")
    assert full[0].headers["Retry-After"] == "1"
    never = {"messages": ASK, **GREEDY, "n": 128}
    assert_error(http.post("/v1/chat/completions", json=never), 400, "answers can be asked for at once")
    assert http.post("/v1/chat/completions", json={"messages": ASK, **GREEDY}).status_code == 200


def test_the_document_of_the_api(http: httpx.Client) -> None:
    document = json.loads(http.get("/openapi.json").text)
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/dial", "/health"} <= set(document["paths"])


# --- what goes wrong on the way


def endless(**options: object) -> dict:
    """A request that takes as long as the model's context allows."""
    return {"messages": ASK, **GREEDY} | {"max_tokens": 240, "logit_bias": {"10": -100}, "dial": "one-token"} | options


def metrics(http: httpx.Client) -> dict[str, float]:
    lines = [line for line in http.get("/metrics").text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def ports(process: psutil.Process | None) -> list[str]:
    """Those that a process listens on."""
    return [str(each.laddr.port) for each in process.net_connections()] if process else []


def value(http: httpx.Client, name: str) -> float:
    return next(value for key, value in metrics(http).items() if key.startswith(name))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_row(server: str, http: httpx.Client, stream: bool) -> None:
    with httpx.Client(base_url=server, timeout=httpx.Timeout(30, read=30 if stream else 0.03)) as impatient:
        if stream:
            with impatient.stream("POST", "/v1/chat/completions", json=endless(stream=True)) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.TimeoutException):
                impatient.post("/v1/chat/completions", json=endless(n=4))
    until(lambda: value(http, "vllm:num_requests_running") == 0)
    assert http.post("/v1/chat/completions", json={"messages": ASK, **GREEDY}).status_code == 200


def test_the_engine_is_started_again_when_it_dies(letters: Path) -> None:
    with serving(model=letters) as address, httpx.Client(base_url=address, timeout=60) as http:
        with http.stream("POST", "/v1/chat/completions", json=endless(stream=True)) as response:
            lines = response.iter_lines()
            next(lines)
            everyone = psutil.Process().children(recursive=True)
            engines = [each for each in everyone if "spawn_main" in " ".join(each.cmdline())]
            mine = [each for each in engines if str(httpx.URL(address).port) in " ".join(ports(each.parent()))]
            mine[0].kill()
            *_, last = [line for line in lines if line]
        assert "started again" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert_error(http.get("/health"), 503, "engine")
        assert_error(http.post("/v1/chat/completions", json=endless()), 503, "try again")
        until(lambda: http.get("/health").status_code == 200, 60)
        assert http.post("/v1/chat/completions", json={"messages": ASK, **GREEDY}).status_code == 200


def test_how_long_an_answer_must_be(client: openai.OpenAI) -> None:
    def tokens(**extra: object) -> int:
        found = client.chat.completions.create(messages=ASK, extra_body=extra, **(GREEDY | {"max_tokens": 60}))
        assert found.usage is not None
        return found.usage.completion_tokens

    usual = tokens()
    assert usual < 30, "the model does not end by itself: a weak test"
    assert usual < usual + 5 <= tokens(min_tokens=usual + 5)
    assert tokens(ignore_eos=True) == 60
