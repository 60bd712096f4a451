"""A model in the form that step.c runs, with its adapter, and its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p, pointer
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mars.engine.cache import LayerShape, zeros
from mars.engine.cpu.library import load_library, machine_flags
from mars.engine.cpu.weights import GROUP, Form, Matrix
from mars.engine.device_state import DeviceState
from mars.engine.step import StepInputs, StepOutputs
from mars.method.visibility import Visibility
from mars.method.windows import Window
from mars.models.checkpoint import Checkpoint
from mars.models.gated import LowRank
from mars.models.support import sliding_window

PAGE = 16  # tokens in a page of the cache
MOST_RANK = 64  # of an adapter's changes in int8: what they bring beyond is less than the time it takes to read more
VECTOR = 16  # heads of values are padded to a multiple of it


class Linear(Structure):
    _fields_ = (
        ("count", c_int32),
        ("weight", Matrix * 3),
        ("bias", c_void_p * 3),
        ("at", c_int32 * 3),
        ("a", Matrix * 3),
        ("b", Matrix * 3),
    )


class Layer(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, Linear) for name in ("qkv", "o", "gate_up", "down")),
        ("sliding", c_int32),
        ("keys", c_void_p),
        ("values", c_void_p),
    )


class Architecture(Structure):
    """``Model`` in step.c."""

    _fields_ = (
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_size", "mlp", "half_cache")),
        *((name, c_float) for name in ("epsilon", "rope_scale", "attention_scale")),
        *((name, c_void_p) for name in ("frequencies", "norm", "mask_row")),
        ("mask_token", c_int64),
        ("embedding", Matrix),
        ("output", Matrix),
        ("output_bias", c_void_p),
        ("layer", POINTER(Layer)),
    )


class Inputs(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("sequences", "width", "logits_wanted", "table_pages", "threads")),
        *((name, c_void_p) for name in ("tokens", "positions", "group", "offset", "reach")),
        *((name, c_void_p) for name in ("slots", "cursors", "page_table", "logits", "scratch")),
        ("scratch_bytes", c_int64),
    )


class Greedy(Structure):
    _fields_ = (
        ("logits", c_void_p),
        *((name, c_int32) for name in ("stride", "vocabulary", "count", "threads")),
        ("rows", c_void_p),
        *((name, POINTER(Matrix)) for name in ("before", "after")),
        *((name, c_void_p) for name in ("tokens", "chosen", "probability")),
    )


class Decoding(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("sequences", "drafts", "most_groups", "masks")),
        *((name, c_int32) for name in ("state_drafts", "table_pages", "threads")),
        *((name, c_void_p) for name in ("slots", "verifies", "groups", "masks_of")),
        *((name, c_void_p) for name in ("cursor", "last", "draft_count", "state", "emitted", "page_table")),
        *((name, c_int64) for name in ("context", "mask", "banned")),
        ("vocabulary", c_int32),
        *((name, POINTER(Matrix)) for name in ("before", "after")),
        *((name, c_void_p) for name in ("decisions", "probability", "scratch")),
        ("scratch_bytes", c_int64),
    )


class CpuModel:
    """Weights copied out of a transformers model, and a step compiled for this machine."""

    def __init__(self, checkpoint: Checkpoint, form: Form) -> None:
        """Raises if there is no compiler."""
        self._library = load_library(tuple(machine_flags()))
        self._library.mars_step.restype = self._library.mars_decode.restype = c_int64
        self.weight_bytes = 0  # what a step without masks reads
        self._kept: list[Any] = []  # memory that the structures point to
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._logits = torch.empty(0, 0, dtype=torch.float32)
        self._decoded: tuple[DeviceState, Decoding] | None = None
        self._form: Form = form
        self._adapter = checkpoint.adapter
        self._context = checkpoint.context
        self._mask = checkpoint.mask_token_id or 0
        self._banned = -1 if checkpoint.banned_token is None else checkpoint.banned_token
        module = checkpoint.module
        self._names = {layer: name for name, layer in module.named_modules()}
        config, decoder = module.config, module.get_decoder()
        attention = decoder.layers[0].self_attn
        self._heads = (config.num_attention_heads, config.num_key_value_heads, attention.head_dim)
        layers = [self._layer(each) for each in decoder.layers]
        self._layers = (Layer * len(layers))(*layers)
        embedding = self._matrix(module.get_input_embeddings().weight)
        output = module.get_output_embeddings()
        is_tied = output.weight is module.get_input_embeddings().weight
        dtype = torch.float32 if form == "float32" else torch.bfloat16
        shape = LayerShape(self._heads[1], self._heads[2], -(-self._heads[2] // VECTOR) * VECTOR, dtype)
        self.shapes = [shape] * len(layers)
        self.vocabulary = checkpoint.vocabulary
        self._architecture = Architecture(
            *(len(layers), config.hidden_size, *self._heads, config.intermediate_size, dtype == torch.bfloat16),
            *(config.rms_norm_eps, decoder.rotary_emb.attention_scaling, attention.scaling),
            *(self._vector(decoder.rotary_emb.inv_freq), self._vector(decoder.norm.weight)),
            *(
                (None, -1)
                if self._adapter is None
                else (self._vector(self._adapter.mask_row), self._adapter.mask_token)
            ),
            *(embedding, embedding if is_tied else self._matrix(output.weight), self._bias(output), self._layers),
        )
        head = checkpoint.head
        self._head = (
            None if head is None else tuple(self._matrix(each, drafts=True) for each in (head.before, head.after))
        )

    def set_cache(self, cache: CpuCache) -> None:
        """Where keys and values go from now on."""
        self._cache = cache
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()

    def forward(
        self,
        tokens: Tensor,
        visibility: Visibility,
        slots: Tensor,
        cursors: Tensor,
        page_table: Tensor,
        *,
        wants_logits: bool = True,
    ) -> Tensor:
        """Logits (tokens, vocabulary) of windows (sequences, width); their keys and values go into the cache.

        Tokens below zero are padding: they are left out, and what stands in their rows of the logits is garbage. The
        logits are overwritten by the next forward.
        """
        positions = cursors[:, None] + visibility.position
        if self._context is not None:  # the last windows of a text reach past it, though no text does
            positions = positions.clamp(max=self._context - 1)
        given = (tokens, positions, visibility.group, visibility.position, visibility.reach, slots, cursors, page_table)
        held = [each.contiguous() for each in given]
        logits = self._logits_buffer(tokens.numel() if wants_logits else 0)
        inputs = Inputs(
            *(*tokens.shape, wants_logits, page_table.shape[1], torch.get_num_threads()),
            *(each.data_ptr() for each in (*held, logits, self._scratch)),
            self._scratch.nbytes,
        )
        while needed := self._library.mars_step(byref(self._architecture), byref(inputs)):
            self._scratch = torch.empty(needed, dtype=torch.uint8)
            inputs.scratch, inputs.scratch_bytes = self._scratch.data_ptr(), needed
        return logits[:, : self.vocabulary]

    def decode(self, inputs: StepInputs, window: Window, state: DeviceState) -> StepOutputs:
        """A step of greedy sequences without other options; no sequence's window is larger than ``window``."""
        count = len(inputs)
        decisions = torch.empty(count, 4 + window.drafts + window.masks, dtype=torch.long)
        probabilities = torch.empty(count, window.masks)
        step, integers = self._decoding(state), inputs.integers
        step.sequences, step.threads = count, torch.get_num_threads()
        step.drafts, step.most_groups, step.masks = window.drafts, window.groups, window.masks
        first = integers.data_ptr()
        step.slots, step.verifies, step.groups, step.masks_of = (first + 8 * count * row for row in range(4))
        step.decisions, step.probability = decisions.data_ptr(), probabilities.data_ptr()
        step.scratch, step.scratch_bytes = self._scratch.data_ptr(), self._scratch.nbytes
        while needed := self._library.mars_decode(byref(self._architecture), byref(step)):
            if needed < 0:
                raise MemoryError("there is no memory for a step")
            self._scratch = torch.empty(needed, dtype=torch.uint8)
            step.scratch, step.scratch_bytes = self._scratch.data_ptr(), needed
        return StepOutputs(decisions, window.drafts, probabilities=probabilities)

    def _decoding(self, state: DeviceState) -> Decoding:
        """What is the same in all steps: the state's memory stays where it is."""
        if self._decoded is None or self._decoded[0] is not state:
            step = Decoding(
                state_drafts=state.drafts.shape[1],
                table_pages=state.page_table.shape[1],
                cursor=state.cursor.data_ptr(),
                last=state.last.data_ptr(),
                draft_count=state.draft_count.data_ptr(),
                state=state.drafts.data_ptr(),
                emitted=state.drafts_emitted.data_ptr(),
                page_table=state.page_table.data_ptr(),
                context=self._context or 2**62,
                mask=self._mask,
                banned=self._banned,
                vocabulary=self.vocabulary,
            )
            if self._head is not None:
                step.before, step.after = map(pointer, self._head)
            self._decoded = state, step
        return self._decoded[1]

    def _logits_buffer(self, rows: int) -> Tensor:
        """Kept from step to step: the system would have to clear fresh memory each time."""
        if len(self._logits) < rows:
            self._logits = torch.empty(rows, self._architecture.output.outputs, dtype=torch.float32)
        return self._logits[:rows]

    def head(self, tokens: Tensor) -> Tensor:
        """What the Markov head adds to the logits of masks behind these tokens, as `MarkovHead` does."""
        assert self._head is not None
        shape, tokens = tokens.shape, tokens.flatten()
        logits = torch.zeros(len(tokens), self._architecture.output.outputs, dtype=torch.float32)
        rows, chosen = torch.arange(len(tokens)), torch.empty_like(tokens)
        given = Greedy(logits.data_ptr(), logits.stride(0), self.vocabulary, len(rows), torch.get_num_threads())
        given.rows, given.tokens, given.chosen = rows.data_ptr(), tokens.data_ptr(), chosen.data_ptr()
        given.before, given.after = map(pointer, self._head)
        if self._library.mars_greedy(byref(given)):
            raise MemoryError("there is no memory for a step")
        return logits[:, : self.vocabulary].unflatten(0, shape)

    # --- structures

    def _layer(self, layer: nn.Module) -> Layer:
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        norms: list[Any] = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        return Layer(
            *(None if each is None else self._vector(each.weight) for each in norms),
            self._linear(attention.q_proj, attention.k_proj, attention.v_proj),
            self._linear(attention.o_proj, heads=True),
            self._linear(mlp.gate_proj, mlp.up_proj),
            self._linear(mlp.down_proj),
            sliding_window(attention) or 0,
        )

    def _linear(self, *layers: nn.Linear, heads: bool = False) -> Linear:
        """Layers with a common input. ``heads``: which is attention's output, padded where heads share keys."""
        linear, at = Linear(len(layers)), 0
        for index, layer in enumerate(layers):
            weight = self._matrix(self._by_heads(layer.weight) if heads else layer.weight)
            linear.weight[index], linear.bias[index], linear.at[index] = weight, self._bias(layer), at
            at += weight.outputs
        names, adapter = [self._names[each] for each in layers], self._adapter
        changes = {} if adapter is None else {each: adapter.change(each) for each in names if each in adapter.names}
        for index, (name, layer) in enumerate(zip(names, layers, strict=True)):
            if changes and adapter is not None:
                rank = len(next(iter(changes.values())).a)
                none = LowRank(layer.in_features, layer.out_features, rank)  # it begins without an effect
                change = changes.get(name, none)
                first, second = change.a.detach().float(), adapter.scale * change.b.detach().float()
                if self._form == "int8":
                    first, second = _of_rank(MOST_RANK, first, second)
                first = self._by_heads(first) if heads else first
                linear.a[index], linear.b[index] = (self._matrix(each, drafts=True) for each in (first, second))
        return linear

    def _by_heads(self, weight: Tensor) -> Tensor:
        """The inputs of a layer behind attention, with zeros between heads that share keys and those that do not."""
        heads, shared, size = self._heads
        split = weight.detach().unflatten(1, (shared, heads // shared * size))
        return pad(split, (0, -split.shape[2] % GROUP)).flatten(1)

    def _matrix(self, weight: Tensor, *, drafts: bool = False) -> Matrix:
        matrix = Matrix.of(weight, self._form, drafts=drafts)
        self.weight_bytes += 0 if drafts else matrix.data.nbytes
        self._kept.append(matrix)
        return matrix

    def _bias(self, layer: nn.Linear) -> int | None:
        return None if layer.bias is None else self._vector(layer.bias)

    def _vector(self, vector: Tensor) -> int:
        held = pad(vector.detach().float(), (0, -len(vector) % GROUP)).clone()
        self._kept.append(held)
        return held.data_ptr()


def _of_rank(rank: int, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the change ``b @ a``, or of the nearest one of so small a rank."""
    if len(a) <= rank:
        return a, b
    (left, middle), (right, other) = torch.linalg.qr(b), torch.linalg.qr(a.T)
    u, sizes, v = torch.linalg.svd(middle @ other.T)
    roots = sizes[:rank].sqrt()
    return roots[:, None] * v[:rank] @ right.T, left @ u[:, :rank] * roots


class CpuCache:
    """Keys (pages, heads, size, 16 tokens) and values (pages, heads, size / 16, 16 tokens, 16), float32 or bfloat16."""

    def __init__(self, shapes: Sequence[LayerShape], pages: int) -> None:
        cpu = torch.device("cpu")
        self.keys = [zeros((pages, each.heads, each.key_size, PAGE), each.dtype, cpu) for each in shapes]
        self.values = [zeros((pages, each.heads, each.value_size, PAGE), each.dtype, cpu) for each in shapes]
