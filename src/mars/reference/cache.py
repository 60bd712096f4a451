"""Keys and values of a few sequences, a contiguous stretch for each, and the attention of windows over them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mars.method.tensors import send
from mars.method.windows import Candidates, Window, WindowBatch, build_windows, visible_in_cache
from mars.models.attention import dense_attention, fold_mask, forward
from mars.models.checkpoint import Checkpoint

PREFILL_CHUNK = 512  # tokens of a text per forward, so that a long one does not need a huge table of who sees whom


class Cache:
    """Storage (sequences, heads, capacity, head size) per layer. What lies past a sequence's cursor is garbage."""

    def __init__(self, sequences: int, capacity: int) -> None:
        self.sequences = sequences
        self.capacity = capacity
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, keys: Tensor, values: Tensor, rows: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of some ``rows`` at the indices ``at`` (rows, width); returns all of these rows."""
        if layer not in self._layers:
            self._layers[layer] = self._allocate(keys), self._allocate(values)
        stored = self._layers[layer]
        for store, new in zip(stored, (keys, values), strict=True):
            store[rows[:, None], :, at] = new.transpose(1, 2)
        return stored[0][rows, :, : self.capacity], stored[1][rows, :, : self.capacity]

    def _allocate(self, like: Tensor) -> Tensor:
        """Zeros, since an infinity in an invisible position would still poison the sum over values.

        What the padding of a batch writes beyond the capacity goes into one more position.
        """
        _, heads, _, size = like.shape
        return like.new_zeros(self.sequences, heads, self.capacity + 1, size)


@dataclass(slots=True)
class CachedWindows:
    """The windows of one forward, each behind the cursor of its sequence."""

    cache: Cache
    windows: WindowBatch
    rows: Tensor  # (sequences,): whose windows these are
    cursors: Tensor  # (sequences,): how much of each sequence's cache is valid
    calls: int = 0
    slides: bool = False
    _masks: dict[int | None, Tensor] = field(init=False, default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        sliding = options.pop("sliding")
        columns = torch.arange(query.shape[2], device=query.device)
        at = (self.cursors[:, None] + columns).clamp(max=self.cache.capacity)
        keys, values = self.cache.write(layer, key, value, self.rows, at)
        if sliding not in self._masks:
            visible = visible_in_cache(self.windows.visibility, self.cursors, self.cache.capacity, sliding)
            self._masks[sliding] = fold_mask(visible, query, key)
        return dense_attention(query, keys, values, self._masks[sliding], **options)


def forward_windows(
    checkpoint: Checkpoint, cache: Cache, rows: Tensor, cursors: Tensor, windows: WindowBatch, logits_to_keep: int = 0
) -> Tensor:
    """Logits (tokens, vocabulary) of these sequences' windows; their keys and values are cached behind the cursors."""
    attention = CachedWindows(cache, windows, rows, cursors)
    positions = cursors[:, None] + windows.visibility.position
    return forward(checkpoint, windows.tokens, positions, attention, logits_to_keep).flatten(0, 1)


def prefill(checkpoint: Checkpoint, cache: Cache, texts: Mapping[int, list[int]], cursors: Mapping[int, int]) -> None:
    """Cache texts from their cursors to their ends, by the row of each, a chunk of every text at a time."""
    left = {row: text[cursors[row] :] for row, text in texts.items() if cursors[row] < len(text)}
    at = dict(cursors)
    while left:
        chunks = {row: text[:PREFILL_CHUNK] for row, text in left.items()}
        window = Window(drafts=max(map(len, chunks.values())) - 1)
        windows = windows_of(checkpoint, window, [(chunk[0], chunk[1:]) for chunk in chunks.values()])
        rows, starts = (send(each, checkpoint.device) for each in (list(left), [at[row] for row in left]))
        forward_windows(checkpoint, cache, rows, starts, windows, logits_to_keep=1)
        at = {row: at[row] + len(chunk) for row, chunk in chunks.items()}
        left = {row: text[PREFILL_CHUNK:] for row, text in left.items() if len(text) > PREFILL_CHUNK}


def windows_of(
    checkpoint: Checkpoint,
    window: Window,
    texts: Sequence[tuple[int, list[int]]],
    *,
    emitted: list[bool] | None = None,
    groups: list[int] | None = None,
    masks: list[int] | None = None,
    candidates: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> WindowBatch:
    """Windows of last tokens and the drafts behind each; by default with all of the window's masks, as in a chain."""
    count, device = len(texts), checkpoint.device
    drafts = [[*drafts, *[0] * (window.drafts - len(drafts))] for _, drafts in texts]
    return build_windows(
        window,
        checkpoint.mask_token_id or 0,
        last=send([last for last, _ in texts], device),
        drafts=send(torch.tensor(drafts, dtype=torch.long), device),
        draft_count=send([len(drafts) for _, drafts in texts], device),
        emitted=send(emitted or [True] * count, device),
        groups=send(groups or [1] * count, device),
        masks=send(masks or [window.masks] * count, device),
        candidates=Candidates.of(candidates or [[]] * count, window.candidates, device),
    )
