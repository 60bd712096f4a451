"""One forward of a batch of windows through a transformers model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mars.decoding.attention import WindowAttention, Windows
from mars.decoding.cache import Cache
from mars.errors import MarsError
from mars.method.tensors import send
from mars.method.windows import Window, WindowBatch, stack
from mars.models.checkpoint import Checkpoint


def forward(
    checkpoint: Checkpoint, cache: Cache, cursors: Sequence[int], windows: Sequence[Window]
) -> tuple[WindowBatch, Tensor]:
    """The windows as a batch, and the logits of its last ``tail`` positions. The model must use our attention."""
    batch = stack(windows, checkpoint.device)
    attention = WindowAttention(
        cache,
        batch,
        cursors=send(cursors, checkpoint.device),
        length=max(cursor + len(window.tokens) for cursor, window in zip(cursors, windows, strict=True)),
    )
    output = checkpoint.module(
        input_ids=batch.tokens,
        position_ids=within(checkpoint.context, attention.positions),
        use_cache=False,
        logits_to_keep=batch.tail,
        windows=attention,
    )
    check_layers(checkpoint, attention)
    return batch, output.logits


def within(context: int | None, positions: Tensor) -> Tensor:
    """Positions that the model has: at the end of its context, windows reach past it, though no text does."""
    return positions if context is None else positions.clamp(max=context - 1)


def check_layers(checkpoint: Checkpoint, attention: Windows) -> None:
    """Raise if a layer of the model went its own way: the logits would be wrong without a word."""
    config = checkpoint.module.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    should_slide = "sliding_attention" in types if types else getattr(config, "sliding_window", None) is not None
    if attention.calls != config.num_hidden_layers or should_slide > attention.slides:
        raise MarsError(
            f"{checkpoint.name} cannot be used: not all of its layers use transformers' attention interface"
        )
