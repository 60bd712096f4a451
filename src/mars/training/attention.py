"""Attention of both streams for transformers' attention interface: FlexAttention on a GPU, else a dense mask.

A model switched to the implementation `NAME` builds no mask of its own and passes the keyword ``stream_masks`` of its
call to `attend`: one mask for every sliding window of its layers; None is a layer without one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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


def stream_masks(
    queries: Visibility, keys: Visibility, windows: Iterable[int | None], *, flex: bool
) -> dict[int | None, StreamMask]:
    """The visibility rule as a mask, for each sliding window of the model."""
    if flex:
        return {window: _block_mask(queries, keys, window) for window in windows}
    return {window: visibility_table(queries, keys, window)[:, None] for window in windows}


def _block_mask(queries: Visibility, keys: Visibility, sliding: int | None) -> BlockMask:
    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(queries.at(row, query), keys.at(row, key), sliding)

    (rows, asked), device = queries.position.shape, queries.position.device
    build = compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    return build(visible, rows, None, asked, keys.position.shape[1], device=str(device))


@dataclass(slots=True)
class CleanStates:
    """Keys and values of the clean stream, by layer: kept in its own forward, and read in that of the masks."""

    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    complete: bool = False

    def exchange(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer's queries attend to."""
        if not self.complete:
            self.layers[layer] = key, value
            return key, value
        clean_key, clean_value = self.layers[layer]
        return torch.cat([clean_key, key], 2), torch.cat([clean_value, value], 2)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    *,
    clean_states: CleanStates | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of both streams at once, or of one of them."""
    if clean_states is not None:
        return _attend_to_clean(module, query, key, value, clean_states, **options)
    return _attend(module, query, key, value, **options)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_to_clean(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, clean_states: CleanStates, **options: Any
) -> tuple[Tensor, None]:
    """Outside of compiled layers: the number of a layer would compile each of them anew."""
    key, value = clean_states.exchange(module.layer_idx, key, value)  # type: ignore[arg-type]
    return _attend(module, query, key, value, **options)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
