"""A transformers model prepared for a GPU: compiled layers, and one product where several share an input.

The model is changed for as long as `Compiled.applied` lasts. Steps are captured inside of it and replayed outside, so
nothing here needs to be fast.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from mars.models.builtin import cache_home

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers that are given the same input, by the names that transformers uses"""
MOST_VARIANTS = 256  # of a compiled function: one per window, kind of sampling and kind of layer


class Joint(nn.Module):
    """Linear layers with a common input as one. Their weights become views of its own, so nothing is stored twice."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        self.weight = _join([layer.weight for layer in layers])
        self.bias = _join([layer.bias for layer in layers]) if layers[0].bias is not None else None
        self.input: Tensor | None = None
        self.parts: Sequence[Tensor] = ()

    def part(self, index: int, x: Tensor) -> Tensor:
        """The output of the layer at ``index``. The first call computes all of them, the last one drops them."""
        if self.input is not x:
            self.input, self.parts = x, linear(x, self.weight, self.bias).split(self.sizes, -1)
        mine = self.parts[index]
        if index == len(self.sizes) - 1:
            self.input, self.parts = None, ()
        return mine


class Part(nn.Module):
    """Stands in for one of the layers that were joined."""

    def __init__(self, joint: Joint, index: int) -> None:
        super().__init__()
        self.joint = joint
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return self.joint.part(self.index, x)


def _join(tensors: Sequence[Tensor]) -> nn.Parameter:
    """Tensors one after the other in memory, each of them now a view of that."""
    whole = torch.cat([each.data for each in tensors])
    for each, view in zip(tensors, whole.split([len(each) for each in tensors]), strict=True):
        each.data = view
    return nn.Parameter(whole, requires_grad=False)


def _parts(model: nn.Module) -> Iterator[tuple[nn.Module, str, Part]]:
    """Where layers can be joined: the module, a layer's name in it, and its replacement."""
    for module in list(model.modules()):
        for names in TOGETHER:
            layers = [getattr(module, name, None) for name in names]
            alike = {(type(each), getattr(each, "in_features", 0), getattr(each, "bias", 0) is None) for each in layers}
            if len(alike) == 1 and type(layers[0]) is nn.Linear:
                joint = Joint(layers)  # type: ignore[arg-type]
                yield from ((module, name, Part(joint, index)) for index, name in enumerate(names))


class Compiled:
    def __init__(self, model: PreTrainedModel) -> None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_home() / "compiled"))  # kept for the next start
        children = (each if isinstance(each, nn.ModuleList) else [each] for each in model.get_decoder().children())
        blocks = [each for child in children for each in child if not isinstance(each, nn.Embedding)]
        self._parts = [(module, name, part, getattr(module, name)) for module, name, part in _parts(model)]
        self._blocks = [(block, compiled(block.forward)) for block in blocks]

    @contextmanager
    def applied(self) -> Iterator[None]:
        for module, name, part, _ in self._parts:
            setattr(module, name, part)
        for block, forward in self._blocks:
            block.forward = forward
        try:
            with torch._dynamo.config.patch(recompile_limit=MOST_VARIANTS):
                yield
        finally:
            for module, name, _, layer in self._parts:
                setattr(module, name, layer)
            for block, _ in self._blocks:
                del block.forward  # the class's own shows again


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once for all numbers of sequences."""
    return torch.compile(function, dynamic=True)
