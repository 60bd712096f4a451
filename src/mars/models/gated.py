"""Gated adapters: low-rank changes of linear layers that act at mask positions and nowhere else.

Text never sees masks, so with such an adapter every token of the text is computed exactly as the base model does it.
The adapter hooks into a model and changes none of its modules and weights. Which tokens are masks, it sees by their id,
which no token of the vocabulary has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from mars.method.markov import MarkovHead

SAMPLES = 16  # values of each adapted weight that tell whether an adapter belongs to a base model


class LowRank(nn.Module):
    """The change of one linear layer."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, inputs).uniform_(-1, 1) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return linear(linear(x, self.a), self.b)


class GatedAdapter(nn.Module):
    """The adapter of a model: an embedding of the mask token, a change of linear layers, and a Markov head.

    ``where`` says at which tokens it acts: False (none), True (all), or a mask (batch, tokens, 1). The embedding of a
    forward's tokens sets it, except within `everywhere` and `nowhere`.
    """

    def __init__(self, sizes: dict[str, tuple[int, int]], rank: int, hidden: int, vocabulary: int, markov: int) -> None:
        """``sizes``: inputs and outputs of the layers that are changed, by name."""
        super().__init__()
        self.mask_token = vocabulary
        self.mask_row = nn.Parameter(torch.zeros(hidden))
        self.changes = nn.ModuleDict({_key(name): LowRank(*size, rank) for name, size in sizes.items()})
        self.head = MarkovHead(vocabulary, markov) if markov else None
        self.scale = 1.0  # of all changes; a published adapter has it multiplied into ``b``
        self.where: Tensor | bool = False
        self._rows: Tensor | slice | None = None  # of masks among all tokens; None: not known, to spare a GPU the wait
        self._fixed = False
        self._handles: list[RemovableHandle] = []

    @property
    def names(self) -> list[str]:
        """The layers that are changed."""
        return [_name(key) for key in self.changes]

    def change(self, name: str) -> LowRank:
        found = self.changes[_key(name)]
        assert isinstance(found, LowRank)
        return found

    # --- in a model

    def attach(self, model: PreTrainedModel) -> None:
        """Hook into a model, whose layers must have the adapter's sizes."""
        embedding = model.get_input_embeddings()
        self._handles = [
            model.base_model.register_forward_pre_hook(self._begin),
            embedding.register_forward_pre_hook(self._look_at),
            embedding.register_forward_hook(self._insert),
            *(model.get_submodule(name).register_forward_hook(self._hook(self.change(name))) for name in self.names),
        ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """All tokens of forwards in this context are masks."""
        with self._fix(True):
            yield

    @contextmanager
    def nowhere(self) -> Iterator[None]:
        """No token of forwards in this context is a mask: this is the base model."""
        with self._fix(False):
            yield

    @contextmanager
    def _fix(self, where: bool) -> Iterator[None]:
        self.where, self._fixed = where, True
        try:
            yield
        finally:
            self._fixed = False  # ``where`` stays: gradient checkpointing computes layers again after the context

    def _begin(self, *_: Any) -> None:
        """Without token ids, as in a forward of embeddings, there are no masks."""
        if not self._fixed:
            self.where = False

    def _look_at(self, _module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        if self._fixed and self.where is False:
            return inputs
        is_mask = inputs[0] == self.mask_token
        if not self._fixed:
            self.where, self._rows = is_mask[..., None], None
            if not is_mask.is_cuda:
                self._rows = _rows(is_mask)
                self.where = False if self._rows is None else self.where
        return (inputs[0].masked_fill(is_mask, 0),)

    def _insert(self, _module: nn.Module, _inputs: Any, rows: Tensor) -> Tensor:
        """The mask row in the place of what the masks' ids gave."""
        return rows if self.where is False else self._gated(rows, self.mask_row.to(rows.dtype).expand_as(rows))

    def _gated(self, plain: Tensor, changed: Tensor) -> Tensor:
        if isinstance(self.where, bool):
            return changed if self.where else plain
        return torch.where(self.where.view(*plain.shape[:-1], 1), changed, plain)

    def _hook(self, change: LowRank) -> Callable[..., Tensor]:
        def add(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            if self.where is False:
                return output
            if isinstance(self.where, bool) or self._rows is None:
                return self._gated(output, output + self.scale * change(inputs[0]))
            flat, projected = output.flatten(0, -2), linear(inputs[0].flatten(0, -2)[self._rows], change.a)
            if isinstance(self._rows, slice):
                flat[self._rows].addmm_(projected, change.b.T, alpha=self.scale)
            else:
                flat.index_add_(0, self._rows, linear(projected, change.b), alpha=self.scale)
            return flat.view_as(output)

        return add


def _rows(is_mask: Tensor) -> Tensor | slice | None:
    """Which tokens are masks: a slice if they stand together, as those of one chain do; None if there are none."""
    rows = is_mask.flatten().nonzero()[:, 0]
    if not len(rows):
        return None
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def layer_sizes(model: PreTrainedModel, endings: list[str] | None = None) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the linear layers that an adapter changes: all but the output layer, or those named so.

    Experts are left out: they see some of the tokens only.
    """
    output = model.get_output_embeddings()
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output and "experts" not in name
        if endings is None or name.rpartition(".")[2] in endings
    }


def fingerprint(model: PreTrainedModel, names: list[str]) -> Tensor:
    """Some values of each of these layers' weights, in float32."""
    weights = (model.get_submodule(name).weight for name in names)
    return torch.cat([samples(each) for each in (*weights, model.get_input_embeddings().weight)]).float().cpu()


def samples(weight: Tensor) -> Tensor:
    """The values of a weight that are part of a fingerprint."""
    rows, columns = (spread(size).to(weight.device) for size in weight.shape)
    return weight.detach()[rows, columns]


def spread(size: int) -> Tensor:
    """`SAMPLES` indices from the first to the last, whatever PyTorch's defaults are: vLLM's are bfloat16 and a GPU."""
    return torch.linspace(0, size - 1, SAMPLES, dtype=torch.float32, device="cpu").long()


def _key(name: str) -> str:
    return name.replace(".", "/")


def _name(key: str) -> str:
    return key.replace("/", ".")
