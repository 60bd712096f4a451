"""Speculative decoding with a separate draft model, alone or beside a MARS target.

A MARS target carries a mask group for every number of drafts it might accept, so whatever the outcome, the first few
drafts of the next round are there already and the draft model only adds to them. They are verified like all drafts, so
the text is the AR model's. With the dial ``threshold`` the paper's rule holds instead: the predictions of the masks are
emitted at once, unchecked, while they are confident, and the draft model goes on from there.
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
    """Verify ``drafts`` tokens per forward of the target. ``target_masks`` uses the target's masks too.

    The text is the AR model's unless the request's dial is ``threshold`` and the target's masks are used.
    """
    if target.vocabulary != draft.vocabulary:
        raise MarsError(f"{draft.name} cannot draft for {target.name}: their vocabularies differ")
    require_masks(draft, Dial.parse(draft_dial))
    sequence = greedy_sequence(target, request)
    masks = request.block_size - 1 if target_masks and mask_token(target) is not None else 0
    capacity = len(request.prompt) + sequence.max_tokens + (drafts + masks + 1) * (masks + 1)
    drafter = _Drafter(draft, Dial.parse(draft_dial), capacity)
    text, tokens, free = Text(target, capacity), sequence.tokens, list[int]()
    trusted = list[int]()  # tokens that the target's masks predicted, emitted but not verified
    emits_unchecked = sequence.dial.kind == "threshold"
    while not sequence.is_finished:
        count = min(drafts, sequence.room - 1)
        free = free[:count]
        known = [*tokens, *trusted]
        proposed = free + drafter.propose(known + free, count - len(free))
        fed = [*trusted, *proposed]
        logits = text.feed(tokens, fed, groups=len(fed) + 1, masks=masks)
        choices = logits[: len(fed) + 1].argmax(1).tolist()
        agrees = [mine == ar for mine, ar in zip(trusted, choices[: len(trusted)], strict=True)]
        accepted = count_matches(proposed, choices[len(trusted) :])
        last = len(trusted) + accepted
        group = len(fed) + 1 + last * masks  # a mask group follows every number of accepted drafts, in order
        block = torch.cat([logits[last : last + 1], logits[group : group + masks]])
        new = [*proposed[:accepted], *predicted(target, block, sequence.dial)]
        emit(sequence, new, [*agrees, *[True] * (accepted + 1)])
        tokens += [*trusted, *new[: accepted + 1]]
        trusted = new[accepted + 1 :]
        free = [] if emits_unchecked else with_head(target, block)[1:].argmax(1).tolist()
        text.cursor = len(tokens) - 1
        drafter.text.cursor = min(drafter.text.cursor, text.cursor)
    sequence.output.draft_forwards = drafter.forwards
    return sequence.output
