"""A Llama-like model in our own kernels, whose sums have one order: a token's logits depend on the model and the tokens
before it, and on nothing else. Not on the window, other requests, the chunks of the prompt or the captured size.

The weights are the transformers model's own. `InvariantModel.forward` is what its ``forward`` is, for windows over the
paged cache.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mars.engine.compilation import Joiner, Joint, LowRankJoint, TwoSets
from mars.engine.kernels.invariant_attention import attend
from mars.engine.kernels.layers import activate, add_and_norm, embed, rotate_and_store
from mars.engine.kernels.products import expand, num_parts, product
from mars.engine.paged_attention import PagedWindows
from mars.models.checkpoint import Checkpoint
from mars.models.support import sliding_window


@dataclass(frozen=True, slots=True)
class Layer:
    qkv: Joint
    o: Joint
    gate_up: Joint
    down: Joint
    norm: Tensor  # before the attention
    mlp_norm: Tensor
    head_norms: tuple[Tensor, Tensor] | None  # of queries and keys
    sliding: int | None


class InvariantModel:
    def __init__(self, checkpoint: Checkpoint) -> None:
        """Takes the memory of a second set of weights, where a gated adapter gets one."""
        module, self._adapter, self._context = checkpoint.module, checkpoint.adapter, checkpoint.context
        decoder, config = module.get_decoder(), module.config
        attention = decoder.layers[0].self_attn
        self._epsilon, self._scale = float(config.rms_norm_eps), float(attention.scaling)
        self._heads, self._inner = int(config.num_attention_heads), int(config.intermediate_size)
        join = Joiner(module, checkpoint.adapter)
        with torch.no_grad():
            self._layers = [self._layer(each, join) for each in decoder.layers]
        self._embedding = module.get_input_embeddings().weight
        self._norm = decoder.norm.weight
        self._output: Any = module.get_output_embeddings()
        self._rotary = self._angles(decoder)
        torch.cuda.empty_cache()  # of what weights were copied from

    def forward(self, tokens: Tensor, windows: PagedWindows, *, wants_logits: bool = True) -> Tensor:
        """Logits of all tokens (tokens,) of the windows, whose keys and values go into the cache."""
        adapter = self._adapter
        mask_row = self._embedding if adapter is None else adapter.mask_row
        mask_token = -1 if adapter is None or not windows.window.all_masks else adapter.mask_token
        hidden, x = embed(
            tokens, self._embedding, mask_token, mask_row.to(self._embedding), self._layers[0].norm, self._epsilon
        )
        norms = [*(each.norm for each in self._layers[1:]), self._norm]
        for number, (layer, next_norm) in enumerate(zip(self._layers, norms, strict=True)):
            x = self._attend(layer, x, windows, windows.cache.layers[number])
            x = add_and_norm(hidden, self._product(layer.o, x, windows), layer.o.bias, layer.mlp_norm, self._epsilon)
            both = self._product(layer.gate_up, x, windows)
            x = activate(both, layer.gate_up.bias, self._inner, x.dtype)
            x = add_and_norm(hidden, self._product(layer.down, x, windows), layer.down.bias, next_norm, self._epsilon)
        return product(x, self._output.weight, self._output.bias) if wants_logits else x

    def _attend(self, layer: Layer, x: Tensor, windows: PagedWindows, store: tuple[Tensor, Tensor]) -> Tensor:
        where: dict[str, Any] = {
            "page_table": windows.page_table,
            "slots": windows.slots,
            "cursors": windows.cursors,
            "lengths": windows.lengths,
            "positions": windows.visibility.position.contiguous(),
        }
        qkv, bias = self._product(layer.qkv, x, windows), layer.qkv.bias
        shape: dict[str, Any] = {"heads": self._heads, "epsilon": self._epsilon, "items": windows.packing.items}
        query = rotate_and_store(qkv, bias, layer.head_norms, self._rotary, store, **shape, **where)
        reach = windows.visibility.reach.contiguous()
        options: dict[str, Any] = {"window": windows.window, "scale": self._scale, "sliding": layer.sliding}
        return attend(query, store, reach=reach, rows=windows.packing.rows, **options, **where).flatten(1)

    def _product(self, layer: Joint, x: Tensor, windows: PagedWindows) -> Tensor:
        """As `product` leaves it; with a gated adapter, masks have their own.

        Of the low-rank form only the text's bits are always the same: where the product has parts, masks are rounded
        once less.
        """
        parts, num_text = num_parts(*layer.weight.shape), windows.packing.num_text
        if windows.window.all_masks and isinstance(layer, TwoSets):
            return product(x, layer.weights, layer.bias, num_text, parts)
        if windows.window.all_masks and isinstance(layer, LowRankJoint):
            y = product(x, layer.whole, layer.whole_bias, parts=parts)
            expand(y, layer.expansion, layer.sizes, num_text)
            return y
        return product(x, layer.weight, layer.bias, parts=parts)

    def _layer(self, layer: Any, join: Joiner) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        return Layer(
            join(attention.q_proj, attention.k_proj, attention.v_proj),
            join(attention.o_proj),
            join(mlp.gate_proj, mlp.up_proj),
            join(mlp.down_proj),
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
            None if None in norms else (norms[0].weight, norms[1].weight),  # type: ignore[union-attr]
            sliding_window(attention),
        )

    def _angles(self, decoder: nn.Module) -> tuple[Tensor, Tensor]:
        """Cosines and sines (context, size) as the model computes them."""
        positions = torch.arange(self._context or 0, device=self._embedding.device)[None]
        cosine, sine = decoder.rotary_emb(self._embedding[None, :1], positions)  # type: ignore[operator]
        return cosine[0].contiguous(), sine[0].contiguous()
