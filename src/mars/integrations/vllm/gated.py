"""A gated adapter inside vLLM: the embedding of masks, and low-rank changes of linear layers at the masks' rows.

vLLM compiles a model and captures CUDA graphs of it, so which rows are masks is decided in the graph: the embedding
layer compares token ids with the mask token and writes a buffer that the linear layers read. Both go through operators
of our own, which the compiler does not look into. Rows of text are not written, so they keep the base model's bits.

Linear layers add the change to their own part of the output before any reduction over ranks.
"""

from __future__ import annotations

from collections import defaultdict
from copy import copy
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mars.errors import MarsError
from mars.integrations.vllm import hooks
from mars.integrations.vllm.hooks import Method
from mars.method.markov import MarkovHead
from mars.models.adapter_files import FINGERPRINT, AdapterFiles, dequantised, read_weights, stored_change
from mars.models.gated import SAMPLES, samples, spread

SPARE_ROWS = 1024  # vLLM pads steps beyond the largest number of scheduled tokens
PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""Layers that vLLM joins, and their names in transformers; models may say otherwise"""


class Step:
    """What is known of the step that is being run or captured."""

    masks = True  # may it feed masks? Where not, the linear layers leave the low-rank products out


step = Step()


# --- operators


def _insert(rows: Tensor, gate: Tensor, tokens: Tensor, row: Tensor, mask_token: int) -> None:
    is_mask = tokens.reshape(-1) == mask_token
    gate[: len(is_mask)].copy_(is_mask)
    rows.copy_(torch.where(is_mask.view(*tokens.shape, 1), row, rows))


def _change(y: Tensor, x: Tensor, a: Tensor, b: Tensor, gate: Tensor, sizes: list[int]) -> None:
    """On a CPU, where looking at the gate costs nothing."""
    rows = gate[: len(x)].nonzero()[:, 0] if step.masks else gate[:0]
    if not len(rows):
        return
    low = linear(x[rows], a).split(b.shape[1], 1)
    y[rows] += torch.cat([linear(*each) for each in zip(low, b.split(sizes), strict=True)], 1)


def _change_on_gpu(y: Tensor, x: Tensor, a: Tensor, b: Tensor, gate: Tensor, sizes: list[int]) -> None:
    from mars.integrations.vllm.kernel import add_change

    if step.masks:
        add_change(y, linear(x, a), b, gate, sizes)


LIBRARY = torch.library.Library("mars", "FRAGMENT")
LIBRARY.define("insert_masks(Tensor(a!) rows, Tensor(b!) gate, Tensor tokens, Tensor row, int mask_token) -> ()")
LIBRARY.define("add_change(Tensor(a!) y, Tensor x, Tensor a, Tensor b, Tensor gate, int[] sizes) -> ()")
LIBRARY.impl("insert_masks", _insert, "CPU")
LIBRARY.impl("insert_masks", _insert, "CUDA")
LIBRARY.impl("add_change", _change, "CPU")
LIBRARY.impl("add_change", _change_on_gpu, "CUDA")
for name in ("insert_masks", "add_change"):
    torch.library.register_fake(f"mars::{name}", lambda *_: None, lib=LIBRARY)


# --- layers


@cache
def _gated_embedding(original: Any) -> Any:
    class Gated(original):  # type: ignore[misc]
        """Looks up a token of the text in the place of a mask, and puts the masks' row there."""

        def forward(self, input_: Tensor) -> Tensor:
            rows: Tensor = super().forward(input_.clamp(max=self.mars_mask_token - 1))
            torch.ops.mars.insert_masks(rows, self.mars_gate, input_, self.mars_row, self.mars_mask_token)
            return rows

    return Gated


@cache
def _gated_method(original: Any) -> Any:
    class Gated(original):  # type: ignore[misc]
        """How a layer with a low-rank change multiplies."""

        def apply(self, layer: Any, x: Tensor, *others: Any, **options: Any) -> Tensor:
            y: Tensor = super().apply(layer, x, *others, **options)
            torch.ops.mars.add_change(y, x, layer.mars_a, layer.mars_b, layer.mars_gate, layer.mars_sizes)
            return y

    return Gated


class Part(NamedTuple):
    """A layer of transformers' that is all of a layer in vLLM, or a part of it."""

    name: str
    place: int | None  # which part; None: all of it


def attach(model: nn.Module, files: AdapterFiles, watched: dict[str, Tensor], config: Any) -> MarkovHead | None:
    """Put an adapter into vLLM's model, before it is compiled; returns the Markov head, which all ranks have whole.

    ``watched`` is what `watch` has seen. Raises if the adapter belongs to another model.
    """
    if config.model_config.use_mla:
        raise MarsError("mars cannot change a model with latent attention (MLA): vLLM rewrites its layers")
    stored = read_weights(files)
    name, embedding = _embedding(model, files, stored["mask_row"])
    weight, dtype = embedding.weight, config.model_config.dtype
    _refuse_other_weights(files, stored[FINGERPRINT], watched, embedding, dtype)
    largest = config.compilation_config.max_cudagraph_capture_size or 0
    tokens = max(config.scheduler_config.max_num_batched_tokens, largest) + SPARE_ROWS
    gate = torch.zeros(tokens, dtype=torch.bool, device=weight.device)
    for layer, parts in _layers(model, files).items():
        _attach_layer(layer, parts, files, stored, gate, dtype)

    owner = model.get_submodule(name.rpartition(".")[0])
    row = stored["mask_row"] / float(getattr(owner, "normalizer", 1.0))  # Gemma's, which transformers has applied
    embedding.register_buffer("mars_row", row.to(weight.device, dtype), persistent=False)
    embedding.register_buffer("mars_gate", gate, persistent=False)
    embedding.mars_mask_token = files.config["mask_token_id"]
    kind: Any = type(embedding)
    embedding.__class__ = _gated_embedding(kind)
    return _head(stored, weight.device, dtype)


def _head(stored: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> MarkovHead | None:
    if "head.after" not in stored:
        return None
    with torch.device("meta"):
        head = MarkovHead(*stored["head.after"].shape)
    weights = {name: dequantised(stored, f"head.{name}").to(device, dtype) for name in ("before", "after")}
    head.load_state_dict(weights, assign=True)
    return head.requires_grad_(False)


def _embedding(model: nn.Module, files: AdapterFiles, row: Tensor) -> tuple[str, Any]:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    if len(found) != 1:
        raise MarsError(f"gated adapters need a model with one embedding of tokens, and this one has {len(found)}")
    embedding = found[0][1]
    if (embedding.org_vocab_size, embedding.embedding_dim) != (files.config["mask_token_id"], len(row)):
        raise MarsError(f"{files.belongs}: this one has {embedding.org_vocab_size} tokens")
    return found[0]


def _layers(model: Any, files: AdapterFiles) -> dict[Any, list[Part]]:
    """vLLM's layers that are changed, and of which parts they consist."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear

    known = {each.forward for each in (ColumnParallelLinear, ReplicatedLinear, RowParallelLinear)}
    modules, found = dict(model.named_modules()), defaultdict(list)
    packed = PARTS | (getattr(model, "packed_modules_mapping", None) or {})
    owner = {part: (name, index) for name, parts in packed.items() for index, part in enumerate(parts) if parts[1:]}
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    mapper = mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper
    for name in files.config["layers"]:
        renamed = ((mapper and mapper._map_name(f"{name}.weight")) or f"{name}.weight").removesuffix(".weight")
        where, _, last = renamed.rpartition(".")
        joined, index = owner.get(last, (last, None))
        layer, part = modules.get(renamed), Part(name, None)
        if layer is None:
            layer, part = modules.get(f"{where}.{joined}"), Part(name, index)
        if layer is None:
            raise MarsError(f"{files.belongs}: this one has no linear layer {name}")
        if getattr(type(layer), "forward", None) not in known:
            raise MarsError(f"mars cannot change the layer {name}, which is a {type(layer).__name__} in vLLM")
        found[layer].append(part)
    return dict(found)


def _attach_layer(
    layer: Any, parts: list[Part], files: AdapterFiles, stored: dict[str, Tensor], gate: Tensor, dtype: torch.dtype
) -> None:
    """The change of one layer, of which each rank has its part: it is divided as the layer's own weights are."""
    from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear

    rank, rows = files.config["rank"], isinstance(layer, RowParallelLinear)
    if parts[0].place is None:
        sizes, outputs = [sum(layer.output_partition_sizes)], [layer.output_size]
    else:
        sizes, outputs = list(layer.output_partition_sizes), list(layer.output_sizes)
    if isinstance(layer, QKVParallelLinear):
        heads, kv_heads = layer.total_num_heads * layer.head_size, layer.total_num_kv_heads
        outputs = [heads, kv_heads * layer.head_size, kv_heads * layer.v_head_size]
        outputs = [sum(outputs)] if parts[0].place is None else outputs
    a = torch.zeros(len(sizes) * rank, layer.input_size // layer.tp_size if rows else layer.input_size, dtype=dtype)
    b = torch.zeros(sum(sizes), rank, dtype=dtype)
    for name, part in parts:
        change, place = stored_change(stored, name), part or 0
        if (change.a.shape[1], change.b.shape[0]) != (layer.input_size, outputs[place]):
            raise MarsError(f"{files.belongs}: {name} has another shape in this one")
        mine = a[place * rank : (place + 1) * rank]
        if rows:
            layer.weight_loader(_parameter(mine, input_dim=1), change.a.to(dtype))
            b.copy_(change.b)
        else:
            shard = () if part is None else ("qkv"[part],) if isinstance(layer, QKVParallelLinear) else (part,)
            layer.weight_loader(_parameter(b, output_dim=0), change.b.to(dtype), *shard)
            mine.copy_(change.a)
    layer.register_buffer("mars_a", a.to(gate.device), persistent=False)
    layer.register_buffer("mars_b", b.to(gate.device), persistent=False)
    layer.register_buffer("mars_gate", gate, persistent=False)
    layer.mars_sizes = sizes
    kind: Any = type(layer.quant_method)
    layer.quant_method = copy(layer.quant_method)
    layer.quant_method.__class__ = _gated_method(kind)


def _parameter(tensor: Tensor, **attributes: int) -> nn.Parameter:
    """A view of a tensor that vLLM's layers load their part of a weight into."""
    parameter = nn.Parameter(tensor, requires_grad=False)
    vars(parameter).update(attributes)
    return parameter


# --- is it the adapter's base?


_watches: dict[str, dict[str, Tensor]] = {}  # by the name of a weight: where its values are noted


def watch(files: AdapterFiles) -> dict[str, Tensor]:
    """From now on, note some values of the adapted layers' weights as vLLM reads them, whole, from a checkpoint."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    reason = "after loading, weights are joined, divided and rearranged"
    hooks.install([(DefaultModelLoader, "get_all_weights", _note_weights, reason)])
    noted: dict[str, Tensor] = {}
    _watches.clear()
    _watches.update(dict.fromkeys((f"{name}.weight" for name in files.config["layers"]), noted))
    return noted


def _note_weights(original: Method, *args: Any, **kwargs: Any) -> Any:
    for name, weight in original(*args, **kwargs):
        if name in _watches and weight.ndim == 2 and weight.dtype.is_floating_point and weight.element_size() > 1:
            _watches[name][name.removesuffix(".weight")] = samples(weight).float().cpu()
        yield name, weight


def _refuse_other_weights(
    files: AdapterFiles, fingerprint: Tensor, watched: dict[str, Tensor], embedding: Any, dtype: torch.dtype
) -> None:
    """Compare what was seen of the layers, and those of the embedding's rows that this rank has."""
    if not watched:  # weights that are made up, or come from somewhere else
        return
    theirs = dict(zip((*files.config["layers"], ""), fingerprint.to(dtype).float().view(-1, SAMPLES), strict=True))
    same = all(torch.equal(found.to(dtype).float(), theirs[name]) for name, found in watched.items())
    weight, indices = embedding.weight, embedding.shard_indices
    if weight.dtype == dtype:
        rows, columns = (spread(size) for size in (embedding.org_vocab_size, weight.shape[1]))
        mine = (rows >= indices.org_vocab_start_index) & (rows < indices.org_vocab_end_index)
        places = (rows[mine] - indices.org_vocab_start_index).to(weight.device), columns[mine].to(weight.device)
        same &= torch.equal(weight[places].float().cpu(), theirs[""][mine])
    if not same:
        raise MarsError(f"{files.belongs}: the weights of this one are others")
