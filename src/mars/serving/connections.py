"""Limits on connections: how many there are, and how long one may take to say what it wants."""

import json
import logging
import resource
import time
from asyncio import TimerHandle, Transport
from contextlib import suppress
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mars.serving.errors import ApiError

log = logging.getLogger("mars.serving")
HEADER_SECONDS = 10.0  # from the connection, or from the end of the last response, to the end of the next headers
CLOSE_SECONDS = 60.0  # for a client to take what was written to it before it is cut off
LOG_SECONDS = 10.0  # between two lines of the log about too many connections
RESERVED_FILES = 64  # that are not connections


def raise_file_limit(most: int) -> int:
    """Let the process have as many open files as it may; returns how many connections that allows, at most ``most``."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft - RESERVED_FILES))


class LimitedProtocol(HttpToolsProtocol):
    """One connection. At the limit, the one that has been idle longest makes room for a new one."""

    most: ClassVar[int] = 1000
    _logged: ClassVar[float] = float("-inf")
    _deadline: TimerHandle | None = None
    idle_since = 0.0

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()
        if len(self.connections) > self.most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_idle and not self.transport.is_closing():
            self._expect_headers()

    @property
    def is_idle(self) -> bool:
        """Is no request in progress?"""
        return not self.pipeline and (self.cycle is None or self.cycle.response_complete)

    def _expect_headers(self) -> None:
        self._stop_waiting()
        self.idle_since = time.monotonic()
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self.transport.close()
        self.loop.call_later(CLOSE_SECONDS, self.transport.abort)

    def _make_room(self) -> None:
        others: set[Any] = self.connections - {self}
        idle = min((each for each in others if each.is_idle), key=lambda each: each.idle_since, default=None)
        if idle is None:
            self._refuse()
        else:
            self.connections.discard(idle)
            idle.transport.abort()
        if time.monotonic() - self._logged > LOG_SECONDS:
            LimitedProtocol._logged = time.monotonic()
            what = "one was refused" if idle is None else "the one that was idle longest was closed"
            log.warning("too many connections: %s", what, extra={"facts": {"most": self.most}})

    def _refuse(self) -> None:
        error = ApiError(503, f"there are {self.most} connections already: try again later", "service_unavailable")
        body = json.dumps(error.body).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nretry-after: 1\r\nconnection: close"
        self.transport.write(b"HTTP/1.1 503 Service Unavailable\r\n" + head.encode() + b"\r\n\r\n" + body)
        self._give_up()
