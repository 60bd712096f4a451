"""Checks of a model's architecture: decoding in windows needs a cache of keys and values that can be rolled back."""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from mars.errors import MarsError

ATTENTION = {"full_attention", "sliding_attention"}
SHIFTING_ROPE = {"dynamic", "longrope"}
LLAMA_LIKE = {"llama", "mistral", "qwen2", "qwen3"}
RECURRENT_WORDS = ("mamba", "rwkv", "recurrent", "xlstm", "lfm2", "jamba", "bamba")


def refuse_config(name: str, config: PreTrainedConfig) -> None:
    """Raise with the reason if a model of this kind cannot work, before its weights are fetched."""
    reason = _reason(config, config.get_text_config(decoder=True))
    if reason:
        raise MarsError(f"{name} cannot be used: {reason}")


def refuse_model(name: str, model: PreTrainedModel) -> None:
    """Raise with the reason if the loaded module cannot work."""
    refuse_config(name, model.config)
    if model._is_stateful:
        raise MarsError(f"{name} cannot be used: it keeps a recurrent state, which cannot be rolled back")
    if not model._supports_attention_backend:
        raise MarsError(f"{name} cannot be used: {type(model).__name__} does not use transformers' attention interface")


def is_llama_like(config: PreTrainedConfig) -> bool:
    """Is it of a kind that the engine has a forward of its own for?"""
    return config.model_type in LLAMA_LIKE and config.hidden_act == "silu"


def has_plain_layers(model: PreTrainedModel) -> bool:
    """Are the layers of such a model what they seem? Something may have been put in their place."""
    linears = [each for name, each in model.named_modules() if name.endswith("_proj")]
    rotary: Any = model.get_decoder().rotary_emb
    return all(type(each) is nn.Linear for each in linears) and 2 * len(rotary.inv_freq) == head_size(model)


def head_size(model: PreTrainedModel) -> int:
    """Of such a model."""
    decoder: Any = model.get_decoder()
    return int(decoder.layers[0].self_attn.head_dim)


def sliding_window(attention: Any) -> int | None:
    """Of a layer of such a model. Qwen's layers have their own, Mistral's the model's."""
    config = attention.config
    shared = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    return getattr(attention, "sliding_window", shared)


def refuse_gaps(report: dict[str, Any]) -> None:
    """Raise if weights are missing: transformers would fill them with random ones."""
    gaps = [*report["missing_keys"], *report["mismatched_keys"]]
    if gaps:
        raise ValueError(f"{len(gaps)} weights are missing or have another shape, {gaps[0]} first")


def _reason(config: PreTrainedConfig, text: PreTrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model; MARS needs a decoder-only one"
    if any(word in text.model_type for word in RECURRENT_WORDS):
        return f"a {text.model_type} model keeps a recurrent state, which cannot be rolled back"
    strange = set(getattr(text, "layer_types", None) or ()) - ATTENTION
    if strange:
        return f"layers of type {', '.join(sorted(strange))} keep a state that cannot be rolled back"
    if getattr(text, "attention_chunk_size", None):
        return "its attention is chunked by position"
    parameters = getattr(text, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]  # in some families
    rope = {str(each.get("rope_type", "default")) for each in by_layer_type or [parameters]} & SHIFTING_ROPE
    if rope:
        return f"its {rope.pop()} position encoding changes with the length of the longest row of a batch"
    return None
