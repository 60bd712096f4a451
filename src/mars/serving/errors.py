"""Errors in the shape that OpenAI's clients know."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match

from mars.core.request import ContextLengthError
from mars.engine import QueueFullError
from mars.errors import MarsError
from mars.serving.engine_client import EngineGoneError, RequestFailedError

log = logging.getLogger("mars.serving")
RETRY_SECONDS = "1"
NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "ignore_end": "ignore_eos"}
"""Parameters of the core, as requests call them"""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class Complaint(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What a client gets instead of an answer."""

    error: Complaint


POSSIBLE: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": what}
    for status, what in {
        400: "A parameter is wrong, missing or not supported",
        401: "A key is needed",
        404: "No such model",
        413: "The body is too long",
        429: "The queue is full: try again after Retry-After",
        503: "The engine is being started: try again after Retry-After",
    }.items()
}  # for the OpenAPI document


class ApiError(Exception):
    """An error that a client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=dict(self.headers or {}))


def to_api_error(error: MarsError, names: Mapping[str, str] | None = None) -> ApiError:
    """``names``: what the request calls parameters of the core, besides `NAMES`."""
    retry = {"Retry-After": RETRY_SECONDS}
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), "rate_limit_error", code="queue_full", headers=retry)
    if isinstance(error, EngineGoneError):  # why is in the log
        message = "the engine has ended and is being started again: try again in a moment"
        return ApiError(503, message, "service_unavailable", code="engine_gone", headers=retry)
    if isinstance(error, RequestFailedError):
        return ApiError(500, str(error), "server_error", code="request_failed")
    message = re.sub(r"\b(?:" + "|".join(NAMES) + r")\b", lambda name: NAMES[name[0]], str(error))
    param = error.param and {**NAMES, **(names or {})}.get(error.param, error.param)
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else "invalid_value" if param else None
    return ApiError(400, message, param=param, code=code)


@contextmanager
def naming(**names: str) -> Iterator[None]:
    """Errors of the core leave with the names that the request has for its parameters."""
    try:
        yield
    except MarsError as error:
        raise to_api_error(error, names) from error


def from_validation(errors: Sequence[Any], body: Any = None) -> ApiError:
    """The first of pydantic's complaints about a body, in words."""
    first = errors[0]
    kind, context = first["type"], first.get("ctx") or {}
    where = _place(first["loc"][1:], body, is_missing=kind == "missing")
    param = ".".join(where) or getattr(context.get("error"), "param", None)
    match kind:
        case "extra_forbidden":
            return ApiError(400, f"unsupported parameter: {param}", param=param, code="unsupported_parameter")
        case "missing" if not where:
            return ApiError(400, "the request has no body: send a JSON object")
        case "union_tag_not_found":
            return ApiError(400, f"missing parameter: {param}.type", param=f"{param}.type", code="missing_parameter")
        case "missing":
            return ApiError(400, f"missing parameter: {param}", param=param, code="missing_parameter")
        case "json_invalid":
            return ApiError(400, f"the body is not valid JSON: {context['error']}", code="invalid_json")
        case "union_tag_invalid":
            param, said = f"{param}.type", f"must be {context['expected_tags']}, not '{context['tag']}'"
        case "model_type" | "model_attributes_type" | "dict_type":
            said = "must be a JSON object" if where else "the body must be a JSON object"
        case _:
            said = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{'.'.join(where)}: {said}" if where else said, param=param, code="invalid_value")


def _place(location: Sequence[str | int], body: Any, *, is_missing: bool) -> list[str]:
    """Where in the body an error is. What the body does not have is pydantic's name for a branch of a union."""
    place = []
    for depth, key in enumerate(location, 1):
        known: Any = body if isinstance(body, dict) else range(len(body)) if isinstance(body, list) else ()
        if key in known:
            body = body[key]
        elif not (is_missing and depth == len(location)):
            continue
        place.append(str(key))
    return place


def _allowed(request: Request) -> str:
    """The methods that there are for a path."""
    routes = request.app.routes
    return ", ".join(
        method
        for method in METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    )


def install(app: FastAPI) -> None:
    """Have every error leave in this shape."""

    @app.exception_handler(ApiError)
    async def known(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(MarsError)
    async def ours(_: Request, error: MarsError) -> JSONResponse:
        return to_api_error(error).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return from_validation(error.errors(), error.body).response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message, headers = str(error.detail), dict(error.headers or {})
        if error.status_code in (404, 405):
            message = f"there is no {request.method} {request.url.path}"
        elif error.status_code == 400:
            message = "the body could not be read: send a JSON object in UTF-8"
        if error.status_code == 405:
            headers = {"Allow": _allowed(request)}
        return ApiError(error.status_code, message, headers=headers).response()

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        number = request.scope.get("facts", {}).get("request_id")
        log.error("internal error", exc_info=error, extra={"facts": {"request_id": number}})
        what = f" for the request {number}" if number else ""
        response = ApiError(500, f"internal error: see the server's log{what}", "server_error").response()
        if number:
            response.headers["X-Request-ID"] = number
        return response
