"""Errors in the shape that OpenAI's clients know."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from mars.engine import QueueFullError
from mars.errors import MarsError
from mars.serving.engine_client import EngineGoneError, RequestFailedError

RETRY_SECONDS = "1"


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


def to_api_error(error: MarsError) -> ApiError:
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), "rate_limit_error", code="queue_full", headers={"Retry-After": RETRY_SECONDS})
    if isinstance(error, EngineGoneError):
        return ApiError(
            503, str(error), "service_unavailable", code="engine_gone", headers={"Retry-After": RETRY_SECONDS}
        )
    if isinstance(error, RequestFailedError):
        return ApiError(500, str(error), "server_error", code="request_failed")
    return ApiError(400, str(error), param=getattr(error, "param", None), code=getattr(error, "code", None))


def from_validation(errors: list[dict[str, Any]]) -> ApiError:
    """The first of pydantic's complaints, in words."""
    first = errors[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(where) or None
    match first["type"]:
        case "extra_forbidden":
            return ApiError(400, f"unsupported parameter: {param}", param=param, code="unsupported_parameter")
        case "missing" if not where:
            return ApiError(400, "the request has no body: send a JSON object")
        case "missing":
            return ApiError(400, f"missing parameter: {param}", param=param, code="missing_parameter")
        case "json_invalid":
            return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
        case _:
            said = str(first["msg"]).removeprefix("Value error, ")
            return ApiError(400, f"{param}: {said}" if param else said, param=param, code="invalid_value")


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
        return from_validation(list(error.errors())).response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"there is no {request.method} {request.url.path}"
        elif error.status_code == 400:
            message = "the body could not be read: send a JSON object in UTF-8"
        return ApiError(error.status_code, message).response()

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        response = ApiError(500, f"internal error: {type(error).__name__}", "server_error").response()
        if number := request.scope.get("facts", {}).get("request_id"):
            response.headers["X-Request-ID"] = number
        return response
