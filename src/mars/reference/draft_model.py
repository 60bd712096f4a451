"""Speculative decoding with a separate draft model, alone or beside a MARS target.

A MARS target carries a mask group for every number of drafts it might accept, so whatever the outcome, the first few
drafts of the next round are there already and the draft model only adds to them.
"""

import torch

from mars.core.output import RequestOutput
from mars.core.request import Request, require_masks
from mars.errors import MarsError
from mars.method.acceptance import Dial
from mars.models.checkpoint import Checkpoint
from mars.reference.common import Text, emit, greedy_sequence, mask_token, predicted, with_head
from mars.reference.jacobi import count_matches


class _Drafter:
    """The draft model with its own cache; it may be a MARS model itself and predict by its own dial."""

    def __init__(self, checkpoint: Checkpoint, dial: Dial, capacity: int) -> None:
        self.dial = dial
        self.masks = checkpoint.settings.block_size - 1 if dial.uses_masks and checkpoint.settings else 0
        self.text = Text(checkpoint, capacity + self.masks)
        self.forwards = 0

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Continue the text by ``count`` tokens."""
        proposed: list[int] = []
        while len(proposed) < count:
            known = [*tokens, *proposed]
            proposed += predicted(self.text.checkpoint, self.text.feed(known, masks=self.masks), self.dial)
            self.text.cursor = len(known)
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
) -> RequestOutput:
    """Verify ``drafts`` tokens per forward of the target; lossless. ``target_masks`` uses the target's masks too."""
    if target.vocabulary != draft.vocabulary:
        raise MarsError(f"{draft.name} cannot draft for {target.name}: their vocabularies differ")
    require_masks(draft, Dial.parse(draft_dial))
    sequence = greedy_sequence(target, request)
    masks = request.block_size - 1 if target_masks and mask_token(target) is not None else 0
    capacity = len(request.prompt) + sequence.max_tokens + (drafts + 1) * (masks + 1)
    drafter = _Drafter(draft, Dial.parse(draft_dial), capacity)
    text, tokens, free = Text(target, capacity), sequence.tokens, list[int]()
    while not sequence.is_finished:
        count = min(drafts, sequence.room - 1)
        free = free[:count]
        proposed = free + drafter.propose(tokens + free, count - len(free))
        logits = text.feed(tokens, proposed, groups=count + 1, masks=masks)
        choices = logits[: count + 1].argmax(1).tolist()
        accepted = count_matches(proposed, choices)
        emit(sequence, [*proposed[:accepted], choices[accepted]], [True] * (accepted + 1))
        tokens += [*proposed[:accepted], choices[accepted]]
        text.cursor = len(tokens) - 1
        group = count + 1 + accepted * masks  # a mask group follows every number of accepted drafts, in order
        block = torch.cat([logits[accepted : accepted + 1], logits[group : group + masks]])
        free = with_head(target, block)[1:].argmax(1).tolist()
        drafter.text.cursor = min(drafter.text.cursor, text.cursor)
    sequence.output.draft_forwards = drafter.forwards
    return sequence.output
