"""Keys and values of a batch of rows. Every row has a cursor; what lies past it is garbage that gets overwritten."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class Cache:
    """Preallocated storage (rows, heads, slots, head size) per layer. It moves no cursor: its owner does."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows = rows
        self.capacity = capacity
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def trash(self) -> int:
        """The slot for padding, behind all real ones."""
        return self.capacity

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Store a window's keys and values at ``slots`` (rows, width) and return the first ``length`` slots."""
        if layer not in self._layers:
            self._layers[layer] = self._allocate(keys), self._allocate(values)
        stored = self._layers[layer]
        for store, new in zip(stored, (keys, values), strict=True):
            store[: self.rows].scatter_(2, slots[:, None, :, None].expand_as(new), new)
        return stored[0][: self.rows, :, :length], stored[1][: self.rows, :, :length]

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Keep these rows and say in which order: rows from the end are copied into the places left free."""
        places, kept = range(len(rows)), set(rows)
        movers = iter(row for row in rows if row not in places)
        order = [place if place in kept else next(movers) for place in places]
        for store in (tensor for pair in self._layers.values() for tensor in pair):
            for place, row in enumerate(order):
                if place != row:
                    store[place].copy_(store[row])
        self.rows = len(order)
        return order

    def _allocate(self, like: Tensor) -> Tensor:
        """Zeros, not garbage: an infinity in an invisible slot would still poison the sum over values."""
        rows, heads, _, size = like.shape
        return like.new_zeros(rows, heads, self.capacity + 1, size)
