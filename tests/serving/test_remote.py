"""`mars dial` and what answers at a URL that is no server of ours."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mars.errors import MarsError
from mars.serving.remote import dial_of, dials_of


@contextmanager
def answering(data: bytes) -> Iterator[str]:
    """The URL of something that says this to whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(2**16)
                    connection.sendall(data)

        threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def http(content: object) -> bytes:
    body = json.dumps(content).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "there is no server at"),
        (http([]), "has no dial"),
        (http({"state": 1}), "has no dial"),
    ],
)
def test_what_is_no_server_of_ours(data: bytes, says: str) -> None:
    with answering(data) as url, pytest.raises(MarsError, match=says):
        dial_of(url)


def test_a_port_that_is_none() -> None:
    with pytest.raises(MarsError, match="there is no server at"):
        dial_of("http://127.0.0.1:PORT")


def test_the_other_servers_are_turned_all_the_same() -> None:
    turned = []
    with answering(http({"dial": "exact"})) as good:
        with pytest.raises(MarsError, match="1 of 2 servers failed"):
            turned.extend(dials_of(["http://127.0.0.1:PORT", good], turn_to="exact"))
        assert turned == [(good, {"dial": "exact"})]
