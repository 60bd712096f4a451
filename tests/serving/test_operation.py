"""What an operator sees and sets: logs, request ids, the governor and its gauges."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

import httpx2 as httpx
import pytest

from mars import cli
from mars.serving import body_limit
from tests.serving.conftest import MODEL, Address, engine_at, serving, until

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "abcabcabc"}], "max_tokens": 8, "temperature": 0}


def test_every_request_has_an_id_and_a_line_in_the_log(server: Address, http: httpx.Client) -> None:
    given = http.post("/v1/chat/completions", json=ASK, headers={"X-Request-ID": "mine-1"})
    made = http.get("/v1/models")
    assert given.headers["x-request-id"] == "mine-1" and len(made.headers["x-request-id"]) == 32
    with http.stream("POST", "/v1/chat/completions", json=ASK | {"stream": True}) as stream:
        streamed = stream.headers["x-request-id"]
        stream.read()
    http.post("/v1/chat/completions", content=b"{", headers={"X-Request-ID": "mine-2\x7f" * 50})

    def lines() -> dict[str, dict]:
        return {line["request_id"]: line for line in server.events("request")}

    until(lambda: streamed in lines())
    line = lines()["mine-1"]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert line["prompt_tokens"] == 9 and line["completion_tokens"] == given.json()["usage"]["completion_tokens"]
    assert line["dial"] == "exact" and line["seconds"] >= line["first_token_seconds"] > 0
    assert line["id"] == given.json()["id"]
    assert lines()[streamed]["finish_reasons"] == lines()["mine-1"]["finish_reasons"]
    assert lines()[made.headers["x-request-id"]]["path"] == "/v1/models"
    assert not any(number.startswith("mine-2") for number in lines())
    assert "abcabcabc" not in server.log.read_text()


def test_a_model_without_masks_cannot_be_turned(chat_model: Path) -> None:
    with serving("--dial", "auto", "--floor", "threshold=0.9", model=chat_model) as address:
        put = httpx.put(f"{address}/v1/dial", json={"dial": "exact"})
        assert put.status_code == 400 and "was not trained for MARS" in put.text
        assert httpx.get(f"{address}/v1/dial").json()["dial"] == "one-token"
        body = {"model": MODEL, "messages": [{"role": "user", "content": "abc"}], "max_tokens": 3}
        assert httpx.post(f"{address}/v1/chat/completions", json=body).status_code == 200


def test_the_governor_on_a_server_that_is_always_late(letters: Path) -> None:
    """It goes down to the floor and no further, tells of it, and leaves the dial alone when it is turned by hand."""
    options = ("--dial", "auto", "--floor", "threshold=0.2", "--target-token", 1e-6, "--log-prompts", "--rows", 4)
    with serving(*options, model=letters) as address, httpx.Client(base_url=address, timeout=30) as http:
        assert http.get("/v1/dial").json() == {"dial": "exact", "floor": "threshold=0.2", "auto": True}
        over = time.monotonic() + 20

        def busy() -> None:
            while time.monotonic() < over:
                http.post("/v1/chat/completions", json=ASK | {"max_tokens": 200, "ignore_eos": True})

        for _ in range(4):
            Thread(target=busy, daemon=True).start()
        until(lambda: address.events("governor"), 15)
        (first, *_) = address.events("governor")
        assert first["dial"] == "threshold=0.6" and first["direction"] == "looser" and first["per_token"] > 1e-6
        gauges = http.get("/metrics").text
        assert f'mars:governor_moves_total{{direction="looser",model_name="{MODEL}"}}' in gauges

        assert http.put("/v1/dial", json={"dial": "exact"}).json()["auto"] is False
        seen = len(address.events("governor"))
        over = 0.0
        time.sleep(1.5)
        assert len(address.events("governor")) == seen
        assert http.get("/v1/dial").json()["dial"] == "exact"
        assert http.put("/v1/dial", json={"dial": "auto"}).json()["auto"] is True
        assert {line["dial"] for line in address.events("governor")} <= {"exact", "threshold=0.6", "threshold=0.2"}
        assert "abcabcabc" in address.log.read_text()  # as asked
        http.post("/v1/chat/completions", json=ASK | {"max_tokens": 200, "ignore_eos": True, "dial": "threshold=0.2"})
        assert 'accepted_tokens_per_pos_total{model_name="letters",position="0"}' in http.get("/metrics").text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dial", "relaxed=0.2", "--floor", "relaxed=0.5"], "looser than the floor"),
        (["--dial", "automatic"], "unknown dial"),
        (["--target-token", "0"], "target-token"),
        (["--log-level", "loud"], "log-level"),
        (["--host", "no.such.host.invalid"], "cannot be listened on"),
    ],
)
def test_options_that_make_no_sense(letters: Path, options: list[str], message: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["mars", "serve", "--model", str(letters), *options])
    with pytest.raises(SystemExit) as error:
        cli.main()
    assert error.value.code and message in capsys.readouterr().err


def test_a_stopped_engine_is_noticed_and_started_again(letters: Path) -> None:
    """As a hung one is: within ten seconds, and whoever waits for it gets an error."""
    with serving(model=letters) as address, httpx.Client(base_url=address, timeout=60) as http:
        first = engine_at(address)
        first.suspend()
        stopped = time.monotonic()
        lost = http.post("/v1/chat/completions", json=ASK)
        assert lost.status_code == 503 and lost.json()["error"]["code"] == "engine_gone"
        assert http.get("/health").status_code == 503 and time.monotonic() - stopped < 10
        until(lambda: http.get("/health").status_code == 200, 60)
        assert engine_at(address).pid != first.pid and not first.is_running()
        assert http.post("/v1/chat/completions", json=ASK).status_code == 200


# --- who may ask, and how long they may take


def connect(address: str, sent: bytes = b"") -> socket.socket:
    url = httpx.URL(address)
    made = socket.create_connection((url.host, url.port), 30)
    made.sendall(sent)
    return made


def answer(made: socket.socket) -> bytes:
    """All that comes until the server hangs up."""
    received = b""
    while part := made.recv(2**16):
        received += part
    return received


def test_keys_come_before_bodies_and_hosts_before_both(letters: Path) -> None:
    options = ("--api-key", "use", "--admin-key", "run", "--allowed-host", "mars.test", "--cors-origin", "http://a.b")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n"
    with serving(*options, model=letters) as address, httpx.Client(base_url=address, timeout=30) as http:
        with connect(address, head) as made:  # its body never comes
            assert b" 401 " in made.recv(1000)

        def ask(key: str = "bearer use", **headers: str) -> httpx.Response:
            return http.post("/v1/chat/completions", json=ASK, headers={"Authorization": key, **headers})

        assert ask().status_code == ask("BEARER run").status_code == 200
        assert ask("use").status_code == ask("Basic use").status_code == ask("").status_code == 401
        for name, status in {"mars.test:80": 200, "LOCALHOST": 200, "[::1]:1": 200, "evil.test": 400}.items():
            assert ask(Host=name).status_code == status
        assert ask(Host="evil.test").json()["error"]["code"] == "unknown_host"
        refused = http.put("/v1/dial", json={"dial": "exact"}, headers={"Authorization": "Bearer use"})
        assert refused.status_code == 401 and "turning the dial needs the admin key" in refused.text
        assert ask(Origin="http://a.b").headers["access-control-allow-origin"] == "http://a.b"
        assert "access-control-allow-origin" not in ask(Origin="http://c.d").headers
        asking = {"Origin": "http://a.b", "Access-Control-Request-Method": "POST"}
        assert http.options("/v1/chat/completions", headers=asking).status_code == 200


def test_the_page_cannot_be_framed(http: httpx.Client) -> None:
    found = http.get("/")
    assert found.headers["x-frame-options"] == "DENY"
    assert found.headers["content-security-policy"] == "frame-ancestors 'none'"


def test_connections_that_say_nothing_make_room_and_end(letters: Path) -> None:
    with serving("--max-connections", 4, "--host", "0.0.0.0", model=letters) as served, ExitStack() as stack:
        [warning] = [line for line in served.log.read_text().splitlines() if "anybody who can reach" in line]
        assert json.loads(warning)["level"] == "warning"
        address = served.replace("0.0.0.0", "127.0.0.1")
        started = time.monotonic()
        idle = [stack.enter_context(connect(address, b"POST /v1/chat" if n else b"")) for n in range(6)]
        assert httpx.get(f"{address}/health").status_code == 200
        assert answer(idle[0]) == answer(idle[1]) == answer(idle[2]) == b"" and time.monotonic() - started < 5
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        busy = [stack.enter_context(connect(address, head)) for _ in range(4)]
        time.sleep(0.5)
        with connect(address) as refused:
            said = answer(refused)
        assert b" 503 " in said and json.loads(said.partition(b"\r\n\r\n")[2])["error"]["type"] == "service_unavailable"
        for each in busy:
            each.close()
        with connect(address, b"POST /v1/chat") as slow:  # its headers never end
            started = time.monotonic()
            assert answer(slow) == b"" and 8 < time.monotonic() - started < 20


def test_a_body_must_arrive_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limit, "BODY_SECONDS", 0.05)
    sent: list[dict] = []

    async def receive() -> dict:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": []}
    asyncio.run(body_limit.BodyLimit(None, most=1000)(scope, receive, send))
    assert sent[0]["status"] == 408 and (b"connection", b"close") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["message"].startswith("the body did not arrive")


@pytest.mark.parametrize(
    ("text", "lone"),
    [
        (r"\ud83d\ude00", False),
        (r"\ud83d", True),
        (r"\ude00\ud83d", True),
        (r"\\\ud83d", True),
        (r"\\ud83d", False),
        (r"\ud83d\\\ude00", True),
        (r"\\ud83d\ude00", True),
        (r"\u00e4", False),
    ],
)
def test_halves_of_characters_are_found_without_parsing(text: str, lone: bool) -> None:
    try:
        json.loads(f'"{text}"').encode()
        assert not lone
    except UnicodeEncodeError:
        assert lone
    assert body_limit._has_lone_surrogates(f'{{"model": "{text}"}}'.encode()) is lone


def test_bodies_made_to_hurt(http: httpx.Client) -> None:
    def post(body: bytes) -> httpx.Response:
        return http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})

    assert post(b"[" * 100_000 + b"]" * 100_000).status_code == 400
    assert post(b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}").status_code == 400
    many = http.post("/v1/chat/completions", json=ASK | {"logit_bias": {str(n): 1 for n in range(2000)}})
    assert many.status_code == 400 and "at most 1024" in many.text
    refused, failed = (
        http.post(
            "/v1/chat/completions",
            json=ASK | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        )
        for schema in ({"type": "nonsense"}, {"type": "string"})
    )
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "response_format"
    assert failed.status_code == 500  # this model has no tokens for JSON
    assert failed.json()["error"]["type"] == "server_error" and "the request has failed" in failed.text
    assert http.post("/v1/chat/completions", json=ASK).status_code == 200


def test_the_dashboard_shows_what_there_is(http: httpx.Client) -> None:
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    there = http.get("/metrics").text
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:vllm|mars):\w+", target["expr"])
    }
    assert len(asked) > 10
    for name in asked:
        assert name in there, name
