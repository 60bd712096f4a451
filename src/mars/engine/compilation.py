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
from mars.models.gated import GatedAdapter, LowRank

TOGETHER: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers that are given the same input, by the names that transformers uses"""
MOST_VARIANTS = 256  # of a compiled function: one per window, kind of sampling and kind of layer


SECOND_SET_BYTES = 2**30
"""Most weights that get a second set, of all layers that an adapter changes. It takes no more kernels than the base
model has, and a small model's time is that of kernels; but steps read both sets, which is a large model's time."""


class Joint(nn.Module):
    """Linear layers with a common input as one. Their weights become views of its own, so nothing is stored twice."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        self.weight = _join([layer.weight for layer in layers])
        self.bias = _join([layer.bias for layer in layers]) if layers[0].bias is not None else None
        self.input: Tensor | None = None
        self.parts: Sequence[Tensor] = ()

    def product(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def part(self, index: int, x: Tensor) -> Tensor:
        """The output of the layer at ``index``. The first call computes all of them, the last one drops them."""
        if self.input is not x:
            self.input, self.parts = x, self.product(x).split(self.sizes, -1)
        mine = self.parts[index]
        if index == len(self.sizes) - 1:
            self.input, self.parts = None, ()
        return mine


class GatedJoint(Joint):
    """Layers, or one alone, that a gated adapter changes. In steps without masks it is what it would be without one."""

    acts = False  # has the step masks?

    def product(self, x: Tensor) -> Tensor:
        return self.gated(x) if self.acts else super().product(x)

    def gated(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class TwoSets(GatedJoint):
    """Masks have weights of their own, with the change added in."""

    def __init__(self, layers: Sequence[nn.Linear], changes: Sequence[LowRank | None], scale: float) -> None:
        super().__init__(layers)
        second = [_changed(layer.weight, each, scale) for layer, each in zip(layers, changes, strict=True)]
        self.weights = nn.Parameter(torch.stack([self.weight.data, torch.cat(second)]), requires_grad=False)
        self.weight.data = self.weights[0]
        _share(self.weight.data, [layer.weight for layer in layers])

    def gated(self, x: Tensor) -> Tensor:
        return torch.ops.mars.two_sets(x, self.weights, self.bias)


class LowRankJoint(GatedJoint):
    """Masks have the change added to their outputs. The rows of its first factors stand below the weights."""

    def __init__(self, layers: Sequence[nn.Linear], changes: Sequence[LowRank | None], scale: float) -> None:
        super().__init__(layers)
        rank = next(len(each.a) for each in changes if each is not None)
        weight, outputs = self.weight, len(self.weight)
        a = [weight.new_zeros(rank, weight.shape[1]) if each is None else each.a.to(weight) for each in changes]
        b = [
            weight.new_zeros(size, rank) if each is None else (scale * each.b).to(weight)
            for size, each in zip(self.sizes, changes, strict=True)
        ]
        self.whole = nn.Parameter(torch.cat([weight.data, *a]), requires_grad=False)
        self.whole_bias = None
        if self.bias is not None:
            whole_bias = torch.cat([self.bias.data, self.bias.new_zeros(len(self.whole) - outputs)])
            self.whole_bias = nn.Parameter(whole_bias, requires_grad=False)
        self.expansion = nn.Parameter(torch.cat(b), requires_grad=False)
        weight.data = self.whole[:outputs]
        _share(weight.data, [layer.weight for layer in layers])

    def gated(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mars.low_rank(x, self.whole, self.expansion, self.whole_bias, self.sizes)
        return y[..., : sum(self.sizes)]


class Part(nn.Module):
    """Stands in for one of the layers that were joined."""

    def __init__(self, joint: Joint, index: int) -> None:
        super().__init__()
        self.joint = joint
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return self.joint.part(self.index, x)


def _join(tensors: Sequence[Tensor]) -> nn.Parameter:
    """Tensors one after the other in memory, each of them now a view of that. One alone stays where it is."""
    if len(tensors) == 1:
        return nn.Parameter(tensors[0].data, requires_grad=False)
    whole = torch.cat([each.data for each in tensors])
    _share(whole, tensors)
    return nn.Parameter(whole, requires_grad=False)


def _share(whole: Tensor, tensors: Sequence[Tensor]) -> None:
    """Make tensors views of rows of ``whole``, one behind the other."""
    for each, view in zip(tensors, whole.split([len(each) for each in tensors]), strict=True):
        each.data = view


def _changed(weight: Tensor, change: LowRank | None, scale: float) -> Tensor:
    """A weight with a change added, computed in float32."""
    if change is None:
        return weight.data
    return torch.addmm(weight.float(), change.b.float(), change.a.float(), alpha=scale).to(weight.dtype)


class Joiner:
    """Makes one of layers that share an input, with what a gated adapter changes of them."""

    def __init__(self, model: nn.Module, adapter: GatedAdapter | None) -> None:
        named = {} if adapter is None else {name: adapter.change(name) for name in adapter.names}
        self.changes: dict[nn.Module, LowRank] = {model.get_submodule(name): each for name, each in named.items()}
        self._scale = adapter.scale if adapter else 1.0
        size = sum(layer.weight.nbytes for layer in self.changes)  # type: ignore[misc]
        self._gated: type[TwoSets] | type[LowRankJoint] = TwoSets if size <= SECOND_SET_BYTES else LowRankJoint

    def __call__(self, *layers: nn.Linear) -> Joint:
        found = [self.changes.get(each) for each in layers]
        is_gated = any(each is not None for each in found)
        return self._gated(layers, found, self._scale) if is_gated else Joint(layers)


Joints = Iterator[tuple[nn.Module, tuple[str, ...], Joint]]
"""Modules, names of layers in them, and what these are replaced by"""


def _joints(model: nn.Module, adapter: GatedAdapter | None) -> Joints:
    """Layers that share an input, and those that a gated adapter changes."""
    join = Joiner(model, adapter)
    for module in list(model.modules()):
        groups = [names for names in TOGETHER if _can_join([getattr(module, name, None) for name in names])]
        joined = {name for names in groups for name in names}
        alone = [name for name, each in module.named_children() if each in join.changes and type(each) is nn.Linear]
        groups += [(name,) for name in alone if name not in joined]
        for names in groups:
            yield module, names, join(*(getattr(module, name) for name in names))


def _can_join(layers: Sequence[Any]) -> bool:
    alike = {(type(each), getattr(each, "in_features", 0), getattr(each, "bias", 0) is None) for each in layers}
    return len(alike) == 1 and type(layers[0]) is nn.Linear


class Compiled:
    def __init__(self, model: PreTrainedModel, adapter: GatedAdapter | None = None) -> None:
        """Takes the memory of a second set of weights, where a gated adapter gets one."""
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_home() / "compiled"))  # kept for the next start
        children = (each if isinstance(each, nn.ModuleList) else [each] for each in model.get_decoder().children())
        blocks = [each for child in children for each in child if not isinstance(each, nn.Embedding)]
        self._parts: list[tuple[nn.Module, str, Part, nn.Module]] = []
        self._gated: list[GatedJoint] = []
        with torch.no_grad():
            for module, names, joint in _joints(model, adapter):
                self._parts += [(module, name, Part(joint, at), getattr(module, name)) for at, name in enumerate(names)]
                self._gated += [joint] if isinstance(joint, GatedJoint) else []
        self._blocks = [(block, compiled(block.forward)) for block in blocks]
        torch.cuda.empty_cache()  # of what weights were copied from

    @contextmanager
    def applied(self, *, has_masks: bool) -> Iterator[None]:
        """``has_masks``: do the steps in this context feed masks? Layers are compiled once for all that do."""
        for joint in self._gated:
            joint.acts = has_masks
        for module, name, part, _ in self._parts:
            setattr(module, name, part)
        for block, forward in self._blocks:
            block.forward = forward
        try:
            yield
        finally:
            for module, name, _, layer in self._parts:
                setattr(module, name, layer)
            for block, _ in self._blocks:
                del block.forward  # the class's own shows again


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once for all numbers of sequences."""
    return torch.compile(function, dynamic=True)
