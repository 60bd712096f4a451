"""Many answers at once, one token per forward: a fixed batch whose rows are refilled as soon as they are done.

Everything a step needs lies on the device in tensors of fixed shape, so that on a GPU a step is one CUDA graph, and
the host looks in only now and then. Prompts are fed the same way, token by token: prompts and answers are about as
long as each other here, and one shape is all there is to compile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface

from mars.errors import MarsError
from mars.models import Checkpoint
from mars.training.attention import masked_attention

NAME = "mars_writer"
GLANCE = 16
"""Steps between two looks at which rows are done"""
BLOCK = 128
"""Keys that FlexAttention reads or skips as one"""


@dataclass(frozen=True, slots=True)
class Job:
    """A text to continue. ``key`` is the caller's own mark."""

    key: Any
    prompt: list[int]
    temperature: float = 0.0
    max_new_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Written:
    job: Job
    tokens: list[int]
    """Without the end token"""
    ended: bool
    """Did the model end it, rather than the limit?"""


class Writer:
    """``write`` turns jobs into texts, in the order in which they get done."""

    def __init__(self, checkpoint: Checkpoint, rows: int, length: int, seed: int = 0) -> None:
        self._checkpoint = checkpoint
        device = checkpoint.device
        self.length = length
        """Most tokens of a text, prompt and answer together"""
        self._slots = -(-length // BLOCK) * BLOCK
        self._text = torch.zeros(rows, self._slots, dtype=torch.long, device=device)
        self._cursor, self._prompt, self._limit = (torch.zeros(rows, dtype=torch.long, device=device) for _ in range(3))
        self._temperature = torch.zeros(rows, 1, device=device)
        self._done = torch.ones(rows, dtype=torch.bool, device=device)
        self._ends = torch.zeros(checkpoint.vocabulary, dtype=torch.bool, device=device)
        self._ends[list(checkpoint.end_tokens)] = True
        self._jobs: list[Job | None] = [None] * rows
        self._stores: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[int | None, Tensor | BlockMask] = {}
        """One for all layers of a step, by sliding window"""
        self._graph: torch.cuda.CUDAGraph | None = None
        checkpoint.module.set_attn_implementation(NAME)
        torch.manual_seed(seed)

    @torch.inference_mode()
    def write(self, jobs: Iterable[Job]) -> Iterator[Written]:
        """While the device works, the caller takes what was finished before and the next jobs are fetched."""
        source = iter(jobs)
        waiting = deque(islice(source, len(self._jobs)))
        finished: list[Written] = []
        while waiting or any(self._jobs):
            self._refill(waiting)
            for _ in range(GLANCE):
                self._step()
            yield from finished
            waiting.extend(islice(source, len(self._jobs) - len(waiting)))
            finished = self._collect()
        yield from finished

    def _refill(self, waiting: deque[Job]) -> None:
        """Give free rows new jobs, in a handful of copies for all of them together."""
        free = [row for row, job in enumerate(self._jobs) if job is None]
        jobs = [waiting.popleft() for _ in free[: len(waiting)]]
        if not jobs:
            return
        rows, device = free[: len(jobs)], self._text.device
        for row, job in zip(rows, jobs, strict=True):
            self._jobs[row] = job
        sizes = torch.tensor([len(job.prompt) for job in jobs])
        longest = int(sizes.max())
        if longest >= self.length:
            raise MarsError(f"a prompt of {longest} tokens leaves no room for an answer in {self.length}")
        limits = (sizes + torch.tensor([job.max_new_tokens for job in jobs])).clamp(max=self.length)
        at = torch.tensor(rows, device=device)
        padded = [job.prompt + [0] * (longest - len(job.prompt)) for job in jobs]
        self._text[at, :longest] = torch.tensor(padded, device=device)
        self._cursor[at] = 0
        self._prompt[at] = sizes.to(device)
        self._limit[at] = limits.to(device)
        self._temperature[at] = torch.tensor([[job.temperature] for job in jobs], device=device)
        self._done[at] = False

    def _step(self) -> None:
        if self._text.device.type != "cuda":
            self._advance()
        elif self._graph is None:
            self._record()
        else:
            self._graph.replay()

    def _record(self) -> None:
        """Take two steps as warm-up, which compiles kernels and allocates the cache; then record one for replay."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._advance()
            self._advance()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._advance()

    def _advance(self) -> None:
        """One token for every row: the prompt's next one, else one drawn from the model."""
        self._masks.clear()
        feed = self._text.gather(1, self._cursor[:, None])
        logits = self._checkpoint.module(
            input_ids=feed, position_ids=self._cursor[:, None], use_cache=False, logits_to_keep=1, writer=self
        ).logits[:, 0]
        place = (self._cursor + 1).clamp(max=self.length - 1)
        prompted = place < self._prompt
        token = torch.where(prompted, self._text.gather(1, place[:, None])[:, 0], self._draw(logits.float()))
        token = torch.where(self._done, self._text.gather(1, place[:, None])[:, 0], token)
        self._text.scatter_(1, place[:, None], token[:, None])
        self._cursor.copy_(torch.where(self._done, self._cursor, place))
        self._done |= ~prompted & (self._ends[token] | (place + 1 >= self._limit))

    def _draw(self, logits: Tensor) -> Tensor:
        """A token for each row: the likeliest where the temperature is 0, else by the Gumbel trick."""
        if self._checkpoint.mask_token_id is not None:
            logits[:, self._checkpoint.mask_token_id] = -torch.inf
        noise = -torch.empty_like(logits).exponential_().log_()
        return (logits + noise * self._temperature).argmax(1)

    def _collect(self) -> list[Written]:
        flags = self._done.tolist()
        done = [(row, job) for row, job in enumerate(self._jobs) if job is not None and flags[row]]
        at = torch.tensor([row for row, _ in done], dtype=torch.long, device=self._text.device)
        texts, cursors = self._text[at].tolist(), self._cursor[at].tolist()
        found = []
        for (row, job), text, cursor in zip(done, texts, cursors, strict=True):
            tokens = text[len(job.prompt) : cursor + 1]
            ended = tokens[-1] in self._checkpoint.end_tokens
            self._jobs[row] = None
            found.append(Written(job, tokens[:-1] if ended else tokens, ended))
        return found

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sliding: int | None, **options: Any
    ) -> Tensor:
        """Store the step's keys and values and attend to everything up to the cursor; heads sharing keys are folded."""
        if layer not in self._stores:
            shape = (len(key), key.shape[1], self._slots, key.shape[3])
            self._stores[layer] = key.new_zeros(shape), value.new_zeros((*shape[:3], value.shape[3]))
        keys, values = self._stores[layer]
        at = self._cursor[:, None, None, None]
        keys.scatter_(2, at.expand_as(key), key)
        values.scatter_(2, at.expand_as(value), value)
        rows, heads, _, size = query.shape
        folded = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
        if sliding not in self._masks:
            self._masks[sliding] = self._mask(sliding, folded.shape[2])
        return masked_attention(folded, keys, values, self._masks[sliding], **options).reshape(rows, 1, heads, -1)

    def _mask(self, sliding: int | None, queries: int) -> Tensor | BlockMask:
        cursor = self._cursor

        def visible(row: Tensor, _head: Tensor, _query: Tensor, key: Tensor) -> Tensor:
            inside = key <= cursor[row]
            return inside if sliding is None else inside & (key > cursor[row] - sliding)

        if cursor.device.type != "cuda":
            rows, here = torch.arange(len(cursor))[:, None], torch.arange(self._slots)
            return visible(rows, rows, rows, here)[:, None, None]
        blocks = self._slots // BLOCK
        order = torch.arange(blocks, device=cursor.device, dtype=torch.int32).expand(len(cursor), 1, 1, blocks)
        used = (cursor // BLOCK + 1).to(torch.int32)[:, None, None]
        return BlockMask.from_kv_blocks(
            used, order.contiguous(), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(queries, self._slots)
        )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    *,
    writer: Writer | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    if writer is None:
        raise MarsError(f"{type(module).__name__} does not hand its keywords down to its attention")
    sinks = None if s_aux is None else s_aux.view(1, key.shape[1], -1, 1)
    options = {"scale": scaling, "softcap": softcap, "sinks": sinks}
    return writer.attend(module.layer_idx, query, key, value, sliding_window, **options), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, attend)
