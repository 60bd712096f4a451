"""Our attention function for transformers' attention interface, and the one forward that uses it.

A model switched to the implementation `NAME` builds no mask of its own and passes every extra keyword argument of its
call down to `attend`. So a forward brings its own cache and visibility as the keyword ``windows``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from mars.errors import MarsError
from mars.models.checkpoint import Checkpoint

NAME = "mars_windows"


class WindowAttention(Protocol):
    """Where the windows of one forward are in a cache, and how they attend to it and to themselves."""

    calls: int  # how many layers have attended
    slides: bool  # did one of them have a sliding window?

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """``options``: scale, sliding (window), softcap and sinks of the layer."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    *,
    windows: WindowAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """(batch, heads, tokens, size) queries in, (batch, tokens, heads, size) out."""
    if windows is None:
        raise MarsError(f"{type(module).__name__} does not hand the windows of a forward down to its attention")
    windows.calls += 1
    windows.slides |= sliding_window is not None
    out = windows.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query,
        key,
        value,
        scale=scaling or query.shape[3] ** -0.5,
        sliding=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out, None


AttentionInterface.register(NAME, attend)


def forward(
    checkpoint: Checkpoint, tokens: Tensor, positions: Tensor, windows: WindowAttention, logits_to_keep: int = 0
) -> Tensor:
    """Logits of the last tokens, or of all; ``tokens`` and ``positions`` are (batch, tokens)."""
    if checkpoint.module.config._attn_implementation != NAME:
        checkpoint.module.set_attn_implementation(NAME)
    if checkpoint.context is not None:  # the last windows of a text reach past it, though no text does
        positions = positions.clamp(max=checkpoint.context - 1)
    output = checkpoint.module(
        input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=logits_to_keep, windows=windows
    )
    _check_layers(checkpoint, windows)
    logits: Tensor = output.logits
    return logits


def _check_layers(checkpoint: Checkpoint, windows: WindowAttention) -> None:
    """Raise if a layer did not use our attention: the logits would be wrong without a word."""
    config = checkpoint.module.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    should_slide = "sliding_attention" in types if types else getattr(config, "sliding_window", None) is not None
    if windows.calls != config.num_hidden_layers or should_slide > windows.slides:
        raise MarsError(
            f"{checkpoint.name} cannot be used: not all of its layers use transformers' attention interface"
        )


def fold_mask(visible: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Who sees whom (batch, queries, keys), for all heads that share keys: (batch, 1, folds x queries, keys)."""
    return visible.repeat(1, query.shape[1] // key.shape[1], 1)[:, None]


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention under a mask from `fold_mask`: heads that share keys are folded, so that each key is read once."""
    batch, heads, width, size = query.shape
    shared = key.shape[1]
    folded = query.reshape(batch, shared, heads // shared * width, size)
    if softcap is None and sinks is None:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    else:
        extra = None if sinks is None else sinks.view(1, shared, -1, 1).repeat_interleave(width, 2)
        out = explicit_attention(folded, key, value, mask, scale, softcap, extra)
    return out.reshape(batch, heads, width, -1).transpose(1, 2).contiguous()


def explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention with a cap on the scores (Gemma 2) or an extra score that attends to nothing (gpt-oss)."""
    scores = query @ key.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf).float()
    if sinks is None:
        return scores.softmax(-1).to(value.dtype) @ value
    scores = torch.cat([scores, sinks.float().expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., :-1].to(value.dtype) @ value


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Lend the model with transformers' own attention: for its ``generate`` and for decoding without our cache."""
    capped = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    model.set_attn_implementation("sdpa" if model._supports_sdpa and capped is None else "eager")
    try:
        yield model
    finally:
        model.set_attn_implementation(NAME)
