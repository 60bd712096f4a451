"""Who may ask: keys and host names, checked before a body is read."""

import secrets

from starlette.types import ASGIApp, Receive, Scope, Send

from mars.serving.errors import ApiError

PROTECTED = ("/v1/", "/tokenize", "/detokenize")
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Access:
    """Refuses requests without a valid key, and those for another host."""

    def __init__(
        self, app: ASGIApp, api_key: str | None, admin_key: str | None, hosts: frozenset[str] | None = None
    ) -> None:
        """``admin_key``: for turning the dial, without one whoever may ask may turn it. ``hosts``: None allows any."""
        self._app = app
        self._api_key = api_key
        self._admin_key = admin_key
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error.response()(scope, receive, send)

    def _error(self, scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        host = _without_port(headers.get(b"host", b"").decode("latin-1").lower())
        if self._hosts is not None and host not in self._hosts:
            return ApiError(400, f"this server is not {host!r}: allow it with --allowed-host", code="unknown_host")
        if not scope["path"].startswith(PROTECTED):
            return None
        turns_dial = scope["path"] == "/v1/dial" and scope["method"] == "PUT"
        if turns_dial and self._admin_key:
            keys, needed = [self._admin_key], "turning the dial needs the admin key"
        else:
            keys = [key for key in (self._api_key, self._admin_key) if key] if self._api_key else []
            needed = "a valid API key is needed"
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        matches = [secrets.compare_digest(given.strip(), key.encode()) for key in keys]
        if not matches or (kind.lower() == b"bearer" and any(matches)):
            return None
        return ApiError(401, f"{needed}: Authorization: Bearer …", code="invalid_api_key")


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host
