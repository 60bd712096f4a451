"""A limit on the bodies of requests, before they are parsed."""

import asyncio
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars.serving.errors import ApiError

BODY_SECONDS = 30.0  # for a whole body to arrive
CLOSE = {"Connection": "close"}
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")


class BodyLimit:
    """Refuses bodies that are too long before they are read, and those with lone surrogates."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._most:
            await self._too_long().response()(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        except TimeoutError:
            late = ApiError(408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds", headers=CLOSE)
            await late.response()(scope, receive, send)
            return
        if body is None:
            return  # the client is gone
        if _has_lone_surrogates(body):
            await ApiError(400, "the body has halves of characters (lone surrogates)").response()(scope, receive, send)
            return
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return parts.pop() if parts else await receive()

        await self._app(scope, again, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None if the client hangs up."""
        body, ended = bytearray(), False
        while not ended:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            ended = not message.get("more_body", False)
            if len(body) > self._most:
                raise self._too_long()
        return bytes(body)

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self._most} bytes")


def _has_lone_surrogates(body: bytes) -> bool:
    """Does some text in it have half of a pair like \\ud83d\\ude00? JSON may have that, text may not.

    Found without parsing, which would take too long for a large body.
    """
    if SURROGATE.search(body) is None:
        return False
    unescaped = body.replace(rb"\\", b"_")  # a backslash itself, so that what follows is no escape
    return SURROGATE.search(PAIR.sub(b"_", unescaped)) is not None
