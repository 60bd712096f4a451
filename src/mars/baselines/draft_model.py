"""Speculative decoding with a separate draft model, alone or beside a MARS target.

A MARS target carries a group of masks for every number of drafts it might accept, so whatever the outcome, the first
few drafts of the next round are already there and the draft model only adds to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mars.baselines.common import believed, mask_token, open_answer, without_mask
from mars.baselines.jacobi import count_matches
from mars.decoding.attention import use_windows
from mars.decoding.cache import Cache
from mars.decoding.decoder import require_masks
from mars.decoding.forward import forward
from mars.decoding.request import Generation, Request
from mars.errors import MarsError
from mars.method.acceptance import Dial
from mars.method.windows import lay_out
from mars.models.checkpoint import Checkpoint


class _Drafter:
    """The draft model with its own cache; it may be a MARS model itself and guess by its own dial."""

    def __init__(self, checkpoint: Checkpoint, dial: Dial, capacity: int) -> None:
        use_windows(checkpoint.module)
        self.checkpoint = checkpoint
        self.dial = dial
        self.masks = checkpoint.settings.block_size - 1 if dial.uses_masks and checkpoint.settings else 0
        self.cache = Cache(1, capacity + self.masks)
        self.cursor = 0
        self.forwards = 0

    def propose(self, text: list[int], count: int) -> list[int]:
        """Continue the text by ``count`` tokens."""
        proposed: list[int] = []
        while len(proposed) < count:
            known = [*text, *proposed]
            window = lay_out(
                known[self.cursor :], mask=self.checkpoint.mask_token_id or 0, masks=self.masks, points=(0,)
            )
            _, logits = forward(self.checkpoint, self.cache, [self.cursor], [window])
            proposed += believed(without_mask(self.checkpoint, logits[0]), self.dial)
            self.cursor = len(known)
            self.forwards += 1
        return proposed[:count]


@torch.inference_mode()
def draft_model(
    target: Checkpoint,
    draft: Checkpoint,
    request: Request,
    drafts: int = 4,
    *,
    draft_dial: str = "one-token",
    target_masks: bool = False,
) -> Generation:
    """Check ``drafts`` tokens per forward of the target; lossless. ``target_masks`` uses the target's masks too."""
    if target.vocabulary != draft.vocabulary:
        raise MarsError(f"{draft.name} cannot draft for {target.name}: their vocabularies differ")
    require_masks(draft, Dial.parse(draft_dial))
    answer = open_answer(target, request)
    use_windows(target.module)
    masks = request.block_size - 1 if target_masks else 0
    capacity = len(request.prompt) + answer.limit + (drafts + 1) * (masks + 1)
    drafter = _Drafter(draft, Dial.parse(draft_dial), capacity)
    cache, cursor = Cache(1, capacity), 0
    text, free = list(request.prompt), list[int]()
    mask = mask_token(target) if target_masks else 0
    while answer.finish_reason is None:
        free = free[: min(drafts, answer.room - 1)]
        claims = free + drafter.propose(text + free, min(drafts, answer.room - 1) - len(free))
        window = lay_out(text[cursor:], claims, mask=mask, masks=masks, points=range(len(claims) + 1))
        _, logits = forward(target, cache, [cursor], [window])
        choices, groups = _read(without_mask(target, logits[0]), len(claims), masks)
        accepted = count_matches(claims, choices)
        taken = answer.emit([*claims[:accepted], choices[accepted]])
        answer.judge([True] * taken)
        cursor = len(text) + accepted
        text += [*claims[:accepted], choices[accepted]]
        free = groups[accepted]
        drafter.cursor = min(drafter.cursor, cursor)
    answer.draft_forwards = drafter.forwards
    return answer.generation()


def _read(logits: Tensor, claims: int, masks: int) -> tuple[list[int], list[list[int]]]:
    """The AR choices along the claims, and the guesses of the mask group behind each of them."""
    tokens = logits.argmax(1).tolist()
    start = claims + 1
    return tokens[:start], [tokens[start + i * masks : start + (i + 1) * masks] for i in range(start)]
