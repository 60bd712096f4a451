"""A limit on the bodies of requests, before they are parsed."""

import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars.serving.errors import ApiError


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
        body, ended = b"", False
        too_long = declared.isdigit() and int(declared) > self._most
        while not ended and not too_long:
            message = await receive()
            body += message.get("body", b"")
            ended = not message.get("more_body", False)
            too_long = len(body) > self._most
        if too_long:
            await ApiError(413, f"the body is longer than {self._most} bytes").response()(scope, receive, send)
            return
        if _has_lone_surrogates(body):
            await ApiError(400, "the body has halves of characters (lone surrogates)").response()(scope, receive, send)
            return
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return parts.pop() if parts else await receive()

        await self._app(scope, again, send)


def _has_lone_surrogates(body: bytes) -> bool:
    """Does some text in it have half of a pair like \\ud83d\\ude00? JSON may have that, text may not."""
    if b"\\ud" not in body.lower():
        return False
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        pass  # not JSON at all, which is told elsewhere
    return False
