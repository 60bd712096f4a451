"""What a person calls: `load` a model, then ``generate`` or ``stream``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, overload

import torch
from rich.progress import Progress

from mars.decoding.decoder import require_masks
from mars.decoding.request import Generation, Request
from mars.engine import Engine
from mars.errors import MarsError
from mars.method.acceptance import Dial
from mars.method.sampling import Sampling
from mars.method.windows import Shape
from mars.models import Checkpoint, Settings, load_checkpoint
from mars.models.builtin import NAME as DEFAULT_MODEL
from mars.models.prompts import Messages, Prompt


def load(
    name: str | Path = DEFAULT_MODEL,
    *,
    adapter: str | Path | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    rows: int = 64,
    memory: int | float | None = None,
) -> Model:
    """Load a hub id, a local folder, a local GGUF file, an adapter folder, or the built-in ``smollm2-135m``.

    ``rows`` is how many requests are decoded together, ``memory`` what their cache may take: bytes, or on a GPU a
    share of what is free.
    """
    return Model(load_checkpoint(name, adapter=adapter, device=device, dtype=dtype), rows=rows, memory=memory)


class Model:
    """A model ready to write. Everything it is told about decoding is per call."""

    def __init__(self, checkpoint: Checkpoint, *, rows: int = 64, memory: int | float | None = None) -> None:
        self.checkpoint = checkpoint
        self._options: dict[str, Any] = {"rows": rows, "memory": memory}
        self._engine: Engine | None = None

    def engine(self, block_size: int = 1) -> Engine:
        """The engine that all calls share; a larger one is made when a call asks for larger blocks."""
        if self._engine is None or block_size > self._engine.block_size:
            self._engine = None  # its cache goes before a new one comes
            trained = self.settings.block_size if self.settings else 1
            self._engine = Engine(self.checkpoint, block_size=max(block_size, trained), **self._options)
        return self._engine

    def warm_up(self, bar: Progress | None = None, rows: int | None = None, *, dials: Sequence[str] = ()) -> None:
        """Have the engine ready for so many requests at once, all that it takes by default, before the first comes.

        On a GPU this compiles and records its steps, those of ``exact`` and of the ``dials`` named: a minute or two the
        first time, less from then on. Shown in ``bar`` if one is given.
        """
        task = None
        for done, total in self.engine().warm_up(rows, dials=[Dial.parse(each) for each in dials]):
            if bar is not None:
                task = bar.add_task("warming up") if task is None else task
                bar.update(task, completed=done, total=total)

    @property
    def settings(self) -> Settings | None:
        return self.checkpoint.settings

    @overload
    def generate(self, prompt: Prompt, **options: Any) -> Generation: ...
    @overload
    def generate(self, prompt: list[str] | list[Messages] | list[list[int]], **options: Any) -> list[Generation]: ...
    def generate(self, prompt: Any, **options: Any) -> Generation | list[Generation]:
        """Answer one prompt, or a list of prompts as one batch.

        A prompt is text, a list of messages, or a list of token ids; the options are those of `request`.
        """
        prompts = prompt if _is_batch(prompt) else [prompt]
        requests = [self.request(each, **options) for each in prompts]
        engine = self.engine(max((each.block_size for each in requests), default=1))
        asked = [engine.add(each) for each in requests]
        try:
            answers = engine.finish(asked)
        finally:
            for each in asked:
                engine.cancel(each)  # after an interruption, some may still be running
        return answers if _is_batch(prompt) else answers[0]

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
        window: str | Shape | None = None,
        block_size: int | None = None,
        sampling: Sampling | None = None,
        **sampling_options: Any,
    ) -> Request:
        """Put a prompt and options into a request.

        ``dial``: see `mars.method.dials`; by default the checkpoint's own. ``window``: ``chain``, ``tree``, ``tree=N``,
        or None for the one that is fastest here and now. ``block_size``: tokens one forward predicts, by default what
        the model was trained with. ``min_new_tokens``: no end before so many; ``ignore_end``: no end at all.
        Further options are those of `Sampling`: temperature, top_k, top_p, min_p, seed, …
        """
        if sampling is not None and sampling_options:
            raise MarsError(f"give either sampling or {', '.join(sampling_options)}, not both")
        if block_size is None:
            block_size = self.settings.block_size if self.settings else 1
        return Request(
            prompt=self.checkpoint.encode(prompt, system),
            dial=self.dial(dial),
            sampling=sampling or Sampling(**sampling_options),
            max_new_tokens=max_new_tokens,
            stop=(stop,) if isinstance(stop, str) else stop,
            block_size=block_size,
            min_new_tokens=min_new_tokens,
            ignore_end=ignore_end,
            shape=None if window is None else Shape.parse(window),
        )

    def dial(self, dial: str | Dial | None = None) -> Dial:
        """The dial asked for, by default the checkpoint's own; raises if the model cannot follow it."""
        if dial is None:
            dial = self.settings.dial if self.settings else "one-token"
        parsed = Dial.parse(dial)
        require_masks(self.checkpoint, parsed)
        return parsed


class Stream(Iterator[str]):
    """Text as it is written, one piece per forward. The dial may be turned between two pieces."""

    def __init__(self, model: Model, request: Request) -> None:
        self._model = model
        self._request = request
        self._engine = model.engine(request.block_size)
        self._answer = self._engine.add(request)
        self._given = 0
        weakref.finalize(self, self._engine.cancel, self._answer)

    @property
    def dial(self) -> Dial:
        return self._request.dial

    @dial.setter
    def dial(self, dial: str | Dial) -> None:
        self._request.dial = self._model.dial(dial)

    @property
    def result(self) -> Generation:
        """The whole answer; runs to its end if it is not there yet."""
        result = self._engine.finish([self._answer])[0]
        self._given = len(result.pieces)
        return result

    @property
    def text(self) -> str:
        """What has been written so far."""
        return "".join(self._answer.pieces)

    def __next__(self) -> str:
        while self._given == len(self._answer.pieces):
            if self._answer.finish_reason is not None:
                raise StopIteration
            self._engine.step()
        self._given += 1
        return self._answer.pieces[self._given - 1]


def _is_batch(prompt: Any) -> bool:
    """Is this a list of prompts rather than one prompt, that is, a list of texts or of lists?"""
    return not isinstance(prompt, str) and len(prompt) > 0 and not isinstance(prompt[0], Mapping | Integral)
