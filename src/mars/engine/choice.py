"""Which window to use for how many rows: the one with the most tokens per second, by cost and acceptance.

What a forward costs is measured once. What it brings is worked out from how often drafts passed lately, offset by
offset: a wide window pays for few rows, a narrow one for many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mars.engine.layout import Layout

Cost = Callable[[int, Layout], float]
"""Seconds of a forward of so many rows with this layout"""

FIRST_GUESS = 0.7
"""How often a draft passes if those before it did, before anything was seen"""
WEIGHT = 20.0
"""How many drafts the first guess counts for"""
MEMORY = 0.999
"""What is left of an observation after another one; also after a step that observes nothing"""


class Acceptance:
    """How often the draft at each offset passes, given that the ones before it passed."""

    def __init__(self, offsets: int) -> None:
        self._passed = [0.0] * offsets
        self._seen = [0.0] * offsets

    def observe(self, drafts: int, accepted: int) -> None:
        for offset in range(min(drafts, accepted + 1)):
            self._seen[offset] = self._seen[offset] * MEMORY + 1
            self._passed[offset] = self._passed[offset] * MEMORY + (offset < accepted)

    def fade(self) -> None:
        """A step without drafts: what is known gets older, so that drafts are tried again some day."""
        self._seen = [each * MEMORY for each in self._seen]
        self._passed = [each * MEMORY for each in self._passed]

    def rates(self) -> list[float]:
        """For each offset, the chance that it and all before it pass."""
        rates, so_far = [], 1.0
        for passed, seen in zip(self._passed, self._seen, strict=True):
            so_far *= (passed + WEIGHT * FIRST_GUESS) / (seen + WEIGHT)
            rates.append(so_far)
        return rates


def tokens_per_forward(layout: Layout, rates: Sequence[float]) -> float:
    """What a row emits per forward in the long run.

    A forward with drafts emits one token and what passes; whether the next one has drafts depends on whether there
    was a group of masks behind what passed. A forward without drafts emits one token, and the next one has drafts.
    """
    if not layout.groups:
        return 1.0
    rates = rates[: layout.masks]
    ends = [before - after for before, after in zip([1.0, *rates], [*rates, 0.0], strict=True)]
    drafted_again = ends[-1] + sum(ends[: min(layout.groups - 1, len(rates))])
    with_drafts = 1 / (2 - drafted_again)
    return 1 + with_drafts * sum(rates)


def best_layout(candidates: Sequence[Layout], rates: Sequence[float], rows: int, cost: Cost) -> Layout:
    """The layout with the most tokens per second; the first of equals."""
    return max(candidates, key=lambda layout: tokens_per_forward(layout, rates) / cost(rows, layout))
