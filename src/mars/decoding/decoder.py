"""The plain decoder: a batch of requests, one forward at a time, each row at its own pace.

It is the oracle for every faster path, so it prefers being obviously right: windows are laid out on the host, and
what the forward decided comes back in one small copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mars.decoding.attention import use_windows
from mars.decoding.cache import Cache
from mars.decoding.forward import forward
from mars.decoding.grammar import Guide, lexicon_of, unpack
from mars.decoding.request import Answer, Generation, Request
from mars.errors import MarsError
from mars.method.acceptance import TOP, Decision, Dial, DialBatch, decide, likelihoods, tally
from mars.method.sampling import Sampling, SamplingBatch, token_bias
from mars.method.tensors import send
from mars.method.windows import Shape, Window, WindowBatch, lay_out
from mars.models.checkpoint import Checkpoint
from mars.models.settings import Settings

PREFILL_CHUNK = 512
"""Prompt tokens per row and forward, so that a long prompt does not need a huge attention mask"""


class Limits(Protocol):
    """What of a checkpoint decides whether a request can be served."""

    @property
    def name(self) -> str: ...
    @property
    def settings(self) -> Settings | None: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def context(self) -> int | None: ...


def require_masks(checkpoint: Limits, dial: Dial) -> None:
    """Raise if the dial needs masks and the model was never taught to read them."""
    if dial.uses_masks and checkpoint.settings is None:
        raise MarsError(
            f"{checkpoint.name} was not trained for MARS, so it decodes one token at a time: "
            f"use the dial one-token, or train it with `mars train` for {dial}"
        )


class Row:
    """A request's place in the batch: its cursor in the cache and what it feeds next."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.guide: Guide | None = None
        self.dial = answer.request.dial
        self.cursor = 0
        self.sure = list(answer.request.prompt)
        self.claims: list[int] = []
        self.settled = True
        """Were the claims emitted already, unchecked?"""

    def window(self, mask: int | None) -> Window:
        request = self.answer.request
        self.dial = request.dial
        if mask is None or not self.dial.uses_masks:
            return lay_out(self.sure, self.claims)
        count = len(self.claims)
        points = (count,) if self.settled else (request.shape or Shape()).points(count)
        return lay_out(self.sure, self.claims, mask=mask, masks=request.block_size - 1, points=points)

    def commit(
        self,
        accepted: int,
        trusted: int,
        token: int,
        agrees: list[bool],
        drafts: list[int],
        likely: Sequence[Sequence[float]] = (),
    ) -> None:
        """Take what the forward decided: emit tokens, move the cursor, and set up the next window."""
        self.answer.commit(self.claims, self.settled, accepted, token, drafts[:trusted], agrees, likely)
        if self.guide is not None:
            self.guide.follow(self.answer, [*self.claims[:accepted], token])
        self.cursor += len(self.sure) + accepted
        self.sure = [token]
        self.settled = not self.dial.checks
        self.claims = drafts[:trusted] if self.settled else drafts


class Decoder:
    """Decodes a batch of requests together; `step` runs one forward for every row still going."""

    def __init__(self, checkpoint: Checkpoint, requests: Sequence[Request]) -> None:
        for request in requests:
            check_request(checkpoint, request)
        self.checkpoint = checkpoint
        self.answers = [
            Answer(each, checkpoint.tokenizer, checkpoint.end_tokens, checkpoint.context) for each in requests
        ]
        self._rows = [Row(answer) for answer in self.answers]
        for row in self._rows:
            if row.answer.request.grammar is not None:
                row.guide = lexicon_of(checkpoint).guide(row.answer.request.grammar)
        self._cache = Cache(len(requests), max(map(_slots, self.answers), default=0))
        self._set_sampling([each.drawing() for each in requests])
        self._seen, self._counts = self._count_prompts()
        use_windows(checkpoint.module)

    @property
    def running(self) -> bool:
        return bool(self._rows)

    def finish(self) -> list[Generation]:
        """Step until every request is answered."""
        while self.running:
            self.step()
        return [answer.generation() for answer in self.answers]

    @torch.inference_mode()
    def step(self) -> None:
        self._prefill()
        windows = [row.window(self.checkpoint.mask_token_id) for row in self._rows]
        batch, logits = self._forward(windows)
        decision = self._decide(batch, logits)
        likely: list[list[list[float]]] = [[] for _ in self._rows]
        if any(row.answer.request.logprobs is not None for row in self._rows):
            ban = token_bias([Sampling()], self.checkpoint.vocabulary, self.checkpoint.mask_token_id)
            likely = likelihoods(batch, logits, decision, send(ban, self.checkpoint.device)).tolist()
        self._commit(decision, likely)
        self._retire()

    def _prefill(self) -> None:
        """Run long prompts up to their last chunk. Other rows ride along without moving their cursors."""
        while any(chunks := [PREFILL_CHUNK * (len(row.sure) > PREFILL_CHUNK) for row in self._rows]):
            self._forward([lay_out(row.sure[: chunk or 1]) for row, chunk in zip(self._rows, chunks, strict=True)])
            for row, chunk in zip(self._rows, chunks, strict=True):
                row.cursor += chunk
                row.sure = row.sure[chunk:]

    def _forward(self, windows: Sequence[Window]) -> tuple[WindowBatch, Tensor]:
        return forward(self.checkpoint, self._cache, [row.cursor for row in self._rows], windows)

    def _decide(self, batch: WindowBatch, logits: Tensor) -> Decision:
        device = self.checkpoint.device
        decision = decide(
            batch,
            logits,
            DialBatch.of([row.dial for row in self._rows], device),
            self._sampling,
            positions=send([row.cursor + len(row.sure) - 1 for row in self._rows], device),
            settled=send([row.settled for row in self._rows], device),
            seen=self._seen,
            counts=self._counts,
            allowed=self._allowed(batch.claims.shape[1] + 1),
        )
        if self._seen is not None and self._counts is not None:
            self._counts = tally(self._counts, batch.claims, decision)
            self._seen = self._seen | (self._counts > 0)
        return decision

    def _allowed(self, width: int) -> Tensor | None:
        """Which tokens the rows' grammars allow at each trunk position; None if there are no grammars."""
        guides = [(row.guide, row.claims) for row in self._rows if row.guide is not None]
        if not guides:
            return None
        allowed = torch.ones(len(self._rows), width, self.checkpoint.vocabulary, dtype=torch.bool)
        found = lexicon_of(self.checkpoint).allowed(guides, width)
        allowed[[row.guide is not None for row in self._rows]] = unpack(found, self.checkpoint.vocabulary)
        return send(allowed, self.checkpoint.device)

    def _commit(self, decision: Decision, likely: Sequence[Sequence[Sequence[float]]]) -> None:
        scalars = torch.stack([decision.accepted, decision.trusted, decision.draft_count, decision.token], 1)
        copied = torch.cat([scalars, decision.agrees, decision.drafts], 1).tolist()  # the step's one copy to the host
        most = decision.agrees.shape[1]
        for row, mine, (accepted, trusted, count, token, *rest) in zip(self._rows, likely, copied, strict=True):
            agrees = [bool(flag) for flag in rest[: len(row.claims)]]
            row.commit(accepted, trusted, token, agrees, rest[most : most + count], mine)

    def _retire(self) -> None:
        """Drop finished rows and close the gaps they leave."""
        going = [index for index, row in enumerate(self._rows) if row.answer.finish_reason is None]
        if len(going) == len(self._rows):
            return
        order = self._cache.keep(going)
        self._rows = [self._rows[index] for index in order]
        self._set_sampling([self._samplings[index] for index in order])
        if self._seen is not None and self._counts is not None:
            self._seen, self._counts = self._seen[order], self._counts[order]

    def _set_sampling(self, rows: list[Sampling]) -> None:
        self._samplings = rows
        checkpoint = self.checkpoint
        self._sampling = SamplingBatch.of(
            rows, checkpoint.vocabulary, checkpoint.mask_token_id, checkpoint.device, checkpoint.end_tokens
        )

    def _count_prompts(self) -> tuple[Tensor | None, Tensor | None]:
        """Which tokens each row has seen and how often its answer used them, kept only if somebody asks."""
        if not self._sampling.features.penalises:
            return None, None
        counts = torch.zeros(len(self._rows), self.checkpoint.vocabulary, device=self.checkpoint.device)
        seen = counts.bool()
        for index, row in enumerate(self._rows):
            seen[index, torch.tensor(row.sure, device=seen.device)] = True
        return seen, counts


def check_request(checkpoint: Limits, request: Request) -> None:
    """Raise if the request cannot be served."""
    require_masks(checkpoint, request.dial)
    if not request.prompt:
        raise MarsError("the prompt is empty: give at least one token")
    if not 0 <= min(request.prompt) <= max(request.prompt) < checkpoint.vocabulary:
        raise MarsError(f"the prompt has tokens outside the vocabulary of {checkpoint.vocabulary}")
    if unknown := [token for token in request.sampling.logit_bias if not 0 <= token < checkpoint.vocabulary]:
        raise MarsError(f"logit_bias names token {unknown[0]}, but the vocabulary has {checkpoint.vocabulary} tokens")
    if request.max_new_tokens < 1:
        raise MarsError(f"max_new_tokens must be at least 1, not {request.max_new_tokens}")
    if not 0 <= request.min_new_tokens <= request.max_new_tokens:
        raise MarsError(f"min_new_tokens must be between 0 and max_new_tokens, not {request.min_new_tokens}")
    if request.logprobs is not None and not 0 <= request.logprobs <= TOP:
        raise MarsError(f"logprobs must be 0 to {TOP}, not {request.logprobs}")
    if request.needs_checks and request.dial.kind == "threshold":
        raise MarsError(f"logprobs and grammars need the dial one-token, exact or relaxed, not {request.dial}")
    if request.grammar is not None and (request.min_new_tokens or request.ignore_end):
        raise MarsError("a grammar says where a text ends: min_new_tokens and ignore_end cannot be used with it")
    least = 2 if request.dial.uses_masks else 1
    if not isinstance(request.block_size, int) or request.block_size < least:
        raise MarsError(f"block_size must be at least {least} for the dial {request.dial}, not {request.block_size}")
    if checkpoint.context is not None and len(request.prompt) >= checkpoint.context:
        raise MarsError(
            f"the prompt has {len(request.prompt)} tokens, but {checkpoint.name} holds {checkpoint.context} together "
            "with the answer: shorten the prompt"
        )


def _slots(answer: Answer) -> int:
    """Slots an answer may need: its text, and the widest tree behind it."""
    return len(answer.request.prompt) + answer.limit + answer.request.block_size**2
