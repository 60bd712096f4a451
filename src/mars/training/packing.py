"""Documents packed into rows of one length, the order of the rows in a run, and the batches made of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Dataset

from mars.method.streams import Pack, fixed_anchors, lay_out, random_anchors
from mars.method.visibility import PADDING
from mars.training import recipe
from mars.training.chats import Document
from mars.training.objective import Batch, batch_tensors

FIXED_STEP = 32  # the number of groups in a fixed layout is rounded up to a multiple of this, so that few shapes occur


def pack(documents: Sequence[Document], length: int, pad_token: int, *, together: bool = True) -> Pack:
    """Fill rows with documents, longest first, each into the fullest row with room for it; or one document per row."""
    bins = [[number] for number in range(len(documents))]
    if together:
        bins = _best_fit([len(each.tokens) for each in documents], length)
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
    by_room: list[list[list[int]]] = [[] for _ in range(length)]  # bins by the room they have left
    open_rooms = 0
    """Bit ``r`` is set if a bin has room ``r``: the lowest set bit from a size on is the fullest bin for it"""
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
    """The rows of a whole run in order: item ``i`` is ``(row, i)`` and depends on the seed and ``i`` alone.

    So a resumed run continues in the same order, and any number of processes has the same steps. Every epoch has an
    order of its own.
    """

    def __init__(self, rows: int, items: int, seed: int) -> None:
        self._rows = rows
        self._items = items
        self._seed = seed
        self._epoch: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return self._items

    def __getitem__(self, item: int) -> tuple[int, int]:
        epoch, index = divmod(item, self._rows)
        if self._epoch is None or self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._epoch = epoch, torch.randperm(self._rows, generator=generator)
        return int(self._epoch[1][index]), item


@dataclass(frozen=True)
class Collator:
    """Lays out both streams of a step. Random choices depend on the item's number alone, not on the process."""

    pack: Pack
    streams: recipe.Streams | None  # None: the clean stream alone
    mask_token: int
    decay: float
    seed: int
    rows_per_step: int  # over all devices and accumulation steps, which share a block size

    def __call__(self, items: Sequence[tuple[int, int]]) -> Batch:
        pack = take(self.pack, [row for row, _ in items])
        length = pack.tokens.shape[1]
        if self.streams is None:
            empty = torch.empty(len(items), 0, dtype=torch.long)
            return batch_tensors(lay_out(pack, empty, 1, self.mask_token), length)
        sizes, step = self.streams.block_sizes, items[0][1] // self.rows_per_step
        block_size = sizes[int(torch.randint(len(sizes), (), generator=self._generator(-1 - step)))]
        if self.streams.anchors == "fixed":
            anchors = fixed_anchors(pack, block_size)
            anchors = torch.nn.functional.pad(anchors, (0, -anchors.shape[1] % FIXED_STEP), value=PADDING)
            laid_out = lay_out(pack, anchors, block_size, self.mask_token)
        else:
            width = round(length * self.streams.masked)
            groups = max(1, width // (block_size - 1))
            generators = [self._generator(item) for _, item in items]
            drawn = [random_anchors(take(pack, [row]), groups, each) for row, each in enumerate(generators)]
            anchors = torch.cat(drawn)
            laid_out = lay_out(pack, anchors, block_size - 1, self.mask_token, max(width, block_size - 1))
        return batch_tensors(laid_out, length, self.decay)

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + number)


def take(pack: Pack, rows: Sequence[int]) -> Pack:
    tokens, documents, assistant = (each[list(rows)] for each in pack)
    return Pack(tokens.long(), documents.long(), assistant)
