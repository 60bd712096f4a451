"""Documents packed into rows of one length, and the order in which a run meets them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Dataset

from mars.method.streams import PADDING, Pack
from mars.training.chats import Document


def pack(documents: Sequence[Document], length: int, pad_token: int, *, together: bool = True) -> Pack:
    """Fill rows with documents, longest first, each into the fullest row that has room; or one document a row."""
    bins = (
        _best_fit([len(each.tokens) for each in documents], length)
        if together
        else [[i] for i in range(len(documents))]
    )
    tokens = torch.full((len(bins), length), pad_token, dtype=torch.int32)
    numbers = torch.full((len(bins), length), PADDING, dtype=torch.int16)
    assistant = torch.zeros(len(bins), length, dtype=torch.bool)
    for row, members in enumerate(bins):
        start = 0
        for number, member in enumerate(members):
            document = documents[member]
            span = slice(start, start := start + len(document.tokens))
            tokens[row, span] = torch.tensor(document.tokens, dtype=torch.int32)
            numbers[row, span] = number
            assistant[row, span] = torch.tensor(document.assistant, dtype=torch.bool)
    return Pack(tokens, numbers, assistant)


def _best_fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Bins of document numbers, none longer than ``length``."""
    by_room: list[list[list[int]]] = [[] for _ in range(length)]
    """Bins by the room they have left"""
    open_rooms = 0
    """Bit ``r`` is set where there is a bin with room ``r``: the fullest one that fits is the lowest bit that fits"""
    for number in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        fitting = open_rooms >> sizes[number]
        room = sizes[number] + (fitting & -fitting).bit_length() - 1 if fitting else length
        members = by_room[room].pop() if fitting else []
        if fitting and not by_room[room]:
            open_rooms ^= 1 << room
        room -= sizes[number]
        by_room[room].append([*members, number])
        open_rooms |= 1 << room
    return sorted(members for bins in by_room for members in bins)


def save_pack(pack: Pack, path: Path) -> None:
    """Store a pack; the file appears once it is complete."""
    unfinished = path.with_suffix(".tmp")
    save_file(pack._asdict(), unfinished)
    unfinished.rename(path)


def load_pack(path: Path) -> Pack:
    return Pack(**load_file(path))


class Schedule(Dataset[tuple[int, int]]):
    """The rows of a whole run in order: item ``i`` is ``(row, i)``, a function of the seed and ``i`` alone.

    So a run that was cut off goes on where it stopped, and any number of processes sees the same steps. Every epoch
    has its own order.
    """

    def __init__(self, rows: int, items: int, seed: int) -> None:
        self._rows = rows
        self._items = items
        self._seed = seed
        self._epoch: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return self._items

    def __getitem__(self, item: int) -> tuple[int, int]:
        epoch, place = divmod(item, self._rows)
        if self._epoch is None or self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._epoch = epoch, torch.randperm(self._rows, generator=generator)
        return int(self._epoch[1][place]), item
