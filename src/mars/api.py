"""The Python interface: `load` a model, then ``generate`` or ``stream``."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import fields
from numbers import Integral
from pathlib import Path
from typing import Any, Self, overload

import torch
from rich.progress import Progress

from mars.core.output import RequestOutput
from mars.core.request import Request, default_dial, require_masks
from mars.engine import Engine, SharedEngine
from mars.engine.engine import cache_bytes
from mars.errors import MarsError, require_integer
from mars.method.acceptance import Dial
from mars.method.sampling import SamplingParams
from mars.method.windows import parse_window
from mars.models import Checkpoint, Settings, load_checkpoint
from mars.models.builtin import NAME as DEFAULT_MODEL
from mars.models.prompts import Messages, Prompt

MAX_NEW_TOKENS = 256
OTHER_NAMES = {
    "do_sample": "temperature",
    "eos_token_id": "stop",
    "ignore_eos": "ignore_end",
    "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "min_length": "min_new_tokens",
    "min_tokens": "min_new_tokens",
    "num_predict": "max_new_tokens",
    "num_tokens": "max_new_tokens",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stream": "model.stream(…)",
    "system_prompt": "system",
    "until": "stop",
}
"""What other libraries call our options"""


def load(
    name: str | Path = DEFAULT_MODEL,
    *,
    adapter: str | Path | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    max_num_seqs: int = 64,
    memory: int | float | None = None,
    batch_invariant: bool = False,
    lookup: bool | None = None,
    candidates: int = 0,
    ragged: bool = False,
) -> Model:
    """Load a hub id, a local folder, a local GGUF file, an adapter folder, or the built-in ``smollm2-135m``.

    ``max_num_seqs`` requests are decoded together; ``memory`` is what their keys and values may take: bytes, or on a
    GPU a share of what is free. ``batch_invariant``: on a GPU, run kernels whose bits do not depend on the other
    requests; the compiled step on a CPU always does. ``lookup``: draft from the text itself, too; by default with the
    compiled step alone. ``candidates``: other guesses than the drafts that a window may have. ``ragged``: let the
    requests of a step have windows of different lengths, which the compiled step always does.
    """
    require_integer("max_num_seqs", max_num_seqs, 1)
    checkpoint = load_checkpoint(name, adapter=adapter, device=device, dtype=dtype)
    options: dict[str, Any] = {"batch_invariant": batch_invariant, "lookup": lookup}
    options |= {"candidates": candidates, "ragged": ragged}
    return Model(checkpoint, max_num_seqs=max_num_seqs, memory=memory, **options)


class Model:
    """A model with an engine. Everything about decoding is an option of each call.

    Any number of threads and event loops may call it at once: their requests are decoded together.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        max_num_seqs: int = 64,
        memory: int | float | None = None,
        batch_invariant: bool = False,
        lookup: bool | None = None,
        candidates: int = 0,
        ragged: bool = False,
    ) -> None:
        require_integer("max_num_seqs", max_num_seqs, 1)
        require_integer("candidates", candidates, 0)
        cache_bytes(memory, checkpoint.device)  # raises if it makes no sense
        self.checkpoint = checkpoint
        self._options: dict[str, Any] = {
            "max_num_seqs": max_num_seqs,
            "memory": memory,
            "batch_invariant": batch_invariant,
            "lookup": lookup,
            "ragged": ragged,
        }
        self._candidates = candidates
        self._making = threading.Lock()
        self._shared: SharedEngine | None = None

    def engine(self, block_size: int = 1) -> Engine:
        """The engine that all calls share; made anew when a call asks for larger blocks or more candidates.

        It is for one thread: do not step it while other threads call the model.
        """
        return self.shared_engine(block_size).engine

    def shared_engine(self, block_size: int = 1, candidates: int = 0) -> SharedEngine:
        """The same for any number of threads. Calls in progress keep the one that they began with."""
        with self._making, torch.inference_mode(False):  # whatever the calling thread is in
            shared = self._shared
            if shared is not None:
                block_size = max(block_size, shared.engine.block_size)
                candidates = max(candidates, shared.engine.candidates)
                if (block_size, candidates) == (shared.engine.block_size, shared.engine.candidates):
                    return shared
            shared = self._shared = None  # unless a call still needs it, its cache goes before a new one comes
            block_size = max(block_size, self.checkpoint.block_size)
            candidates = max(candidates, self._candidates)
            engine = Engine(self.checkpoint, block_size=block_size, candidates=candidates, **self._options)
            self._shared = SharedEngine(engine)
            return self._shared

    def _engine_for(self, requests: Sequence[Request]) -> SharedEngine:
        candidates = (each.window.candidates for each in requests if each.window is not None)
        return self.shared_engine(max((each.block_size for each in requests), default=1), max(candidates, default=0))

    def warm_up(self, bar: Progress | None = None, num_seqs: int | None = None) -> None:
        """Prepare the engine for so many requests at once, all that it takes by default.

        On a GPU this compiles and captures its steps: a minute the first time, less from then on. Shown in ``bar`` if
        one is given.
        """
        task = None
        with self.shared_engine().exclusive() as engine:
            for done, total in engine.warm_up(num_seqs):
                if bar is not None:
                    task = bar.add_task("warming up") if task is None else task
                    bar.update(task, completed=done, total=total)

    @property
    def settings(self) -> Settings | None:
        return self.checkpoint.settings

    @overload
    def generate(self, prompt: Prompt, **options: Any) -> RequestOutput: ...
    @overload
    def generate(self, prompt: list[str] | list[Messages] | list[list[int]], **options: Any) -> list[RequestOutput]: ...
    def generate(self, prompt: Any, **options: Any) -> RequestOutput | list[RequestOutput]:
        """Answer one prompt, or a list of prompts as one batch.

        A prompt is text, a list of messages, or a list of token ids; the options are those of `request`.
        """
        prompts = prompt if _is_batch(prompt) else [prompt]
        outputs = dict(self.run([self.request(each, **options) for each in prompts]))
        return [outputs[index] for index in range(len(prompts))] if _is_batch(prompt) else outputs[0]

    @overload
    async def agenerate(self, prompt: Prompt, **options: Any) -> RequestOutput: ...
    @overload
    async def agenerate(
        self, prompt: list[str] | list[Messages] | list[list[int]], **options: Any
    ) -> list[RequestOutput]: ...
    async def agenerate(self, prompt: Any, **options: Any) -> RequestOutput | list[RequestOutput]:
        """`generate` for an event loop, which it does not block; cancelling it aborts its requests."""
        streams = [self.astream(each, **options) for each in (prompt if _is_batch(prompt) else [prompt])]
        try:
            outputs = await asyncio.gather(*(each.result() for each in streams))
        finally:
            for each in streams:
                each.close()
        return outputs if _is_batch(prompt) else outputs[0]

    def run(self, requests: Sequence[Request]) -> Generator[tuple[int, RequestOutput], None, None]:
        """Every request's index and output as it finishes; all requests are validated before the first one runs.

        Closing the generator aborts those that have not finished.
        """
        for request in requests:
            request.validate(self.checkpoint)
        return self._engine_for(requests).run(requests)

    def stream(self, prompt: Prompt, **options: Any) -> Stream:
        """Answer one prompt piece by piece; see `Stream`."""
        return Stream(self, self.request(prompt, **options))

    def astream(self, prompt: Prompt, **options: Any) -> AsyncStream:
        """The same for an event loop, with ``async for``; see `AsyncStream`."""
        return AsyncStream(self, prompt, options)

    def request(
        self,
        prompt: Prompt,
        *,
        dial: str | Dial | None = None,
        max_new_tokens: int | None = None,
        min_new_tokens: int | None = None,
        ignore_end: bool | None = None,
        system: str | None = None,
        stop: str | Sequence[str] | None = None,
        window: str | None = None,
        lookup: int | None = None,
        block_size: int | None = None,
        sampling: SamplingParams | None = None,
        **sampling_options: Any,
    ) -> Request:
        """Put a prompt and options into a request. None stands for an option's default.

        ``dial``: see `mars.method.acceptance`; by default the checkpoint's own. ``max_new_tokens``: 256 by default.
        ``window``: ``chain``, ``tree`` or ``tree=N``, also with candidates, as in ``tree+3``; by default the fastest
        for the load. ``lookup``: most drafts of `exact` where some come from the text itself; by default the engine
        decides, or, where ``window`` is given, none come from there. ``block_size``: tokens one forward predicts, by
        default what the model was trained with.
        ``min_new_tokens``: no end before so many; ``ignore_end``: no end at all. Further options are those of
        `SamplingParams`: temperature, top_k, top_p, min_p, seed, …
        """
        if block_size is None:
            block_size = self.checkpoint.block_size
        require_integer("block_size", block_size, 1)
        return Request(
            prompt=self.checkpoint.encode(prompt, system),
            dial=self.dial(dial),
            sampling=_sampling(sampling, sampling_options),
            max_new_tokens=MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
            stop=() if stop is None else (stop,) if isinstance(stop, str) else stop,
            block_size=block_size,
            min_new_tokens=0 if min_new_tokens is None else min_new_tokens,
            ignore_end=bool(ignore_end),
            window=None if window is None else parse_window(window, block_size),
            lookup=lookup,
        )

    def dial(self, dial: str | Dial | None = None) -> Dial:
        """The dial asked for, by default the checkpoint's own; raises if the model cannot follow it."""
        parsed = default_dial(self.checkpoint) if dial is None else Dial.parse(dial)
        require_masks(self.checkpoint, parsed)
        return parsed


class Stream(Iterator[str]):
    """Text as it is generated, one piece per forward. The dial may be turned between two pieces.

    The request is aborted when the stream is closed, or nobody has it any more.
    """

    def __init__(self, model: Model, request: Request) -> None:
        self.shared = model._engine_for([request])
        self._model = model
        self._pending = self.shared.submit(request, streams=True)
        self._abort = weakref.finalize(self, self.shared.abort, self._pending)
        self._abort.atexit = False
        self._dial = self._pending.sequence.dial
        self._given = 0

    @property
    def dial(self) -> Dial:
        return self._dial

    @dial.setter
    def dial(self, dial: str | Dial) -> None:
        self._dial = self._model.dial(dial)
        self.shared.set_dial(self._pending, self._dial)

    @property
    def result(self) -> RequestOutput:
        """The whole output; runs to its end if it is not there yet. Of a closed stream, what it had until then."""
        self.shared.step_until(lambda: self.is_finished)
        self._given = len(self._pending.pieces)
        return self._pending.result

    @property
    def text(self) -> str:
        """What has been generated so far."""
        return "".join(self._pending.pieces)

    @property
    def is_finished(self) -> bool:
        """Has the request ended? There may be pieces left to read."""
        return self._pending.is_finished

    @property
    def is_ready(self) -> bool:
        """Is the next piece there, or certain not to come?"""
        return len(self._pending.pieces) > self._given or self.is_finished or self.is_closed

    @property
    def is_closed(self) -> bool:
        return not self._abort.alive

    def close(self) -> None:
        """Abort the request, if it has not finished; no more pieces come."""
        self._abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> str:
        self.shared.step_until(lambda: self.is_ready)
        if self.is_closed:
            raise StopIteration
        if self._given == len(self._pending.pieces):
            _ = self._pending.result  # raises if the request has failed
            raise StopIteration
        self._given += 1
        return self._pending.pieces[self._given - 1]


class AsyncStream(AsyncIterator[str]):
    """A `Stream` for an event loop, which it does not block. Its request begins with the first piece that is awaited.

    It is aborted when the stream is closed, the task that awaits a piece is cancelled, or nobody has the stream.
    """

    def __init__(self, model: Model, prompt: Prompt, options: dict[str, Any]) -> None:
        self._model = model
        self._prompt = prompt
        self._options = options
        self._dial = model.dial(options.get("dial"))
        self._stream: Stream | None = None
        self._is_closed = False

    @property
    def dial(self) -> Dial:
        return self._dial

    @dial.setter
    def dial(self, dial: str | Dial) -> None:
        self._dial = self._model.dial(dial)
        if self._stream is not None:
            self._stream.dial = self._dial

    @property
    def text(self) -> str:
        """What has been generated so far."""
        return "" if self._stream is None else self._stream.text

    async def result(self) -> RequestOutput:
        """The whole output; awaits its end if it is not there yet."""
        return (await self._wait_until(lambda stream: stream.is_finished)).result

    def close(self) -> None:
        """Abort the request, if it has not finished; no more pieces come."""
        self._is_closed = True
        if self._stream is not None:
            self._stream.close()

    async def aclose(self) -> None:
        """The same, for `contextlib.aclosing`."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def __anext__(self) -> str:
        for piece in await self._wait_until(lambda stream: stream.is_ready):
            return piece
        raise StopAsyncIteration

    async def _wait_until(self, done: Callable[[Stream], bool]) -> Stream:
        try:
            stream = await self._open()
            while not done(stream):
                await stream.shared.async_step()
        except BaseException:
            self.close()
            raise
        return stream

    async def _open(self) -> Stream:
        """Tokenise and submit the request in a thread, once."""
        if self._stream is None:
            options = self._options | {"dial": self._dial}
            stream = await asyncio.to_thread(self._model.stream, self._prompt, **options)
            self._stream = self._stream or stream
            if self._is_closed:
                self._stream.close()
            if self._stream.dial != self._dial:
                self._stream.dial = self._dial  # it was turned meanwhile
        return self._stream


def _is_batch(prompt: Any) -> bool:
    """Is this a list of prompts rather than one prompt, that is, a list of texts or of lists?"""
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray)
    return is_list and len(prompt) > 0 and not isinstance(prompt[0], Mapping | Integral | float)


def _sampling(given: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
    """The sampling parameters of a call: given as a whole, or as options of their own."""
    known = [each.name for each in fields(SamplingParams) if each.name != "min_position"]
    for name in options:
        if name not in known:
            raise MarsError(f"unknown option {name!r}: {_suggestion(name, known)}")
    options = {name: value for name, value in options.items() if value is not None}
    if given is None:
        return SamplingParams(**options)
    if options:
        raise MarsError(f"give either sampling or {', '.join(options)}, not both")
    if not isinstance(given, SamplingParams):
        raise MarsError(f"sampling must be a mars.SamplingParams, not {given!r}")
    return given


def _suggestion(name: str, sampling: list[str]) -> str:
    """What somebody may have meant who wrote an option that does not exist."""
    ours = [
        each.name for each in inspect.signature(Model.request).parameters.values() if each.kind == each.KEYWORD_ONLY
    ]
    known = [*ours, *sampling]
    close = [OTHER_NAMES[name]] if name in OTHER_NAMES else difflib.get_close_matches(name, [*known, *OTHER_NAMES], 2)
    close = list(dict.fromkeys(OTHER_NAMES.get(each, each) for each in close))
    return f"did you mean {' or '.join(close)}?" if close else f"the options are {', '.join(known)}"
