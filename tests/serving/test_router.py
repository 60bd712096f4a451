"""Two servers behind nginx, as docs/nginx.conf has it: spread, streamed, and one stands in for the other."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

from mars import cli
from tests.serving.conftest import CHAT, crowd, kill_engine, number, process_at, serving, until

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="no nginx: apt-get install nginx-light")
CONFIG = Path(__file__).parents[2] / "docs" / "nginx.conf"
PLACES = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
"""Where nginx puts what it cannot keep in memory"""


@contextmanager
def routed(folder: Path, *replicas: str) -> Iterator[str]:
    """nginx with docs/nginx.conf, but between these ports; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        mine = f"127.0.0.1:{free.getsockname()[1]}"
    config = CONFIG.read_text().replace("127.0.0.1:8000", mine)
    for old, replica in zip(("127.0.0.1:8001", "127.0.0.1:8002"), replicas, strict=True):
        assert config.count(old) == 1
        config = config.replace(old, replica.removeprefix("http://"))
    places = "".join(f"{each}_temp_path {folder}/{each};\n" for each in PLACES)
    config = config.replace("/var/log/nginx", str(folder)).replace("http {", f"http {{\n{places}")
    (folder / "nginx.conf").write_text(config)
    user = "user root;" if os.geteuid() == 0 else ""
    rest = f"daemon off; pid {folder}/pid; error_log stderr; {user}"
    process = subprocess.Popen([str(NGINX), "-e", "stderr", "-p", folder, "-c", folder / "nginx.conf", "-g", rest])
    try:
        until(lambda: process.poll() is not None or can_connect(mine))
        assert process.poll() is None, "nginx did not start"
        yield f"http://{mine}"
    finally:
        process.terminate()
        assert process.wait(10) == 0


def can_connect(address: str) -> bool:
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.fixture(scope="module")
def other(letters: Path) -> Iterator[str]:
    """A second replica, with little room."""
    with serving("--rows", 2, "--max-waiting", 2, model=letters) as address:
        yield address


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nginx") / "mars.log"


@pytest.fixture(scope="module")
def router(server: str, other: str, log: Path) -> Iterator[httpx.Client]:
    with routed(log.parent, server, other) as address, httpx.Client(base_url=address, timeout=30) as client:
        yield client


def ask(client: httpx.Client, **options: object) -> httpx.Response:
    return client.post("/v1/chat/completions", json=CHAT | options)


def logged(log: Path, count: int) -> list[dict]:
    """The last lines of nginx's log, which it writes after it has answered."""
    return [json.loads(line) for line in log.read_text().splitlines()[-count:]]


def test_requests_are_spread(router: httpx.Client, server: str, other: str) -> None:
    before = [number(each, "request_success_total") for each in (server, other)]
    assert all(ask(router).status_code == 200 for _ in range(8))
    after = [number(each, "request_success_total") for each in (server, other)]
    assert [new - old for new, old in zip(after, before, strict=True)] == [4, 4]


def test_a_stream_arrives_as_it_is_written(router: httpx.Client) -> None:
    body = CHAT | {"stream": True, "max_tokens": 200, "ignore_eos": True, "dial": "one-token"}
    for _ in range(2):  # through both
        with router.stream("POST", "/v1/chat/completions", json=body) as response:
            pieces = [(piece, time.monotonic()) for piece in response.iter_raw()]
        assert pieces[-1][0].endswith(b"data: [DONE]\n\n")
        assert len({at for _, at in pieces}) > 5 and pieces[-1][1] - pieces[0][1] > 0.02, "it came all at once"


def test_a_full_queue_is_told(router: httpx.Client, other: str) -> None:
    with crowd(other, 2, 2):
        assert sorted(ask(router).status_code for _ in range(2)) == [200, 429]


def test_the_dial_is_turned_on_all(
    router: httpx.Client, server: str, other: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def typed(*arguments: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["mars", "dial", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        return int(left.value.code or 0), (said.out + said.err).strip().splitlines()

    everywhere = ("--url", server, "--url", other)
    try:
        said = [f"{server}: relaxed=0.3", f"{other}: relaxed=0.3"]
        assert typed("relaxed=0.3", *everywhere) == typed(*everywhere) == (0, said)
        assert {ask(router).json()["mars"]["dial"] for _ in range(4)} == {"relaxed=0.3"}
        nobody = "http://127.0.0.1:9"
        code, said = typed("exact", "--url", nobody, *everywhere)
        assert code == 2 and said[:2] == [f"{server}: exact", f"{other}: exact"]
        assert len(said) == 3 and said[2].startswith(f"error: 1 of 3 servers failed: there is no server at {nobody}")
    finally:
        typed("exact", *everywhere)
    refused = router.put("/v1/dial", json={"dial": "one-token"})
    assert refused.status_code == 403 and "mars dial" in refused.json()["error"]["message"]
    assert router.get("/v1/dial").json()["dial"] == "exact"
    assert router.get("/metrics").status_code == 404


def test_requests_have_names(router: httpx.Client, log: Path) -> None:
    """The client's, or one of nginx's own; the replica says it again."""
    given = router.get("/version", headers={"X-Request-ID": "mine"}).headers.get_list("X-Request-ID")
    made = router.get("/version").headers.get_list("X-Request-ID")
    assert given == ["mine"] != made
    until(lambda: [each["request_id"] for each in logged(log, 2)] == given + made)


def test_nobody_is_there(tmp_path: Path) -> None:
    with routed(tmp_path, "127.0.0.1:9", "127.0.0.1:10") as url:
        response = httpx.post(f"{url}/v1/chat/completions", json=CHAT)
    assert response.status_code == 503 and response.headers["Retry-After"] == "1"
    assert "no replica" in response.json()["error"]["message"] and response.headers["X-Request-ID"]


def test_one_stands_in_for_the_other(router: httpx.Client, server: str, other: str, log: Path, tmp_path: Path) -> None:
    """First without its engine, then gone. The last test, therefore."""
    both = ", ".join(each.removeprefix("http://") for each in (other, server))

    def stands_in(client: httpx.Client, log: Path) -> bool:
        before = number(server, "request_success_total")
        assert [ask(client).status_code for _ in range(4)] == [200] * 4
        assert number(server, "request_success_total") - before == 4
        return both in [each["replica"] for each in logged(log, 4)]

    kill_engine(other)
    until(lambda: httpx.get(f"{other}/health").status_code == 503)
    assert stands_in(router, log)
    stopped = process_at(other)
    stopped.terminate()
    until(lambda: stopped.status() == psutil.STATUS_ZOMBIE, 20)
    with routed(tmp_path, server, other) as address, httpx.Client(base_url=address, timeout=30) as client:
        assert stands_in(client, tmp_path / log.name)
