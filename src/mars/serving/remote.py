"""A server somewhere else, as ``mars dial`` sees it."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from typing import Any

from mars.errors import MarsError


def dial_of(url: str, key: str | None = None, turn_to: str | None = None) -> dict[str, Any]:
    """The dial of the server at ``url``, after it was turned if that was asked."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    body = None if turn_to is None else json.dumps({"dial": turn_to}).encode()
    address = f"{url.rstrip('/')}/v1/dial"
    try:
        request = urllib.request.Request(address, body, headers, method="GET" if body is None else "PUT")
        with urllib.request.urlopen(request, timeout=10) as response:
            state = json.load(response)
    except urllib.error.HTTPError as error:
        raise MarsError(f"{url} says: {_message(error)}") from None
    except (OSError, ValueError, HTTPException) as error:
        raise MarsError(f"there is no server at {url}: {getattr(error, 'reason', error)}") from None
    if not isinstance(state, dict) or "dial" not in state:
        raise MarsError(f"what answers at {url} has no dial: is it `mars serve`, or vLLM with mars?")
    return state


def dials_of(
    urls: Sequence[str], key: str | None = None, turn_to: str | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(url, its dial) of several servers. All are tried before it is told which of them failed."""
    failures = []
    for url in urls:
        try:
            state = dial_of(url, key, turn_to)
        except MarsError as error:
            failures.append(str(error))
        else:
            yield url, state
    if failures:
        count = f"{len(failures)} of {len(urls)} servers failed: " if len(urls) > 1 else ""
        raise MarsError(count + "; ".join(failures))


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"{error.code} {error.reason}"
