"""What an operator sees and sets: logs, request ids, the governor and its gauges."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from threading import Thread

import httpx2 as httpx
import pytest

from mars import cli
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
        assert lost.status_code == 503 and "does not answer" in lost.json()["error"]["message"]
        assert http.get("/health").status_code == 503 and time.monotonic() - stopped < 10
        until(lambda: http.get("/health").status_code == 200, 60)
        assert engine_at(address).pid != first.pid and not first.is_running()
        assert http.post("/v1/chat/completions", json=ASK).status_code == 200
