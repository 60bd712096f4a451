"""What the device knows of the running sequences: where they are in their text, and what they feed next.

Each sequence has a *slot*, its index in these tensors, for as long as it runs. A step reads the slots of its sequences
and writes back what it decided, so that the next step can begin before the host has seen the result of this one. Slot 0
is padding: batches are filled up with it, and nothing reads what it holds.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch
from torch import Tensor

from mars.core.grammar import BITS, unpack
from mars.core.sequence import Sequence
from mars.engine.budget import DraftValues
from mars.engine.step import BIASED, LOOKUP, PADDING_SLOT, StepInputs
from mars.errors import MarsError
from mars.method.acceptance import Decision, kept_tokens, written_tokens
from mars.method.lookup import look_up
from mars.method.sampling import bias_tensor
from mars.method.tensors import send
from mars.method.windows import NO_GROUP, Candidates, Window, WindowBatch, build_windows


class DeviceState:
    def __init__(
        self,
        slots: int,
        drafts: int,
        pages: int,
        vocabulary: int,
        device: torch.device,
        *,
        candidates: int = 0,
        text: int = 0,
        ragged: bool = False,
    ) -> None:
        """For ``slots`` sequences with at most ``drafts`` drafts, ``candidates`` and ``pages`` pages each.

        ``text``: most tokens of a sequence's text, if drafts are to be looked up in it here. ``ragged``: may sequences
        feed windows of different lengths?
        """
        self.slots = slots
        self.vocabulary = vocabulary
        self.cursor, self.last, self.draft_count = (
            torch.zeros(slots + 1, dtype=torch.long, device=device) for _ in range(3)
        )
        self.drafts_emitted = torch.ones(slots + 1, dtype=torch.bool, device=device)
        self.drafts = torch.zeros(slots + 1, drafts, dtype=torch.long, device=device)
        self.candidates = Candidates.of([[]] * (slots + 1), candidates, device)
        if ragged and text:
            raise MarsError("ragged and lookup exclude each other without the compiled step on a CPU: leave one out")
        self.values = DraftValues(slots, drafts, device) if ragged else None
        self.page_table = torch.zeros(slots + 1, pages, dtype=torch.long, device=device)
        self.text = torch.zeros(slots + 1 if text else 0, text, dtype=torch.int32, device=device)
        self._masked: set[int] = set()  # slots with a grammar mask
        words = -(-vocabulary // BITS)
        rows = slots + 1 if device.type == "cuda" else 0  # captured graphs read them: they cannot come later
        self.counts = torch.zeros(rows, vocabulary, device=device)  # generated tokens, for penalties
        self.seen = self.counts.bool()  # tokens of the prompt and generated ones
        self.bias = torch.zeros(rows, vocabulary, device=device)
        self.grammar = torch.full((rows, drafts + 1, words), -1, dtype=torch.int32, device=device)
        """Tokens that grammars allow in the next step, as bits"""

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
        if most := self.candidates.tokens.shape[1]:
            slots = send([each.slot or 0 for each in sequences], self.device)
            self._set_candidates(slots, Candidates.of([each.candidates for each in sequences], most, self.device))
        if self.values is not None:
            self.values.begin(send([each.slot or 0 for each in sequences], self.device))
        for each in sequences:
            slot, each.device_drafts = each.slot or 0, each.drafts
            if len(self.text):
                self.text[slot, : len(each.tokens)] = send(torch.tensor(each.tokens, dtype=torch.int32), self.device)
            if each.sampling.penalises:
                self.set_token_counts(slot, each.request.prompt, each.tokens[len(each.request.prompt) :])
            if each.sampling.logit_bias:
                self._reserve()
                self.bias[slot] = send(bias_tensor([each.sampling], self.vocabulary, None)[0], self.device)
            self.set_grammar_mask([slot], None)

    def _reserve(self) -> None:
        """Make room for options that few requests have; on a CPU, when the first of them comes."""
        missing = self.slots + 1 - len(self.counts)
        for name in ("counts", "seen", "bias", "grammar") if missing else ():
            tensor = getattr(self, name)
            more = torch.full((missing, *tensor.shape[1:]), -1 if name == "grammar" else 0, dtype=tensor.dtype)
            setattr(self, name, torch.cat([tensor, more]))

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

    def set_drafts(self, slots: SequenceOf[int], drafts: SequenceOf[SequenceOf[int]]) -> None:
        """On a CPU."""
        counts, rows = self.draft_count.numpy(), self.drafts.numpy()  # far quicker than by tensors
        for slot, each in zip(slots, drafts, strict=True):
            counts[slot], rows[slot, : len(each)] = len(each), each

    def set_pages(self, entries: SequenceOf[tuple[int, int, int]]) -> None:
        """Entries of the page table as (slot, index, page)."""
        slot, index, page = send(entries, self.device).unbind(1)
        self.page_table[slot, index] = page

    def set_token_counts(self, slot: int, prompt: SequenceOf[int], generated: SequenceOf[int]) -> None:
        """What a sequence has read and written, for its penalties."""
        self._reserve()
        counts = torch.bincount(torch.tensor(generated, dtype=torch.long), minlength=self.vocabulary)
        self.counts[slot] = send(counts.float(), self.device)
        seen = torch.bincount(torch.tensor(prompt, dtype=torch.long), minlength=self.vocabulary) + counts > 0
        self.seen[slot] = send(seen, self.device)

    def set_grammar_mask(self, slots: SequenceOf[int], allowed: Tensor | None) -> None:
        """Tokens that sequences may write in their next step (slots, positions, words), as bits; None: all."""
        if allowed is None and not self._masked.intersection(slots):
            return
        self._reserve()
        if allowed is None:
            self.grammar[slots] = -1
            self._masked.difference_update(slots)
        else:
            self.grammar[slots, : allowed.shape[1]] = send(allowed, self.device)
            self._masked.update(slots)

    def _set_candidates(self, slots: Tensor, candidates: Candidates) -> None:
        most, given = self.candidates.tokens.shape[1], candidates.tokens.shape[1]
        if not most:
            return
        self.candidates.tokens[slots, :given], self.candidates.points[slots, :given] = candidates
        if given < most:
            self.candidates.points[slots, given:] = NO_GROUP

    # --- for a step

    def windows(self, window: Window, inputs: StepInputs, mask_token: int) -> WindowBatch:
        slots = inputs.slots
        count, groups, masks = self.draft_count[slots], inputs.groups, inputs.masks
        if window.budget and self.values is not None:
            fed = self.values.allot(window.budget, slots, count, masks)
            count, groups, masks = fed.drafts, fed.groups, fed.masks
        return build_windows(
            window,
            mask_token,
            last=self.last[slots],
            drafts=self.drafts[slots],
            draft_count=count,
            emitted=self.drafts_emitted[slots],
            groups=groups,
            masks=masks,
            candidates=self._candidates(window, inputs),
        )

    def _candidates(self, window: Window, inputs: StepInputs) -> Candidates | None:
        if not window.candidates:
            return None
        tokens, points = (each[inputs.slots, : window.candidates] for each in self.candidates)
        number = torch.arange(window.candidates, device=self.device)
        return Candidates(tokens, torch.where(number < inputs.candidates[:, None], points, NO_GROUP))

    def options(self, inputs: StepInputs, width: int) -> dict[str, Tensor]:
        """For `decide`: tokens read and written, and those allowed at ``width`` positions, where that matters."""
        options, slots = dict[str, Tensor](), inputs.slots
        if inputs.features.penalises:
            options = {"seen": self.seen[slots], "counts": self.counts[slots]}
        if inputs.features.grammar:
            options["allowed"] = unpack(self.grammar[slots, :width], self.vocabulary)
        return options

    def logit_bias(self, inputs: StepInputs) -> Tensor:
        """(sequences, vocabulary): none for sequences whose slot had one before."""
        biased = (inputs.options & BIASED) != 0
        return torch.where(biased[:, None], self.bias[inputs.slots], 0.0)

    def look_up(self, inputs: StepInputs, drafts: Tensor, decision: Decision) -> Decision:
        """Let the new drafts go on as the text does elsewhere, where that is kept and a sequence wants it."""
        if not len(self.text):
            return decision
        slots, cursors = inputs.slots, self.cursor[inputs.slots]
        written, accepted = written_tokens(drafts, decision), decision.accepted
        steps = torch.arange(written.shape[1], device=self.device).minimum(accepted[:, None])
        self.text[slots[:, None], cursors[:, None] + 1 + steps] = written.int()
        length = torch.where((inputs.options & LOOKUP) != 0, cursors + accepted + 2, 0)
        most = self.drafts.shape[1]
        found, count = look_up(self.text[slots].long(), length, decision.drafts, decision.draft_count, most)
        return replace(decision, drafts=found, draft_count=count)

    def advance(self, inputs: StepInputs, drafts: Tensor, decision: Decision) -> None:
        """Move the cursors over what was accepted, and set up what is fed next."""
        slots, verifies = inputs.slots, inputs.verifies
        if len(self.counts):
            tokens, stays = kept_tokens(drafts, decision)
            where = (torch.where(stays, slots[:, None], PADDING_SLOT) * self.vocabulary + tokens).flatten()
            self.counts.view(-1).scatter_add_(0, where, torch.ones_like(where, dtype=self.counts.dtype))
            self.seen.view(-1).index_fill_(0, where, True)
        self.cursor[slots] += torch.where(slots == PADDING_SLOT, 0, 1 + decision.accepted)
        self.last[slots] = decision.token
        self.drafts_emitted[slots] = ~verifies
        self.draft_count[slots] = torch.where(verifies, decision.draft_count, decision.trusted)
        self.drafts[slots, : decision.drafts.shape[1]] = decision.drafts
        if self.values is not None:
            self.values.advance(slots, decision)
        self._set_candidates(slots, decision.candidates)
