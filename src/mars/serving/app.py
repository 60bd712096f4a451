"""The endpoints of the server."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

import mars
from mars.method.acceptance import Dial
from mars.models.prompts import encode, encode_chat
from mars.serving import errors, logs
from mars.serving.access import Access
from mars.serving.body_limit import BodyLimit
from mars.serving.errors import ApiError
from mars.serving.protocol import (
    AUTO,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    DialRequest,
    TokenizeRequest,
)
from mars.serving.service import Service
from mars.serving.tools import Style

PAGE = Path(__file__).parent / "page"
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


def _completions(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(asked: ChatCompletionRequest, http: Request) -> Response:
        service.check_model(asked.model)
        messages, tokenizer = [each.as_dict() for each in asked.messages], service.model.tokenizer
        if asked.may_call:
            box = asked.toolbox(Style.of(tokenizer, service.name))
            prompt = await service.tokenize(lambda: box.encode(tokenizer, messages, service.name))
            grammar = box.grammar(tokenizer)
            return await service.respond(http, asked, service.reply("chat.completion", box), [prompt], grammar)
        prompt = await service.tokenize(lambda: encode_chat(tokenizer, messages, service.name))
        grammar = asked.response_format.grammar if asked.response_format else None
        return await service.respond(http, asked, service.reply("chat.completion"), [prompt], grammar)

    @router.post("/v1/completions")
    async def completions(asked: CompletionRequest, http: Request) -> Response:
        service.check_model(asked.model)
        tokenizer, given = service.model.tokenizer, asked.prompts
        prompts = await service.tokenize(
            lambda: [each if isinstance(each, list) else list(tokenizer(each)["input_ids"]) for each in given]
        )
        return await service.respond(http, asked, service.reply("text_completion"), prompts)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": service.name, "object": "model", "created": 0, "owned_by": "mars"}
        return {"object": "list", "data": [entry | {"max_model_len": service.model.context}]}

    return router


def _tokens(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        tokenizer = service.model.tokenizer

        def work() -> list[int]:
            if asked.messages is not None:
                return encode(tokenizer, [each.as_dict() for each in asked.messages], name=service.name)
            return list(tokenizer(asked.prompt, add_special_tokens=asked.add_special_tokens)["input_ids"])

        tokens = await service.tokenize(work)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.model.context}

    @router.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest) -> dict[str, str]:
        if asked.tokens and max(asked.tokens) >= service.model.vocabulary:
            raise ApiError(400, f"the vocabulary has {service.model.vocabulary} tokens", param="tokens")
        return {"prompt": service.model.tokenizer.decode(asked.tokens)}

    return router


def _dial(service: Service) -> APIRouter:
    router = APIRouter()

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
        reason = service.client.failure or "the engine is being started"
        return ApiError(503, reason, "service_unavailable").response()

    @router.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(service.metrics.text(str(service.dial)), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": mars.__version__}

    return router


def _file(path: Path) -> Callable[[Request], Awaitable[Response]]:
    async def send(_: Request) -> Response:
        return FileResponse(path, headers=UNFRAMED)

    return send
