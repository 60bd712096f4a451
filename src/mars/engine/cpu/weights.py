"""Matrices in the forms that step.c multiplies: floats, or codes in groups with a scale and a minimum."""

from ctypes import Structure, c_int32, c_void_p
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE, GROUP = 16, 32  # outputs that are computed together; inputs that share a scale
Form = Literal["float32", "bfloat16", "int8"]
FORMS: tuple[Form, ...] = ("float32", "bfloat16", "int8")
FLOAT32, BFLOAT16, INT8, INT4 = range(4)


class Matrix(Structure):
    """The structure of the same name in step.c. ``data`` keeps the memory that it points to."""

    _fields_ = (("kind", c_int32), ("inputs", c_int32), ("outputs", c_int32), ("tiles", c_void_p))
    data: Tensor

    @classmethod
    def of(cls, weight: Tensor, form: Form, *, drafts: bool = False) -> "Matrix":
        """A weight (outputs, inputs), both padded with zeros to multiples of 32.

        ``int8`` takes 4 bits instead of 8 for a matrix that loses nothing by it, as one from a GGUF file of 4 bits, and
        for one that acts on ``drafts`` alone: these are checked anyway.
        """
        outputs, inputs = weight.shape
        whole = pad(weight.detach().float(), (0, -inputs % GROUP, 0, -outputs % GROUP))
        if form == "int8":
            kind, data = _quantised(whole, drafts)
        else:
            kind = FORMS.index(form)
            data = _tiles(whole) if form == "float32" else _tiles(whole.bfloat16(), 2)
        matrix = cls(kind, whole.shape[1], whole.shape[0], data.data_ptr())
        matrix.data = data
        return matrix


def _tiles(weight: Tensor, together: int = 1) -> Tensor:
    """(tiles, inputs / together, 16 outputs, together)"""
    outputs, inputs = weight.shape
    return weight.view(outputs // TILE, TILE, inputs // together, together).transpose(1, 2).contiguous()


def _quantised(weight: Tensor, always_4_bits: bool) -> tuple[int, Tensor]:
    groups = weight.unflatten(1, (-1, GROUP))
    kind = INT4 if always_4_bits or (_has_16_levels(groups[:GROUP]) and _has_16_levels(groups)) else INT8
    codes, scale, minimum = quantise(groups, 15 if kind == INT4 else 255)
    numbers = torch.stack([_tiles(each[:, :, 0].contiguous().view(torch.uint8), 2) for each in (scale, minimum)], 2)
    packed = _tiles(codes.to(torch.uint8).flatten(1), 4).unflatten(1, (-1, 8))  # (tiles, groups, 8, 16, 4)
    if kind == INT4:
        packed = packed[:, :, :4] | packed[:, :, 4:] << 4
    return kind, torch.cat([numbers.flatten(2), packed.flatten(2)], 2)


def _has_16_levels(groups: Tensor) -> bool:
    """Do 4 bits hold these groups without loss?"""
    codes, scale, minimum = quantise(groups, 15)
    return torch.equal(scale.float() * codes + minimum.float(), groups)


def quantise(groups: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes from 0 to ``levels`` of groups (…, 32), with their scales and minimums in half precision."""
    minimum = groups.amin(-1, keepdim=True).half()
    scale = ((groups.amax(-1, keepdim=True) - minimum.float()) / levels).half()
    codes = (groups - minimum.float()) / scale.float()
    return codes.nan_to_num(0.0, 0.0, 0.0).round().clamp(0, levels), scale, minimum
