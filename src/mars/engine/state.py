"""What the device knows of the running rows: where they are in their text, and what they feed next.

Each row has a *slot*, its place in these tensors, for as long as it runs. A step gathers the slots of its rows and
writes back what it decided, so the next step can begin before the host has looked at this one. Slot 0 is nobody's:
the padding of a batch uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mars.decoding.grammar import BITS, unpack
from mars.engine.layout import Pending
from mars.method.acceptance import Decision, tally
from mars.method.tensors import send

NOBODY = 0


@dataclass(frozen=True, slots=True)
class Place:
    """What a slot is to hold: a row's cursor, the token behind it, and the claims behind that."""

    slot: int
    cursor: int
    token: int
    claims: Sequence[int] = ()
    settled: bool = True


class State:
    def __init__(self, slots: int, claims: int, pages: int, vocabulary: int, device: torch.device) -> None:
        """For ``slots`` rows with at most ``claims`` claims and ``pages`` pages each."""
        self.slots = slots
        self.vocabulary = vocabulary
        self.cursor, self.token, self.count = (
            torch.zeros(slots + 1, dtype=torch.long, device=device) for _ in range(3)
        )
        self.settled = torch.ones(slots + 1, dtype=torch.bool, device=device)
        self.claims = torch.zeros(slots + 1, claims, dtype=torch.long, device=device)
        self.table = torch.zeros(slots + 1, pages, dtype=torch.long, device=device)
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None
        self._bias: Tensor | None = None
        self._favoured: set[int] = set()
        """Slots whose bias is not 0"""
        self._allowed: Tensor | None = None
        self._restricted: set[int] = set()
        """Slots that may not write everything"""

    @property
    def device(self) -> torch.device:
        return self.cursor.device

    def put(self, places: Sequence[Place]) -> None:
        """Set what slots hold, in one transfer for all of them."""
        most = self.claims.shape[1]
        numbers = [
            [each.slot, each.cursor, each.token, len(each.claims), each.settled, *each.claims, *[0] * most][: 5 + most]
            for each in places
        ]
        slot, cursor, token, count, settled, *claims = send(numbers, self.device).unbind(1)
        self.cursor[slot], self.token[slot], self.count[slot] = cursor, token, count
        self.settled[slot] = settled.bool()
        if claims:
            self.claims[slot] = torch.stack(claims, 1)

    def set_pages(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Entries of the tables as (slot, index, page)."""
        slot, index, page = send(entries, self.device).unbind(1)
        self.table[slot, index] = page

    def remember(self, slot: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Note what a row has read and written, for its penalties."""
        if self._seen is None or self._counts is None:
            self._counts = torch.zeros(self.slots + 1, self.vocabulary, device=self.device)
            self._seen = self._counts.bool()
        counts = torch.bincount(torch.tensor(answer, dtype=torch.long), minlength=self.vocabulary)
        self._counts[slot] = send(counts.float(), self.device)
        seen = torch.bincount(torch.tensor(prompt, dtype=torch.long), minlength=self.vocabulary) + counts > 0
        self._seen[slot] = send(seen, self.device)

    def favour(self, slot: int, bias: Tensor | None) -> None:
        """Note what is added to a row's logits; None: nothing, whatever the slot's last row had."""
        if bias is None and slot not in self._favoured:
            return
        if self._bias is None:
            self._bias = torch.zeros(self.slots + 1, self.vocabulary, device=self.device)
        self._bias[slot] = 0.0 if bias is None else send(bias, self.device)
        (self._favoured.discard if bias is None else self._favoured.add)(slot)

    def bias(self, slots: Tensor) -> Tensor:
        if self._bias is None:
            raise RuntimeError("no row with a bias was announced")
        return self._bias[slots]

    def restrict(self, slots: Sequence[int], allowed: Tensor | None) -> None:
        """Note what rows may write in their next step (slots, positions, words), as bits; None: everything."""
        if allowed is None and not self._restricted.intersection(slots):
            return
        if self._allowed is None:
            words = -(-self.vocabulary // BITS)
            shape = (self.slots + 1, self.claims.shape[1] + 1, words)
            self._allowed = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        if allowed is None:
            self._allowed[slots] = -1
            self._restricted.difference_update(slots)
        else:
            self._allowed[slots, : allowed.shape[1]] = send(allowed, self.device)
            self._restricted.update(slots)

    def allowed(self, slots: Tensor, width: int) -> Tensor:
        """(slots, width, vocabulary): may it be written there?"""
        if self._allowed is None:
            raise RuntimeError("no row with a grammar was announced")
        return unpack(self._allowed[slots, :width], self.vocabulary)

    def pending(self, slots: Tensor, groups: Tensor, masks: Tensor) -> Pending:
        return Pending(
            self.token[slots], self.claims[slots], self.count[slots], self.settled[slots], groups=groups, masks=masks
        )

    def history(self, slots: Tensor) -> dict[str, Tensor]:
        """Tokens read and written, for `decide`."""
        if self._seen is None or self._counts is None:
            raise RuntimeError("no row with penalties was announced")
        return {"seen": self._seen[slots], "counts": self._counts[slots]}

    def commit(self, slots: Tensor, claims: Tensor, decision: Decision, checks: Tensor, *, penalises: bool) -> None:
        """Move the cursors past what stays and set up what is fed next."""
        if penalises and self._seen is not None and self._counts is not None:
            counts = tally(self._counts[slots], claims, decision)
            self._counts[slots] = counts
            self._seen[slots] |= counts > 0
        self.cursor[slots] += torch.where(slots == NOBODY, 0, 1 + decision.accepted)
        self.token[slots] = decision.token
        self.settled[slots] = ~checks
        self.count[slots] = torch.where(checks, decision.draft_count, decision.trusted)
        self.claims[slots, : decision.drafts.shape[1]] = decision.drafts
