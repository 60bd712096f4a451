"""What the endpoints share: submitting requests, streaming answers, the dial, the operator's rules."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from mars.core.request import Request as CoreRequest
from mars.core.request import default_dial, require_masks
from mars.errors import MarsError
from mars.method.acceptance import Dial
from mars.serving import logs, replies
from mars.serving.engine_client import EngineClient, EngineGoneError, RequestStream
from mars.serving.errors import ApiError, to_api_error
from mars.serving.governor import TICK, Governor, Meter, Target, ladder
from mars.serving.messages import EngineReady
from mars.serving.metrics import Metrics
from mars.serving.protocol import BaseCompletionRequest, StreamOptions
from mars.serving.tools import Toolbox

log = logging.getLogger("mars.serving")
T = TypeVar("T")
INLINE_BYTES = 8192  # of a request: less is tokenised in a millisecond, and a thread costs as much
TOKENIZER_THREADS = 2  # that turn messages into tokens: with many, the event loop would have to wait for all of them


@dataclass(frozen=True, slots=True)
class Rules:
    """What the operator allows."""

    api_key: str | None = None
    admin_key: str | None = None  # for turning the server's dial; without one, whoever may ask may turn it
    floor: Dial | None = None  # the loosest dial; None: any
    max_body: int = 4 * 2**20
    max_new_tokens: int | None = None  # of one answer; longer ones are refused
    log_prompts: bool = False  # and answers
    hosts: frozenset[str] | None = None  # names that the server may be called by; None: any
    cors_origins: tuple[str, ...] = ()  # of pages elsewhere that may ask

    def allows(self, dial: Dial) -> bool:
        """Is this dial as strict as the floor? Dials of different kinds cannot be compared, so only its own is."""
        if self.floor is None or not dial.is_lossy:
            return True
        same = (dial.kind, dial.measure) == (self.floor.kind, self.floor.measure)
        return same and (dial.value or 0.0) >= (self.floor.value or 0.0)

    def require(self, dial: Dial) -> Dial:
        if not self.allows(dial):
            raise ApiError(400, f"the dial {dial} is not allowed here: nothing looser than {self.floor}", param="dial")
        return dial


class ClientGoneError(MarsError):
    """Nobody waits for the answer any more."""


class EventStream(Response):
    """Server-sent events. Leaner than starlette's streams: one task watches for a hang-up from the beginning on."""

    def __init__(self, events: AsyncIterator[tuple[str, bool]], watch: asyncio.Task[None]) -> None:
        """``events``: texts to send, and will there be more?"""
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._watch = watch

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for text, more in self._events:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
        finally:
            self._watch.cancel()


class Service:
    """What the endpoints share: the engine, the operator's rules, metrics, the governor."""

    def __init__(self, client: EngineClient, rules: Rules, *, auto: bool = False, target: Target | None = None) -> None:
        self.client = client
        self.rules = rules
        self.metrics = Metrics(client, self.name)
        self._tokenizers = ThreadPoolExecutor(TOKENIZER_THREADS, "tokenizer")
        own = default_dial(self.model)
        strict = Dial("exact") if own.is_lossy else own
        floor = rules.floor if self.model.settings else None  # without masks, there is nothing to turn
        self._governor = Governor(ladder(strict, floor), target or Target())
        self.is_auto = False
        if auto:
            self.set_dial(None)
        elif not rules.allows(self.dial):  # the model's own may be looser than the floor
            self.set_dial(strict)
        require_masks(self.model, self.dial)

    @property
    def model(self) -> EngineReady:
        if self.client.model is None:
            raise EngineGoneError("the engine is not ready: try again in a moment")
        return self.client.model

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def dial(self) -> Dial:
        return self.client.dial

    async def tokenize(self, http: Request, encode: Callable[[], T]) -> T:
        """Text becomes tokens, in a thread if the request is long, so that it does not stall the streams."""
        if int(http.headers.get("content-length", INLINE_BYTES)) < INLINE_BYTES:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._tokenizers, encode)

    def reply(self, kind: str, tools: Toolbox | None = None) -> replies.Reply:
        return replies.Reply(kind, self.name, self.model.tokenizer, tools)

    def set_dial(self, dial: Dial | None) -> None:
        """By hand; None leaves it to the governor from now on."""
        if dial is not None:
            require_masks(self.model, self.rules.require(dial))
        self.client.set_dial(dial or self._governor.dial)
        self.is_auto = dial is None
        log.info("dial", extra={"facts": {"dial": str(self.dial), "auto": self.is_auto}})

    async def govern(self) -> None:
        """Turn the dial by load, whenever that is wanted."""
        meter, governor = Meter(self.client), self._governor
        while True:
            await asyncio.sleep(TICK)
            load, rung = meter.read(), governor.rung
            if not self.is_auto or not governor.observe(load, time.perf_counter()):
                continue
            self.client.set_dial(governor.dial)
            direction = "looser" if governor.rung > rung else "stricter"
            self.metrics.moves.labels(self.name, direction).inc()
            facts = {"dial": str(governor.dial), "direction": direction, **asdict(load)}
            log.info("governor", extra={"facts": facts})

    def check_model(self, model: str) -> None:
        if model != self.name:
            raise ApiError(
                404, f"there is no model {model}: this server has {self.name}", param="model", code="model_not_found"
            )

    def submit(self, asked: BaseCompletionRequest, prompt: list[int], grammar: str | None) -> list[RequestStream]:
        """The ``n`` choices of a prompt."""
        limit = asked.limit
        dial = None if asked.dial is None else self.rules.require(Dial.parse(asked.dial))
        most = self.rules.max_new_tokens
        if most is not None and (limit or 0) > most:
            raise ApiError(400, f"at most {most} new tokens are allowed, not {limit}", param="max_tokens")
        room = self.model.context - len(prompt)
        first = CoreRequest(
            prompt,
            dial,
            asked.sampling(0),
            max_new_tokens=min(limit or most or room, max(1, room)),
            stop=asked.stop,
            block_size=self.model.block_size,
            min_new_tokens=asked.min_tokens,
            ignore_end=asked.ignore_eos,
            logprobs=asked.alternatives,
            grammar=grammar,
        )
        others = [replace(first, sampling=asked.sampling(choice)) for choice in range(1, asked.n)]
        return self.client.add_requests([first, *others])

    def close_streams(self, streams: Sequence[RequestStream]) -> None:
        """Abort what is not finished, and count all of them."""
        for stream in streams:
            self.client.abort(stream)
            self.metrics.finish(stream)

    async def respond(
        self,
        http: Request,
        asked: BaseCompletionRequest,
        reply: replies.Reply,
        prompts: list[list[int]],
        grammar: str | None = None,
    ) -> Response:
        if len(prompts) * asked.n > self.client.capacity:
            raise ApiError(400, f"at most {self.client.capacity} answers can be asked for at once", param="n")
        streams: list[RequestStream] = []
        watch = asyncio.create_task(_fail_when_gone(http, streams))
        is_streaming = False
        try:
            for prompt in prompts:
                streams += self.submit(asked, prompt, grammar)
            await streams[0].advance()  # an error up to here has a status of its own
            count = sum(map(len, prompts))
            if asked.stream:
                is_streaming = True
                options = asked.stream_options or StreamOptions()
                return EventStream(self._events(http, streams, reply, count, options), watch)
            async for _ in _merge(streams):
                pass
            return JSONResponse(reply.whole(count, streams))
        except ClientGoneError:
            return Response(status_code=499)
        finally:
            if not is_streaming:
                watch.cancel()
                if streams:
                    self.close(http, streams, reply)

    def close(self, http: Request, streams: Sequence[RequestStream], reply: replies.Reply) -> None:
        """Close the streams of a response, and have it in the log."""
        self.close_streams(streams)
        outputs = [stream.output for stream in streams]
        counted = replies.usage(sum(len(each.request.prompt) for each in streams), outputs)
        ends = [output.finish_reason or "abort" for output in outputs]
        logs.note(http.scope, id=reply.id, finish_reasons=ends, **counted, **replies.figures(outputs))
        if times := [output.times[0] for output in outputs if output.times]:
            logs.note(http.scope, first_token_seconds=round(min(times), 4))
        if self.rules.log_prompts:
            prompts = [reply.tokenizer.decode(stream.request.prompt) for stream in streams]
            logs.note(http.scope, prompts=prompts, answers=[output.text for output in outputs])

    async def _events(
        self,
        http: Request,
        streams: Sequence[RequestStream],
        reply: replies.Reply,
        prompt_tokens: int,
        options: StreamOptions,
    ) -> AsyncIterator[tuple[str, bool]]:
        """Chunks of all choices as they come, and will there be more? What piles up while a client reads is one chunk.

        Sending costs more than making chunks, so those of one moment are sent together.
        """
        try:
            chunks = [opening for index in range(len(streams)) if (opening := reply.opening(index))]
            going, told = len(streams), [0] * len(streams)
            async for index in _merge(streams):
                stream = streams[index]
                if not options.include_forwards:
                    stream.processor.read_at_once()
                fresh = stream.processor.pieces[told[index] :]
                wants_all = stream.is_finished and stream.request.logprobs is not None
                if any(fresh) or (fresh and wants_all):
                    if text := reply.text(index, told[index], stream, by_forward=options.include_forwards):
                        chunks.append(text)
                    told[index] = stream.output.forwards
                if stream.is_finished:
                    chunks.append(reply.closing(index, stream.output))
                    going -= 1
                if options.include_usage:
                    chunks = [each | {"usage": None} for each in chunks]  # as at OpenAI, in all chunks but the last
                if going and chunks:
                    yield "".join(map(replies.event, chunks)), True
                    chunks.clear()
            if options.include_usage:
                chunks.append(reply.account(prompt_tokens, [stream.output for stream in streams]))
            yield "".join(map(replies.event, chunks)) + replies.DONE, False
        except ClientGoneError:
            pass
        except MarsError as error:
            logs.note(http.scope, error=str(error))
            yield replies.event(to_api_error(error).body), False
        finally:
            self.close(http, streams, reply)


async def _merge(streams: Sequence[RequestStream]) -> AsyncIterator[int]:
    """Indices of streams as they advance; the first one has advanced once."""
    yield 0
    if len(streams) == 1:  # as nearly always
        while not streams[0].is_finished:
            await streams[0].advance()
            yield 0
        return
    waiting: dict[asyncio.Task[None], int] = {}

    def wait_for(index: int) -> None:
        if not streams[index].is_finished:
            waiting[asyncio.create_task(streams[index].advance())] = index

    try:
        for index in range(len(streams)):
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


async def _fail_when_gone(http: Request, streams: Sequence[RequestStream]) -> None:
    """Wait until the client hangs up; whoever waits for its streams is told."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    for stream in streams:
        stream.fail(ClientGoneError("the client has hung up"))
