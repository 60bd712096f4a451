"""The plain decoder: a batch of requests, one forward at a time, each sequence at its own pace.

It is the oracle for every faster path, so it prefers being obviously right: state is kept on the host, and everything
a forward needs is built anew from it.
"""

from collections.abc import Sequence as SequenceOf
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from mars.core.grammar import grammar_compiler, unpack
from mars.core.output import OutputProcessor, RequestOutput
from mars.core.request import Request
from mars.core.sequence import Sequence
from mars.engine.step import StepOutputs
from mars.method.acceptance import DialTensors, decide, logprobs
from mars.method.lookup import MOST_DRAFTS
from mars.method.sampling import SamplingParams, SamplingTensors, bias_tensor
from mars.method.tensors import send
from mars.method.windows import Window, WindowBatch
from mars.models.checkpoint import Checkpoint
from mars.reference.cache import Cache, forward_windows, prefill, windows_of


class Decoder:
    """Decodes a batch of requests together; `step` runs one forward for every sequence still going."""

    def __init__(self, checkpoint: Checkpoint, requests: SequenceOf[Request]) -> None:
        self.checkpoint = checkpoint
        self.sequences = [Sequence.of(request, checkpoint) for request in requests]
        self._processors = [
            OutputProcessor(each.output, checkpoint.tokenizer, each.end_tokens, each.request.stop)
            for each in self.sequences
        ]
        self._cache = Cache(len(requests), max(map(_capacity, self.sequences), default=0))

    @property
    def running(self) -> list[int]:
        return [row for row, sequence in enumerate(self.sequences) if not sequence.is_finished]

    def finish(self) -> list[RequestOutput]:
        """Step until every request is answered."""
        while self.running:
            self.step()
        return [sequence.output for sequence in self.sequences]

    @torch.inference_mode()
    def step(self) -> None:
        self._prefill()
        rows, sequences = self.running, [self.sequences[row] for row in self.running]
        windows = feed(self.checkpoint, sequences)
        device, vocabulary, mask = self.checkpoint.device, self.checkpoint.vocabulary, self.checkpoint.banned_token
        cursors = send([each.cursor for each in sequences], device)
        logits = forward_windows(self.checkpoint, self._cache, send(rows, device), cursors, windows)
        dials = [each.dial for each in sequences]
        decision = decide(
            windows,
            logits,
            DialTensors.of(dials, device),
            SamplingTensors.of(
                [each.sampling for each in sequences], vocabulary, mask, device, self.checkpoint.end_tokens
            ),
            positions=cursors,
            emitted=send([each.drafts_emitted for each in sequences], device),
            head=self.checkpoint.head,
            allowed=self._allowed(sequences, windows.drafts.shape[1] + 1),
            **self._history(sequences),  # type: ignore[arg-type]
        )
        wants = [each.request.logprobs is not None for each in sequences]
        known = None
        if any(wants):
            known = logprobs(windows, logits, decision, send(bias_tensor([SamplingParams()], vocabulary, mask), device))
        for row, dial, result in zip(rows, dials, StepOutputs.of(decision, known).results(wants), strict=True):
            self.sequences[row].process(result, dial)
            self.sequences[row].look_up(self.sequences[row].request.lookup or 0)
            self._processors[row].update()

    def _prefill(self) -> None:
        """Cache all prompt tokens but the last."""
        rows = [row for row in self.running if not self.sequences[row].is_prefilled]
        texts = {row: self.sequences[row].tokens[:-1] for row in rows}
        prefill(self.checkpoint, self._cache, texts, {row: self.sequences[row].cursor for row in rows})
        for row in rows:
            self.sequences[row].cursor = len(texts[row])

    def _history(self, sequences: SequenceOf[Sequence]) -> dict[str, Tensor]:
        """Which tokens each sequence has seen and how often it generated them, if a penalty needs it."""
        if not any(each.sampling.penalises for each in sequences):
            return {}
        vocabulary = self.checkpoint.vocabulary
        counts = [
            torch.bincount(
                torch.tensor(each.tokens[len(each.request.prompt) :], dtype=torch.long), minlength=vocabulary
            )
            for each in sequences
        ]
        seen = [torch.bincount(torch.tensor(each.tokens), minlength=vocabulary) > 0 for each in sequences]
        device = self.checkpoint.device
        return {"counts": send(torch.stack(counts).float(), device), "seen": send(torch.stack(seen), device)}

    def _allowed(self, sequences: SequenceOf[Sequence], width: int) -> Tensor | None:
        """Which tokens grammars allow at each verified position; None if there are no grammars."""
        texts = [(each.matcher, each.drafts) for each in sequences if each.matcher is not None]
        if not texts:
            return None
        allowed = torch.ones(len(sequences), width, self.checkpoint.vocabulary, dtype=torch.bool)
        found = grammar_compiler(self.checkpoint).allowed(texts, width)
        allowed[[each.matcher is not None for each in sequences]] = unpack(found, self.checkpoint.vocabulary)
        return send(allowed, self.checkpoint.device)


def feed(checkpoint: Checkpoint, sequences: SequenceOf[Sequence]) -> WindowBatch:
    """The windows of the next forward."""
    wanted = [_window(each) for each in sequences]
    return windows_of(
        checkpoint,
        reduce(or_, wanted, Window(max(len(each.drafts) for each in sequences))),
        [(each.tokens[-1], each.drafts) for each in sequences],
        emitted=[each.drafts_emitted for each in sequences],
        groups=[max(1, each.groups) for each in wanted],
        masks=[each.masks for each in wanted],
        candidates=[each.candidates[: window.candidates] for each, window in zip(sequences, wanted, strict=True)],
    )


def _window(sequence: Sequence) -> Window:
    """What the sequence wants of a window, besides room for its drafts: a chain unless its request says otherwise."""
    if not sequence.dial.uses_masks:
        return Window()
    return sequence.request.window or Window.of(1, sequence.request.block_size)


def _capacity(sequence: Sequence) -> int:
    """Its text, and the widest window behind it."""
    request = sequence.request
    tree = Window.of(request.block_size, request.block_size)
    return len(request.prompt) + sequence.max_tokens + ((request.window or tree) | tree).width + MOST_DRAFTS
