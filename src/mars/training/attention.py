"""Attention of both streams for transformers' attention interface: FlexAttention on a GPU, else a dense mask.

A model switched to the implementation `NAME` builds no mask of its own and passes the keyword ``stream_masks`` of its
call to `attend`: one mask for every sliding window of its layers; None is a layer without one.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from mars.errors import MarsError
from mars.method.visibility import Visibility, sees, visibility_table
from mars.models.attention import explicit_attention

NAME = "mars_streams"
StreamMask = Tensor | BlockMask


def stream_masks(visibility: Visibility, windows: Iterable[int | None], *, flex: bool) -> dict[int | None, StreamMask]:
    """The visibility rule as a mask, for each sliding window of the model."""
    if flex:
        return {window: _block_mask(visibility, window) for window in windows}
    return {window: visibility_table(visibility, visibility, window)[:, None] for window in windows}


def _block_mask(visibility: Visibility, sliding: int | None) -> BlockMask:
    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(visibility.at(row, query), visibility.at(row, key), sliding)

    (rows, length), device = visibility.position.shape, visibility.position.device
    build = compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    return build(visible, rows, None, length, length, device=str(device))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    *,
    stream_masks: Mapping[int | None, StreamMask] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of (rows, heads, length, size) queries to keys that several heads may share.

    The scores may have a cap (Gemma 2) or sinks (gpt-oss).
    """
    if stream_masks is None:
        raise MarsError(f"{type(module).__name__} does not hand its keywords down to its attention")
    mask = stream_masks[sliding_window]
    sinks = None if s_aux is None else s_aux.view(1, -1, 1, 1)
    if isinstance(mask, BlockMask):
        out = _flex(query, key, value, mask, scaling, softcap, sinks)
    else:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if softcap is None and sinks is None:
            out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        else:
            out = explicit_attention(query, key, value, mask, scaling or query.shape[-1] ** -0.5, softcap, sinks)
    return out.transpose(1, 2).contiguous(), None


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    run = flex_attention if torch.compiler.is_compiling() or query.device.type == "cpu" else compiled(flex_attention)
    options: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if sinks is not None:
        options["return_aux"] = AuxRequest(lse=True)
    out = run(query, key, value, None if softcap is None else capped, **options)
    if sinks is None:
        return out
    attended, extra = out  # a sink is one more term in the sum that every weight is divided by
    return attended * torch.sigmoid(extra.lse[..., None] - sinks).to(attended.dtype)


@cache
def compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)


AttentionInterface.register(NAME, attend)
