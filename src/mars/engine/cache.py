"""Keys and values in pages: one store per layer, and a table per row that says where its tokens are."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mars.decoding.attention import use_windows
from mars.decoding.forward import check_layers
from mars.models.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores for a token."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.heads * (self.key_size + self.value_size) * self.dtype.itemsize


class _Probe:
    """Attends to nothing and notes what the layers would store."""

    def __init__(self) -> None:
        self.calls = 0
        self.slides = False
        self.layers: dict[int, LayerShape] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        self.layers[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype)
        rows, heads, width, _size = query.shape
        return query.new_zeros(rows, width, heads, value.shape[3])


@torch.inference_mode()
def layer_shapes(checkpoint: Checkpoint) -> list[LayerShape]:
    """What each layer stores, found out by running a token through the model."""
    use_windows(checkpoint.module)
    probe, token = _Probe(), torch.zeros(1, 1, dtype=torch.long, device=checkpoint.device)
    checkpoint.module(input_ids=token, position_ids=token, use_cache=False, windows=probe)
    check_layers(checkpoint, probe)
    return [probe.layers[layer] for layer in sorted(probe.layers)]


class PagedCache:
    """Stores (pages, heads, page size, head size) per layer. Who owns which page is decided elsewhere."""

    def __init__(self, shapes: list[LayerShape], pages: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.is_even = all(shape.key_size == shape.value_size for shape in shapes)
        """Are keys as long as values? The kernel wants them to be."""
        self.layers = [
            (
                _zeros((pages, shape.heads, page_size, shape.key_size), shape.dtype, device),
                _zeros((pages, shape.heads, page_size, shape.value_size), shape.dtype, device),
            )
            for shape in shapes
        ]

    def write(self, layer: int, keys: Tensor, values: Tensor, pages: Tensor, slots: Tensor) -> None:
        """Store (rows, heads, width, size) keys and values at ``pages`` and ``slots`` (rows, width)."""
        for store, new in zip(self.layers[layer], (keys, values), strict=True):
            store[pages, :, slots] = new.transpose(1, 2)

    def read(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (rows, heads, tokens, size) of the pages in a table (rows, pages)."""
        keys, values = (store[table].transpose(1, 2).flatten(2, 3) for store in self.layers[layer])
        return keys, values


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, since an infinity in an invisible slot would poison sums; on a CPU, memory is used once it is written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
