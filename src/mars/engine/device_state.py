"""What the device knows of the running sequences: where they are in their text, and what they feed next.

Each sequence has a *slot*, its index in these tensors, for as long as it runs. A step reads the slots of its sequences
and writes back what it decided, so that the next step can begin before the host has seen the result of this one. Slot 0
is padding: batches are filled up with it, and nothing reads what it holds.
"""

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from mars.core.grammar import BITS, unpack
from mars.core.sequence import Sequence
from mars.engine.step import PADDING_SLOT, StepInputs
from mars.method.acceptance import Decision, count_tokens
from mars.method.sampling import bias_tensor
from mars.method.tensors import send
from mars.method.windows import Window, WindowBatch, build_windows


class DeviceState:
    def __init__(self, slots: int, drafts: int, pages: int, vocabulary: int, device: torch.device) -> None:
        """For ``slots`` sequences with at most ``drafts`` drafts and ``pages`` pages each."""
        self.slots = slots
        self.vocabulary = vocabulary
        self.cursor, self.last, self.draft_count = (
            torch.zeros(slots + 1, dtype=torch.long, device=device) for _ in range(3)
        )
        self.drafts_emitted = torch.ones(slots + 1, dtype=torch.bool, device=device)
        self.drafts = torch.zeros(slots + 1, drafts, dtype=torch.long, device=device)
        self.page_table = torch.zeros(slots + 1, pages, dtype=torch.long, device=device)
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None
        self._bias: Tensor | None = None
        self._biased: set[int] = set()  # slots with a logit bias
        self._grammar_mask: Tensor | None = None
        self._masked: set[int] = set()  # slots with a grammar mask

    @property
    def device(self) -> torch.device:
        return self.cursor.device

    # --- from the host

    def begin(self, sequences: SequenceOf[Sequence]) -> None:
        """Put sequences into their slots that are about to decode."""
        if not sequences:
            return
        self.put(
            [(each.slot or 0, each.cursor, each.tokens[-1], each.drafts, each.drafts_emitted) for each in sequences]
        )
        for each in sequences:
            slot = each.slot or 0
            if each.sampling.penalises:
                self.set_token_counts(slot, each.request.prompt, each.tokens[len(each.request.prompt) :])
            biased = bool(each.sampling.logit_bias)
            self.set_logit_bias(slot, bias_tensor([each.sampling], self.vocabulary, None)[0] if biased else None)
            self.set_grammar_mask([slot], None)

    def put(self, states: SequenceOf[tuple[int, int, int, SequenceOf[int], bool]]) -> None:
        """Set slot, cursor, last token, drafts and whether these were emitted, in one copy for all of them."""
        most = self.drafts.shape[1]
        rows = [
            [slot, cursor, last, len(drafts), emitted, *drafts, *[0] * (most - len(drafts))]
            for slot, cursor, last, drafts, emitted in states
        ]
        values = send(rows, self.device)
        slot = values[:, 0]
        self.cursor[slot], self.last[slot], self.draft_count[slot] = values[:, 1], values[:, 2], values[:, 3]
        self.drafts_emitted[slot], self.drafts[slot] = values[:, 4].bool(), values[:, 5:]

    def set_pages(self, entries: SequenceOf[tuple[int, int, int]]) -> None:
        """Entries of the page table as (slot, index, page)."""
        slot, index, page = send(entries, self.device).unbind(1)
        self.page_table[slot, index] = page

    def set_token_counts(self, slot: int, prompt: SequenceOf[int], generated: SequenceOf[int]) -> None:
        """What a sequence has read and written, for its penalties."""
        if self._seen is None or self._counts is None:
            self._counts = torch.zeros(self.slots + 1, self.vocabulary, device=self.device)
            self._seen = self._counts.bool()
        counts = torch.bincount(torch.tensor(generated, dtype=torch.long), minlength=self.vocabulary)
        self._counts[slot] = send(counts.float(), self.device)
        seen = torch.bincount(torch.tensor(prompt, dtype=torch.long), minlength=self.vocabulary) + counts > 0
        self._seen[slot] = send(seen, self.device)

    def set_logit_bias(self, slot: int, bias: Tensor | None) -> None:
        """What is added to a sequence's logits; None clears what the slot's last sequence had."""
        if bias is None and slot not in self._biased:
            return
        if self._bias is None:
            self._bias = torch.zeros(self.slots + 1, self.vocabulary, device=self.device)
        self._bias[slot] = 0.0 if bias is None else send(bias, self.device)
        (self._biased.discard if bias is None else self._biased.add)(slot)

    def set_grammar_mask(self, slots: SequenceOf[int], allowed: Tensor | None) -> None:
        """Tokens that sequences may write in their next step (slots, positions, words), as bits; None: all."""
        if allowed is None and not self._masked.intersection(slots):
            return
        if self._grammar_mask is None:
            words = -(-self.vocabulary // BITS)
            shape = (self.slots + 1, self.drafts.shape[1] + 1, words)
            self._grammar_mask = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        if allowed is None:
            self._grammar_mask[slots] = -1
            self._masked.difference_update(slots)
        else:
            self._grammar_mask[slots, : allowed.shape[1]] = send(allowed, self.device)
            self._masked.update(slots)

    # --- for a step

    def windows(self, window: Window, inputs: StepInputs, mask_token: int) -> WindowBatch:
        slots = inputs.slots
        return build_windows(
            window,
            mask_token,
            last=self.last[slots],
            drafts=self.drafts[slots],
            draft_count=self.draft_count[slots],
            emitted=self.drafts_emitted[slots],
            groups=inputs.groups,
            masks=inputs.masks,
        )

    def logit_bias(self, slots: Tensor) -> Tensor:
        if self._bias is None:
            raise RuntimeError("no sequence with a logit bias has begun")
        return self._bias[slots]

    def grammar_mask(self, slots: Tensor, width: int) -> Tensor:
        """(sequences, width, vocabulary): which tokens are allowed."""
        if self._grammar_mask is None:
            raise RuntimeError("no sequence with a grammar has begun")
        return unpack(self._grammar_mask[slots, :width], self.vocabulary)

    def token_counts(self, slots: Tensor) -> dict[str, Tensor]:
        """Tokens read and written, for `decide`."""
        if self._seen is None or self._counts is None:
            raise RuntimeError("no sequence with penalties has begun")
        return {"seen": self._seen[slots], "counts": self._counts[slots]}

    def advance(self, inputs: StepInputs, drafts: Tensor, decision: Decision) -> None:
        """Move the cursors over what was accepted, and set up what is fed next."""
        slots, verifies = inputs.slots, inputs.verifies
        if inputs.features.penalises and self._seen is not None and self._counts is not None:
            counts = count_tokens(self._counts[slots], drafts, decision)
            self._counts[slots] = counts
            self._seen[slots] |= counts > 0
        self.cursor[slots] += torch.where(slots == PADDING_SLOT, 0, 1 + decision.accepted)
        self.last[slots] = decision.token
        self.drafts_emitted[slots] = ~verifies
        self.draft_count[slots] = torch.where(verifies, decision.draft_count, decision.trusted)
        self.drafts[slots, : decision.drafts.shape[1]] = decision.drafts
