"""The endpoints of the server."""

from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Path, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

import mars
from mars.method.acceptance import Dial
from mars.models.prompts import encode, encode_chat
from mars.serving import errors, logs
from mars.serving.access import Access
from mars.serving.body_limit import BodyLimit
from mars.serving.errors import ApiError, naming
from mars.serving.protocol import (
    AUTO,
    BaseCompletionRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    DialRequest,
    TokenizeRequest,
)
from mars.serving.service import Service
from mars.serving.tools import Style

PAGE = FilePath(__file__).parent / "page"
UNFRAMED = {"X-Frame-Options": "DENY", "Content-Security-Policy": "frame-ancestors 'none'"}


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="MARS", version=mars.__version__, docs_url=None, redoc_url=None, responses=errors.POSSIBLE)
    rules = service.rules
    app.add_middleware(BodyLimit, most=rules.max_body)
    app.add_middleware(Access, api_key=rules.api_key, admin_key=rules.admin_key, hosts=rules.hosts)
    if rules.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=rules.cors_origins, allow_methods=["*"], allow_headers=["*"], max_age=3600
        )
    app.add_middleware(logs.RequestLog)
    errors.install(app)
    app.include_router(_completions(service))
    app.include_router(_tokens(service))
    app.include_router(_dial(service))
    app.include_router(_operation(service))
    for file in sorted(PAGE.iterdir()):
        path = "/" if file.name == "index.html" else f"/{file.name}"
        app.add_route(path, _file(file), include_in_schema=False)
    return app


class JsonRoute(APIRoute):
    """Reads bodies as JSON whatever their Content-Type, since curl calls them forms unless it is told otherwise.

    Those that a browser sends for a page are the exception: only if JSON is called JSON, it asks the server first.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(http: Request) -> Response:
            given = [(name, value) for name, value in http.scope["headers"] if name != b"content-type"]
            if "origin" not in http.headers:
                http.scope["headers"] = [*given, (b"content-type", b"application/json")]
            elif http.method in ("POST", "PUT") and "json" not in http.headers.get("content-type", ""):
                raise ApiError(400, "send the body as JSON, with Content-Type: application/json")
            return await handle(Request(http.scope, http.receive))

        return handle_json


def _completions(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions")
    async def chat_completions(asked: ChatCompletionRequest, http: Request) -> Response:
        _check(service, asked, http)
        with naming(prompt="messages", grammar="tools" if asked.may_call else "response_format"):
            return await _chat(service, asked, http)

    @router.post("/v1/completions")
    async def completions(asked: CompletionRequest, http: Request) -> Response:
        _check(service, asked, http)
        tokenizer, given = service.model.tokenizer, asked.prompt
        prompts = await service.tokenize(
            http, lambda: [each if isinstance(each, list) else list(tokenizer(each)["input_ids"]) for each in given]
        )
        return await service.respond(http, asked, service.reply("text_completion"), prompts)

    def entry() -> dict[str, Any]:
        about = {"id": service.name, "object": "model", "created": 0, "owned_by": "mars"}
        model = service.model
        return about | {"max_model_len": model.context, "batch_invariant": model.is_batch_invariant}

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry()]}

    @router.get("/v1/models/{model:path}")
    async def model(model: Annotated[str, Path(json_schema_extra={"enum": [service.name]})]) -> dict[str, Any]:
        service.check_model(model)
        return entry()

    return router


def _check(service: Service, asked: BaseCompletionRequest, http: Request) -> None:
    service.check_model(asked.model)
    if asked.ignored:
        logs.note(http.scope, ignored=asked.ignored)


async def _chat(service: Service, asked: ChatCompletionRequest, http: Request) -> Response:
    messages, tokenizer = [each.as_dict() for each in asked.messages], service.model.tokenizer
    box = asked.toolbox(Style.of(tokenizer, service.name)) if asked.may_call else None

    def encode() -> tuple[list[int], str | None]:
        if box is not None:
            return box.encode(tokenizer, messages, service.name), box.grammar(tokenizer)
        grammar = asked.response_format.grammar if asked.response_format else None
        return encode_chat(tokenizer, messages, service.name), grammar

    prompt, grammar = await service.tokenize(http, encode)
    return await service.respond(http, asked, service.reply("chat.completion", box), [prompt], grammar)


def _tokens(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/tokenize")
    async def tokenize(asked: TokenizeRequest, http: Request) -> dict[str, Any]:
        tokenizer = service.model.tokenizer

        def work() -> list[int]:
            if asked.messages is not None:
                return encode(tokenizer, [each.as_dict() for each in asked.messages], name=service.name)
            return list(tokenizer(asked.prompt, add_special_tokens=asked.add_special_tokens)["input_ids"])

        with naming(prompt="prompt" if asked.messages is None else "messages"):
            tokens = await service.tokenize(http, work)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.model.context}

    @router.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest) -> dict[str, str]:
        if asked.tokens and max(asked.tokens) >= service.model.vocabulary:
            raise ApiError(400, f"the vocabulary has {service.model.vocabulary} tokens", param="tokens")
        return {"prompt": service.model.tokenizer.decode(asked.tokens)}

    return router


def _dial(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    def state() -> dict[str, Any]:
        floor = None if service.rules.floor is None else str(service.rules.floor)
        return {"dial": str(service.dial), "floor": floor, "auto": service.is_auto}

    @router.get("/v1/dial")
    async def show_dial() -> dict[str, Any]:
        return state()

    @router.put("/v1/dial")
    async def turn_dial(asked: DialRequest) -> dict[str, Any]:
        service.set_dial(None if asked.dial == AUTO else Dial.parse(asked.dial))
        return state()

    return router


def _operation(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> JSONResponse:
        if service.client.is_ready:
            return JSONResponse({"status": "ok"})
        return ApiError(503, "the engine is being started", "service_unavailable").response()  # why is in the log

    @router.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(service.metrics.text(str(service.dial)), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": mars.__version__}

    return router


def _file(path: FilePath) -> Callable[[Request], Awaitable[Response]]:
    async def send(_: Request) -> Response:
        return FileResponse(path, headers=UNFRAMED)

    return send
