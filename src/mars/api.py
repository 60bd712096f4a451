"""The Python interface: `load` a model, then ``generate`` or ``stream``."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, overload

import torch
from rich.progress import Progress

from mars.core.output import RequestOutput
from mars.core.request import Request, default_dial, require_masks
from mars.engine import Engine, run
from mars.engine.run import attach_processor, stop_found
from mars.errors import MarsError
from mars.method.acceptance import Dial
from mars.method.sampling import SamplingParams
from mars.method.windows import parse_window
from mars.models import Checkpoint, Settings, load_checkpoint
from mars.models.builtin import NAME as DEFAULT_MODEL
from mars.models.prompts import Messages, Prompt


def load(
    name: str | Path = DEFAULT_MODEL,
    *,
    adapter: str | Path | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    max_num_seqs: int = 64,
    memory: int | float | None = None,
) -> Model:
    """Load a hub id, a local folder, a local GGUF file, an adapter folder, or the built-in ``smollm2-135m``.

    ``max_num_seqs`` requests are decoded together; ``memory`` is what their keys and values may take: bytes, or on a
    GPU a share of what is free.
    """
    checkpoint = load_checkpoint(name, adapter=adapter, device=device, dtype=dtype)
    return Model(checkpoint, max_num_seqs=max_num_seqs, memory=memory)


class Model:
    """A model with an engine. Everything about decoding is an option of each call."""

    def __init__(self, checkpoint: Checkpoint, *, max_num_seqs: int = 64, memory: int | float | None = None) -> None:
        self.checkpoint = checkpoint
        self._options: dict[str, Any] = {"max_num_seqs": max_num_seqs, "memory": memory}
        self._engine: Engine | None = None

    def engine(self, block_size: int = 1) -> Engine:
        """The engine that all calls share; made anew when a call asks for larger blocks."""
        if self._engine is None or block_size > self._engine.block_size:
            self._engine = None  # its cache goes before a new one comes
            trained = self.settings.block_size if self.settings else 1
            self._engine = Engine(self.checkpoint, block_size=max(block_size, trained), **self._options)
        return self._engine

    def warm_up(self, bar: Progress | None = None, num_seqs: int | None = None) -> None:
        """Prepare the engine for so many requests at once, all that it takes by default.

        On a GPU this compiles and captures its steps: a minute the first time, less from then on. Shown in ``bar`` if
        one is given.
        """
        task = None
        for done, total in self.engine().warm_up(num_seqs):
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

    def run(self, requests: Sequence[Request]) -> Generator[tuple[int, RequestOutput], None, None]:
        """Every request's index and output as it finishes; all requests are validated before the first one runs."""
        for request in requests:
            request.validate(self.checkpoint)
        return run(self.engine(max((each.block_size for each in requests), default=1)), requests)

    def stream(self, prompt: Prompt, **options: Any) -> Stream:
        """Answer one prompt piece by piece; see `Stream`."""
        return Stream(self, self.request(prompt, **options))

    def request(
        self,
        prompt: Prompt,
        *,
        dial: str | Dial | None = None,
        max_new_tokens: int = 256,
        min_new_tokens: int = 0,
        ignore_end: bool = False,
        system: str | None = None,
        stop: str | Sequence[str] = (),
        window: str | None = None,
        block_size: int | None = None,
        sampling: SamplingParams | None = None,
        **sampling_options: Any,
    ) -> Request:
        """Put a prompt and options into a request.

        ``dial``: see `mars.method.acceptance`; by default the checkpoint's own. ``window``: ``chain``, ``tree`` or
        ``tree=N``; by default the fastest for the load. ``block_size``: tokens one forward predicts, by default what
        the model was trained with. ``min_new_tokens``: no end before so many; ``ignore_end``: no end at all. Further
        options are those of `SamplingParams`: temperature, top_k, top_p, min_p, seed, …
        """
        if sampling is not None and sampling_options:
            raise MarsError(f"give either sampling or {', '.join(sampling_options)}, not both")
        if block_size is None:
            block_size = self.settings.block_size if self.settings else 1
        return Request(
            prompt=self.checkpoint.encode(prompt, system),
            dial=self.dial(dial),
            sampling=sampling or SamplingParams(**sampling_options),
            max_new_tokens=max_new_tokens,
            stop=(stop,) if isinstance(stop, str) else stop,
            block_size=block_size,
            min_new_tokens=min_new_tokens,
            ignore_end=ignore_end,
            mask_groups=None if window is None else parse_window(window, block_size),
        )

    def dial(self, dial: str | Dial | None = None) -> Dial:
        """The dial asked for, by default the checkpoint's own; raises if the model cannot follow it."""
        parsed = default_dial(self.checkpoint) if dial is None else Dial.parse(dial)
        require_masks(self.checkpoint, parsed)
        return parsed


class Stream(Iterator[str]):
    """Text as it is generated, one piece per forward. The dial may be turned between two pieces."""

    def __init__(self, model: Model, request: Request) -> None:
        self._model = model
        self._engine = model.engine(request.block_size)
        self._sequence = self._engine.add_request(request)
        self._processor = attach_processor(self._engine, self._sequence)
        self._given = 0
        weakref.finalize(self, self._engine.abort, self._sequence)

    @property
    def dial(self) -> Dial:
        return self._sequence.dial

    @dial.setter
    def dial(self, dial: str | Dial) -> None:
        self._sequence.set_dial(self._model.dial(dial))

    @property
    def result(self) -> RequestOutput:
        """The whole output; runs to its end if it is not there yet."""
        while not self._sequence.is_finished:
            self._step()
        self._given = len(self._processor.pieces)
        return self._sequence.output

    @property
    def text(self) -> str:
        """What has been generated so far."""
        return "".join(self._processor.pieces)

    def __next__(self) -> str:
        while self._given == len(self._processor.pieces):
            if self._sequence.is_finished:
                raise StopIteration
            self._step()
        self._given += 1
        return self._processor.pieces[self._given - 1]

    def _step(self) -> None:
        self._engine.step()
        stop_found(self._engine, self._sequence)


def _is_batch(prompt: Any) -> bool:
    """Is this a list of prompts rather than one prompt, that is, a list of texts or of lists?"""
    return not isinstance(prompt, str) and len(prompt) > 0 and not isinstance(prompt[0], Mapping | Integral)
