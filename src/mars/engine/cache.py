"""Keys and values in pages: one store per layer."""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mars.models.attention import forward
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
    """Stands in for attention and notes what the layers would store."""

    def __init__(self) -> None:
        self.calls = 0
        self.slides = False
        self.layers: dict[int, LayerShape] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        self.layers[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype)
        batch, heads, width, _size = query.shape
        return query.new_zeros(batch, width, heads, value.shape[3])


@torch.inference_mode()
def layer_shapes(checkpoint: Checkpoint) -> list[LayerShape]:
    """What each layer stores, found out by running a token through the model."""
    probe, token = _Probe(), torch.zeros(1, 1, dtype=torch.long, device=checkpoint.device)
    forward(checkpoint, token, token, probe)
    return [probe.layers[layer] for layer in sorted(probe.layers)]


class PagedCache:
    """Stores (pages, heads, page size, head size) per layer. `mars.engine.pages` says who uses which page."""

    def __init__(self, shapes: list[LayerShape], pages: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.is_even = all(shape.key_size == shape.value_size for shape in shapes)
        """Are keys as long as values? The kernel needs that."""
        self.layers = [
            (
                zeros((pages, shape.heads, page_size, shape.key_size), shape.dtype, device),
                zeros((pages, shape.heads, page_size, shape.value_size), shape.dtype, device),
            )
            for shape in shapes
        ]

    def write(self, layer: int, keys: Tensor, values: Tensor, pages: Tensor, offsets: Tensor) -> None:
        """Store (sequences, heads, width, size) keys and values at offsets in pages, (sequences, width) both."""
        for store, new in zip(self.layers[layer], (keys, values), strict=True):
            store[pages, :, offsets] = new.transpose(1, 2)

    def read(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (sequences, heads, tokens, size) of the pages in a table (sequences, pages)."""
        keys, values = (store[table].transpose(1, 2).flatten(2, 3) for store in self.layers[layer])
        return keys, values


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros: an infinity that is masked out would still poison sums. On a CPU, memory is taken once it is written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
