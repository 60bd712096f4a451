"""``--engine vllm``: the commands with vLLM and the plugin in our engine's place."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

SECONDS = 240


def mars(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "mars", *map(str, arguments)]


def test_bench_measures_dials_in_vllm(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = mars("bench", "--engine", "vllm", "--model", model, "--dials", "exact,relaxed=0.3", "--batch-sizes", 2)
    command += ["--dtype", "float32", "--max-new-tokens", "24", "--min-requests", "2", "--out", str(out)]
    subprocess.run(command, check=True, timeout=SECONDS)
    found = json.loads(out.read_text())
    rows = {row["dial"]: row for row in found["rows"]}
    assert found["options"]["engine"] == "vllm"
    assert rows["one-token"]["tokens_per_forward"] == 1
    assert rows["exact"]["tokens_per_forward"] > 1.3 and rows["exact"]["same_text"] == 1
    assert rows["relaxed=0.3"]["tokens_per_forward"] > 1.3


def test_eval_answers_with_vllm(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    questions = [{"question": f"Tom has {n} apples and eats one. How many are left?", "answer": f"#### {n - 1}"}
                 for n in (3, 5, 8)]  # fmt: skip
    (data / "gsm8k_test.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    command = mars("eval", "--engine", "vllm", "--model", model, "--tasks", "gsm8k", "--dials", "one-token,exact")
    command += [
        "--dtype",
        "float32",
        "--max-new-tokens",
        "32",
        "--data-dir",
        str(data),
        "--rows",
        "4",
        "--out",
        str(out),
    ]
    subprocess.run(command, check=True, timeout=SECONDS)
    rows = {row["dial"]: row for row in json.loads((out / "results.json").read_text())["rows"]}
    assert rows["exact"]["same_text"] == 1 and rows["exact"]["tokens_per_forward"] > 1.3
    assert rows["one-token"]["tokens_per_forward"] == 1


def test_serve_speaks_of_the_dial_as_our_server_does() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = mars("serve", "--engine", "vllm", "--port", port, "--rows", 4, "--dial", "relaxed=0.3", "--api-key", "k")
    command += ["--", "--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    server = subprocess.Popen(command, env=os.environ)
    try:
        headers = {"Authorization": "Bearer k"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
            _wait_for(client, server)
            assert client.get("/v1/dial").json()["dial"] == "relaxed=0.3"
            assert client.put("/v1/dial", json={"dial": "exact"}).json()["dial"] == "exact"
            assert client.get("/v1/models").json()["data"][0]["id"] == "smollm2-135m"
            messages = [{"role": "user", "content": "Count from one to twenty in words."}]
            body: dict[str, Any] = {"model": "smollm2-135m", "messages": messages, "max_tokens": 24, "temperature": 0}
            assert client.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 24
            assert client.get("/v1/dial").json()["tokens_per_forward"] > 1.2
            assert httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=60).status_code == 401
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def _wait_for(client: httpx.Client, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError("the server did not start")
