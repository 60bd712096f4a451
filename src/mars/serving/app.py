"""The server: endpoints, keys and limits around a `Backend`."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import mars
from mars.decoding.decoder import require_masks
from mars.decoding.grammar import lexicon_of
from mars.decoding.request import Request as EngineRequest
from mars.errors import MarsError
from mars.method.acceptance import Dial
from mars.models.prompts import encode, encode_chat
from mars.serving import errors, logs, replies
from mars.serving.backend import Backend, EngineGoneError, Ticket
from mars.serving.errors import ApiError, to_api_error
from mars.serving.governor import TICK, Governor, Meter, Target, ladder
from mars.serving.messages import Ready
from mars.serving.metrics import Metrics
from mars.serving.protocol import (
    AUTO,
    ChatCompletionRequest,
    Completing,
    CompletionRequest,
    DetokenizeRequest,
    DialRequest,
    StreamOptions,
    TokenizeRequest,
)
from mars.serving.tools import Style, Toolbox

log = logging.getLogger("mars.serving")
T = TypeVar("T")
PAGE = Path(__file__).parent / "page"
READERS = 2
"""Threads that turn messages into tokens: with many, the loop would have to wait for all of them"""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the operator allows."""

    api_key: str | None = None
    admin_key: str | None = None
    """For turning the server's dial; without one, whoever may ask may turn it"""
    floor: Dial | None = None
    """The loosest dial; None: any"""
    max_body: int = 4 * 2**20
    max_new_tokens: int | None = None
    """Of one answer; longer ones are refused"""
    log_prompts: bool = False
    """And answers"""

    def allows(self, dial: Dial) -> bool:
        """Is this dial as strict as the floor? Dials of different kinds cannot be compared, so only its own kind is."""
        if self.floor is None or not dial.is_loose:
            return True
        same = (dial.kind, dial.measure) == (self.floor.kind, self.floor.measure)
        return same and (dial.value or 0.0) >= (self.floor.value or 0.0)

    def require(self, dial: Dial) -> Dial:
        if not self.allows(dial):
            raise ApiError(400, f"the dial {dial} is not allowed here: nothing looser than {self.floor}", param="dial")
        return dial


class Service:
    """The endpoints' common ground."""

    def __init__(self, backend: Backend, rules: Rules, *, auto: bool = False, target: Target | None = None) -> None:
        self.backend = backend
        self.rules = rules
        self.metrics = Metrics(backend, self.name)
        self._readers = ThreadPoolExecutor(READERS, "reader")
        strict = Dial("exact") if self.facts.dial.is_loose else self.facts.dial
        floor = rules.floor if self.facts.settings else None  # without masks, there is nothing to turn
        self._governor = Governor(ladder(strict, floor), target or Target())
        self.is_auto = False
        if auto:
            self.turn(None)
        elif not rules.allows(self.dial):  # the model's own may be looser than the floor
            self.turn(strict)
        require_masks(self.facts, self.dial)

    @property
    def facts(self) -> Ready:
        if self.backend.facts is None:
            raise EngineGoneError("the engine is not ready: try again in a moment")
        return self.backend.facts

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def dial(self) -> Dial:
        return self.backend.dial or self.facts.dial

    async def read(self, encode: Callable[[], T]) -> T:
        """Text becomes tokens in a thread, so that no long one holds up the streams."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, encode)

    def reply(self, kind: str, tools: Toolbox | None = None) -> replies.Reply:
        return replies.Reply(kind, self.name, self.facts.tokenizer, tools)

    def turn(self, dial: Dial | None) -> None:
        """By hand; None leaves it to the governor from now on."""
        if dial is not None:
            require_masks(self.facts, self.rules.require(dial))
        self.backend.turn(dial or self._governor.dial)
        self.is_auto = dial is None
        log.info("dial", extra={"facts": {"dial": str(self.dial), "auto": self.is_auto}})

    async def govern(self) -> None:
        """Turn the dial by load, whenever that is wanted."""
        meter, governor = Meter(self.backend), self._governor
        while True:
            await asyncio.sleep(TICK)
            load, rung = meter.read(), governor.rung
            if not self.is_auto or not governor.observe(load, time.perf_counter()):
                continue
            self.backend.turn(governor.dial)
            direction = "looser" if governor.rung > rung else "stricter"
            self.metrics.moves.labels(self.name, direction).inc()
            facts = {"dial": str(governor.dial), "direction": direction, **asdict(load)}
            log.info("governor", extra={"facts": facts})

    def check_model(self, model: str) -> None:
        if model != self.name:
            raise ApiError(
                404, f"there is no model {model}: this server has {self.name}", param="model", code="model_not_found"
            )

    def submit(self, asked: Completing, prompt: list[int], grammar: str | None) -> list[Ticket]:
        """The ``n`` choices of a prompt."""
        limit = asked.limit
        dial = None if asked.dial is None else self.rules.require(Dial.parse(asked.dial))
        most = self.rules.max_new_tokens
        if most is not None and (limit or 0) > most:
            raise ApiError(400, f"at most {most} new tokens are allowed, not {limit}", param="max_tokens")
        room = self.facts.context - len(prompt)
        tickets: list[Ticket] = []
        try:
            for choice in range(asked.n):
                request = EngineRequest(
                    prompt,
                    dial or Dial("one-token"),
                    asked.sampling(choice),
                    max_new_tokens=min(limit or most or room, max(1, room)),
                    stop=asked.stops,
                    block_size=self.facts.block_size,
                    min_new_tokens=asked.min_tokens,
                    ignore_end=asked.ignore_eos,
                    logprobs=asked.alternatives,
                    grammar=grammar,
                )
                if dial is None:
                    request.obey(self.dial)
                tickets.append(self.backend.submit(request, follows=dial is None))
        except MarsError:
            self.drop(tickets)
            raise
        return tickets

    def drop(self, tickets: Sequence[Ticket]) -> None:
        """Be done with them, finished or not."""
        for ticket in tickets:
            self.backend.drop(ticket)
            self.metrics.finish(ticket)

    async def respond(
        self,
        http: Request,
        asked: Completing,
        reply: replies.Reply,
        prompts: list[list[int]],
        grammar: str | None = None,
    ) -> Response:
        tickets: list[Ticket] = []
        if len(prompts) * asked.n > self.backend.capacity:
            raise ApiError(400, f"at most {self.backend.capacity} answers can be asked for at once", param="n")
        try:
            if grammar is not None:  # is it one?
                await asyncio.to_thread(lambda: lexicon_of(self.facts).guide(grammar))
            for prompt in prompts:
                tickets += self.submit(asked, prompt, grammar)
            is_there = await _unless_gone(http, tickets[0].advance())  # an error up to here has a status of its own
        except BaseException:
            self.drop(tickets)
            raise
        if not is_there:
            self.drop(tickets)
            return Response(status_code=499)  # nobody reads it
        count = sum(map(len, prompts))
        if asked.stream:
            events = self._events(http, tickets, reply, count, asked.stream_options or StreamOptions())
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        try:
            await _unless_gone(http, _finish(tickets))
        finally:
            self.close(http, tickets, reply)
        answers = [ticket.answer for ticket in tickets]
        return JSONResponse(reply.whole(count, answers, [answer.text for answer in answers]))

    def close(self, http: Request, tickets: Sequence[Ticket], reply: replies.Reply) -> None:
        """Drop what a response was made of, and have it in the log."""
        self.drop(tickets)
        answers = [ticket.answer for ticket in tickets]
        counted = replies.usage(sum(len(each.request.prompt) for each in answers), answers)
        ends = [answer.finish_reason or "abort" for answer in answers]
        logs.note(http.scope, id=reply.id, finish_reasons=ends, **counted, **replies.figures(answers))
        if times := [answer.times[0] for answer in answers if answer.times]:
            logs.note(http.scope, first_token_seconds=round(min(times), 4))
        if self.rules.log_prompts:
            prompts = [reply.tokenizer.decode(answer.request.prompt) for answer in answers]
            logs.note(http.scope, prompts=prompts, answers=[answer.text for answer in answers])

    async def _events(
        self,
        http: Request,
        tickets: Sequence[Ticket],
        reply: replies.Reply,
        prompt_tokens: int,
        options: StreamOptions,
    ) -> AsyncIterator[str]:
        """Chunks of all choices as they come. What piles up while a client reads goes into one chunk.

        Sending costs more than making chunks, so those of one moment are sent together.
        """
        try:
            chunks = [opening for index in range(len(tickets)) if (opening := reply.opening(index))]
            going, told = len(tickets), [0] * len(tickets)
            async for index in _merge(tickets):
                answer = tickets[index].answer
                if not options.include_forwards:
                    answer.spell_at_once()
                fresh = answer.pieces[told[index] :]
                wants_all = tickets[index].is_finished and answer.request.logprobs is not None
                if any(fresh) or (fresh and wants_all):
                    chunks.append(reply.text(index, told[index], answer, by_forward=options.include_forwards))
                    told[index] = len(answer.steps)
                if tickets[index].is_finished:
                    chunks.append(reply.closing(index, answer))
                    going -= 1
                if going and chunks:
                    yield "".join(map(replies.event, chunks))
                    chunks.clear()
            if options.include_usage:
                chunks.append(reply.account(prompt_tokens, [ticket.answer for ticket in tickets]))
            yield "".join(map(replies.event, chunks)) + replies.DONE
        except MarsError as error:
            logs.note(http.scope, error=str(error))
            yield replies.event(to_api_error(error).body)
        finally:
            self.close(http, tickets, reply)


async def _finish(tickets: Sequence[Ticket]) -> None:
    async for _ in _merge(tickets):
        pass


async def _merge(tickets: Sequence[Ticket]) -> AsyncIterator[int]:
    """Which ticket has advanced, whichever comes next; the first one has advanced once."""
    yield 0
    if len(tickets) == 1:  # as nearly always
        while not tickets[0].is_finished:
            await tickets[0].advance()
            yield 0
        return
    waiting: dict[asyncio.Task[None], int] = {}

    def wait_for(index: int) -> None:
        if not tickets[index].is_finished:
            waiting[asyncio.create_task(tickets[index].advance())] = index

    try:
        for index in range(len(tickets)):
            wait_for(index)
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                task.result()  # or what went wrong
                yield index
                wait_for(index)
    finally:
        for task in waiting:
            task.cancel()


async def _unless_gone(http: Request, work: Coroutine[Any, Any, None]) -> bool:
    """Do this work; False as soon as the client has hung up."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()  # or what went wrong
        return task.done()
    finally:
        task.cancel()
        watch.cancel()


class BodyLimit:
    """Refuses bodies that are too long, before they are read, and those with halves of characters."""

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
        if _has_halves(body):
            await ApiError(400, "the body has halves of characters (lone surrogates)").response()(scope, receive, send)
            return
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return parts.pop() if parts else await receive()

        await self._app(scope, again, send)


def _has_halves(body: bytes) -> bool:
    """Does some text in it have a half of a pair like \\ud83d\\ude00 alone? JSON may, text may not."""
    if b"\\ud" not in body.lower():
        return False
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        pass  # not JSON at all, which is told elsewhere
    return False


def create_app(service: Service) -> FastAPI:
    backend, rules = service.backend, service.rules

    async def user(http: Request) -> None:
        _require_key(http, [rules.api_key, rules.admin_key] if rules.api_key else [])

    async def operator(http: Request) -> None:
        _require_key(http, [rules.admin_key] if rules.admin_key else [rules.api_key] if rules.api_key else [])

    app = FastAPI(title="MARS", version=mars.__version__, docs_url=None, redoc_url=None, responses=errors.POSSIBLE)
    app.add_middleware(BodyLimit, most=rules.max_body)
    app.add_middleware(logs.RequestLog)
    errors.install(app)
    guarded = [Depends(user)]

    @app.post("/v1/chat/completions", dependencies=guarded)
    async def chat_completions(asked: ChatCompletionRequest, http: Request) -> Response:
        service.check_model(asked.model)
        messages, tokenizer = [each.as_dict() for each in asked.messages], service.facts.tokenizer
        if asked.may_call:
            box = asked.toolbox(Style.of(tokenizer, service.name))
            prompt = await service.read(lambda: box.encode(tokenizer, messages, service.name))
            grammar = box.grammar(tokenizer)
            return await service.respond(http, asked, service.reply("chat.completion", box), [prompt], grammar)
        prompt = await service.read(lambda: encode_chat(tokenizer, messages, service.name))
        grammar = asked.response_format.grammar if asked.response_format else None
        return await service.respond(http, asked, service.reply("chat.completion"), [prompt], grammar)

    @app.post("/v1/completions", dependencies=guarded)
    async def completions(asked: CompletionRequest, http: Request) -> Response:
        service.check_model(asked.model)
        tokenizer, given = service.facts.tokenizer, asked.prompts
        prompts = await service.read(
            lambda: [each if isinstance(each, list) else list(tokenizer(each)["input_ids"]) for each in given]
        )
        return await service.respond(http, asked, service.reply("text_completion"), prompts)

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> dict[str, Any]:
        entry = {"id": service.name, "object": "model", "created": 0, "owned_by": "mars"}
        return {"object": "list", "data": [entry | {"max_model_len": service.facts.context}]}

    @app.post("/tokenize", dependencies=guarded)
    async def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        tokenizer = service.facts.tokenizer

        def work() -> list[int]:
            if asked.messages is not None:
                return encode(tokenizer, [each.as_dict() for each in asked.messages], name=service.name)
            return list(tokenizer(asked.prompt, add_special_tokens=asked.add_special_tokens)["input_ids"])

        tokens = await service.read(work)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.facts.context}

    @app.post("/detokenize", dependencies=guarded)
    async def detokenize(asked: DetokenizeRequest) -> dict[str, str]:
        if asked.tokens and max(asked.tokens) >= service.facts.vocabulary:
            raise ApiError(400, f"the vocabulary has {service.facts.vocabulary} tokens", param="tokens")
        return {"prompt": service.facts.tokenizer.decode(asked.tokens)}

    def dial_state() -> dict[str, Any]:
        floor = None if rules.floor is None else str(rules.floor)
        return {"dial": str(service.dial), "floor": floor, "auto": service.is_auto}

    @app.get("/v1/dial", dependencies=guarded)
    async def show_dial() -> dict[str, Any]:
        return dial_state()

    @app.put("/v1/dial", dependencies=[Depends(operator)])
    async def turn_dial(asked: DialRequest) -> dict[str, Any]:
        service.turn(None if asked.dial == AUTO else Dial.parse(asked.dial))
        return dial_state()

    @app.get("/health")
    async def health() -> JSONResponse:
        if backend.is_ready:
            return JSONResponse({"status": "ok"})
        return ApiError(503, backend.failure or "the engine is being started", "service_unavailable").response()

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(service.metrics.text(str(service.dial)), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": mars.__version__}

    for file in sorted(PAGE.iterdir()):
        path = "/" if file.name == "index.html" else f"/{file.name}"
        app.add_route(path, _file(file), include_in_schema=False)
    return app


def _file(path: Path) -> Callable[[Request], Awaitable[Response]]:
    async def send(_: Request) -> Response:
        return FileResponse(path)

    return send


def _require_key(http: Request, keys: Sequence[str | None]) -> None:
    """One of the keys must be there, if there are any; compared in constant time."""
    given = http.headers.get("authorization", "").removeprefix("Bearer ").encode()
    matches = [secrets.compare_digest(given, (key or "").encode()) for key in keys if key]
    if matches and not any(matches):
        raise ApiError(401, "a valid API key is needed: Authorization: Bearer …", code="invalid_api_key")
