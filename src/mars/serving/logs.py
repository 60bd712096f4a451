"""Logs for machines: a line of JSON for everything that happens, with the request's id where there is one."""

import json
import logging
import re
import time
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers.utils import logging as library_logging

log = logging.getLogger("mars.serving")
ID_HEADER = b"x-request-id"
USABLE_ID = re.compile(rb"[\x21-\x7e]{1,128}")
QUIET = ("/health", "/metrics")  # asked for so often that only failures are worth a line


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def install(level: str) -> None:
    """To standard error: our lines, and the warnings of all libraries, which have no progress bars here."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(handlers=[handler], level="WARNING", force=True)
    logging.captureWarnings(True)
    logging.getLogger("mars").setLevel(level.upper())
    for library in ("transformers", "huggingface_hub"):  # they have handlers of their own
        logger = logging.getLogger(library)
        logger.handlers, logger.propagate = [], True
    library_logging.disable_progress_bar()


def note(scope: Scope, **facts: Any) -> None:
    """Have these facts in the line of a request."""
    scope.setdefault("facts", {}).update(facts)


class RequestLog:
    """Gives every request an id, its own or a new one, and writes a line when it has ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(ID_HEADER, b"")
        number = given if USABLE_ID.fullmatch(given) else uuid4().hex.encode()
        started, status = time.perf_counter(), 0
        note(scope, request_id=number.decode())

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (ID_HEADER, number)]}
            await send(message)

        try:
            await self._app(scope, receive, answer)
        except Exception:
            status = 500  # what is answered then is made further out
            raise
        finally:
            level = logging.DEBUG if scope["path"] in QUIET and status < 400 else logging.INFO
            facts = {"method": scope["method"], "path": scope["path"], "status": status}
            facts |= {"seconds": round(time.perf_counter() - started, 4)} | scope["facts"]
            log.log(level, "request", extra={"facts": facts})
