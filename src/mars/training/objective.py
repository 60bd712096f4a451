"""The training loss over both streams, installed as the forward of a causal language model."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from mars.errors import MarsError
from mars.method.markov import MarkovHead
from mars.method.streams import IGNORED, Streams
from mars.method.visibility import Visibility, visibility_table
from mars.models.gated import GatedAdapter
from mars.training.attention import NAME, CleanStates, stream_masks
from mars.training.recipe import Loss

CHUNK = 2048  # positions whose logits exist at once: the logits of a whole batch would not fit
Batch = dict[str, Any]
Teacher = tuple["Head", Tensor, Tensor]  # an output layer, hidden states, and the indices of those to compare with


def batch_tensors(streams: Streams, length: int, decay: float = 1.0) -> Batch:
    """Both streams as flat tensors, with the positions that have labels; made on the CPU, ahead of the forward.

    Every row has the same weight, so it does not matter how rows are spread over devices and accumulation steps.
    """
    tensors: Batch = {
        "length": length,
        "input_ids": streams.tokens,
        "position_ids": streams.positions,
        **streams.visibility._asdict(),
    }
    rows, width = streams.tokens.shape
    shares = (streams.labels != IGNORED) * decay ** (streams.offsets - 1).clamp(min=0)
    for name, span in (("clean", slice(0, length)), ("masks", slice(length, width))):
        share = torch.zeros_like(shares)
        share[:, span] = shares[:, span] / shares[:, span].sum(1, keepdim=True).clamp(min=1e-9) / rows
        index = share.flatten().nonzero()[:, 0]
        count = len(index)
        chunks = max(-(-count // CHUNK), share[:, span].numel() > 0)  # every stream has a chunk, even without labels
        index = torch.cat([index, index.new_zeros(chunks * CHUNK - count)])
        weights = share.flatten()[index]
        weights[count:] = 0
        tensors |= {f"{name}_at": index, f"{name}_weights": weights}
        tensors[f"{name}_labels"] = streams.labels.flatten()[index].clamp(min=0)
    row = torch.arange(rows)[:, None] * width
    tensors["masks_twins"] = (row + streams.visibility.position.clamp(max=length - 1)).flatten()[tensors["masks_at"]]
    tensors["masks_before"] = streams.tokens.flatten()[tensors["masks_twins"]]  # the text's token before the label
    return tensors


class Head:
    """The output layer of a model: hidden states to logits, as in the model's own forward."""

    def __init__(self, model: PreTrainedModel, *, bare: bool = False) -> None:
        """``bare``: without an adapter around the layer."""
        config = model.config.get_text_config(decoder=True)
        self._layer = model.get_output_embeddings()
        if bare:
            self._layer = getattr(self._layer, "original_module", self._layer)
            self._layer = getattr(self._layer, "base_layer", self._layer)
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)
        self._scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        self._weight: Tensor | None = None
        rows = getattr(self._layer, "token_adapter", None)
        if rows is not None:  # tied to an embedding with a trained row: that is trained as an embedding only
            self._weight = rows.get_merged_weights(rows.active_adapters).detach()

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self._layer(hidden) if self._weight is None else linear(hidden, self._weight.to(hidden.dtype))
        logits = logits.float() * self._scale
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)


@dataclass(eq=False)
class Objective:
    """The loss of one model; `installed`, ``model(**batch_tensors(...))`` returns it with its unweighted parts."""

    loss: Loss
    base: Callable[[], AbstractContextManager[PreTrainedModel]] | None = None  # a context with the base model
    flex: bool = False
    compiled: bool = False
    windows: tuple[int | None, ...] = (None,)  # sliding windows among the model's layers; None: a layer without one
    adapter: GatedAdapter | None = None  # with it the masks alone are trained, and the clean stream is the base model
    _answer: Callable[..., Tensor] = field(init=False)

    @contextmanager
    def installed(self, model: PreTrainedModel) -> Iterator[None]:
        """Make this loss the ``forward`` of a causal language model, because trainers, DDP and FSDP call the model.

        An adapter must be in place already.
        """
        self.windows = examine(model)
        self._answer = torch.compile(_answer, dynamic=False) if self.compiled else _answer
        if self.compiled:
            for layer in (each for each in model.modules() if type(each).__name__ in model._no_split_modules):
                layer.compile(dynamic=False)

        def forward(predict: bool = False, **batch: Any) -> dict[str, Tensor]:
            return self.predict(model, batch) if predict else self(model, batch)

        model.forward = forward
        try:
            yield
        finally:
            del model.forward

    def __call__(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        hidden, head = self.hidden(model, batch), Head(model)
        terms = dict[str, Tensor]()
        if self.adapter is None:
            terms = self._ask("clean", ("clean", "base"), head, hidden, batch, self._base_teacher(batch))
        if len(batch["masks_at"]):
            teacher = (head, hidden.detach(), batch["masks_twins"]) if self.loss.distill else None
            terms |= self._ask("masks", ("labels", "distill"), head, hidden, batch, teacher)
        loss = torch.stack([getattr(self.loss, name) * term for name, term in terms.items()]).sum()
        return {"loss": loss, **{name: term.detach() for name, term in terms.items()}}

    def predict(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        """The argmax at every position with a label, never the mask token, and the loss of the clean stream."""
        hidden, head = self.hidden(model, batch), Head(model)
        out: dict[str, list[Tensor]] = {"clean": [], "masks": [], "clean_loss": []}
        for stream in ("clean", "masks"):
            asked = (batch[f"{stream}_{name}"].split(CHUNK) for name in ("at", "labels"))
            before = batch["masks_before"].split(CHUNK) if stream == "masks" else repeat(None)
            for at, labels, tokens in zip(*asked, before, strict=False):
                logits = head(hidden[at])
                if tokens is not None and self.adapter is not None and self.adapter.head is not None:
                    logits = logits + self.adapter.head(tokens).float()
                if stream == "clean":
                    out["clean_loss"].append(cross_entropy(logits, labels, reduction="none"))
                logits[:, batch["mask_token"] :][:, :1] = -torch.inf  # a gated adapter's mask token has no logit
                out[stream].append(logits.argmax(-1))
        return {name: torch.cat(parts) if parts else hidden.new_zeros(0) for name, parts in out.items()}

    def hidden(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """(rows x width, size): the hidden states of both streams."""
        visibility = Visibility(*(batch[name] for name in Visibility._fields))
        if self.adapter is None:
            return self._states(model, batch, slice(None), visibility).flatten(0, 1)
        clean, masks = slice(0, batch["length"]), slice(batch["length"], None)
        states = CleanStates()
        text = Visibility(*(each[:, clean] for each in visibility))
        with torch.no_grad(), self.adapter.nowhere():
            parts = [self._states(model, batch, clean, text, clean_states=states)]
        states.complete = True
        with self.adapter.everywhere():
            parts.append(self._states(model, batch, masks, visibility, clean_states=states))
        return torch.cat(parts, 1).flatten(0, 1)

    def _states(
        self, model: PreTrainedModel, batch: Batch, part: slice, keys: Visibility, **options: CleanStates
    ) -> Tensor:
        """The hidden states of a part of the width, which attends to ``keys``."""
        queries = Visibility(*(batch[name][:, part] for name in Visibility._fields))
        out = model.base_model(
            input_ids=batch["input_ids"][:, part],
            position_ids=batch["position_ids"][:, part],
            use_cache=False,
            stream_masks=stream_masks(queries, keys, self.windows, flex=self.flex),
            **options,
        )
        states: Tensor = out.last_hidden_state
        return states

    def _base_teacher(self, batch: Batch) -> Teacher | None:
        """The base model's hidden states of the clean stream."""
        if not self.loss.base or self.base is None:
            return None
        width, length = batch["input_ids"].shape[1], batch["length"]
        clean = {name: batch[name][:, :length] for name in ("input_ids", "position_ids", *Visibility._fields)}
        at = batch["clean_at"]
        with torch.no_grad(), self.base() as model:
            return Head(model, bare=True), self.hidden(model, clean), at // width * length + at % width

    def _ask(
        self, stream: str, names: tuple[str, str], head: Head, hidden: Tensor, batch: Batch, teacher: Teacher | None
    ) -> dict[str, Tensor]:
        """Cross-entropy with the labels, and KL to the teacher if there is one."""
        total = torch.zeros(2 if teacher else 1, device=hidden.device)
        for start in range(0, len(batch[f"{stream}_at"]), CHUNK):
            chunk = slice(start, start + CHUNK)
            at, labels, weights = (batch[f"{stream}_{name}"][chunk] for name in ("at", "labels", "weights"))
            taught = (teacher[0], teacher[1][teacher[2][chunk]]) if teacher else (None, None)
            given = (head, hidden[at], labels, weights, *taught)
            if stream == "masks" and self.adapter is not None and self.adapter.head is not None:
                given = (*given, self.adapter.head, batch["masks_before"][chunk])
            total = total + checkpoint(self._answer, *given, use_reentrant=False)
        return dict(zip(names, total, strict=False))


def _answer(
    head: Head,
    hidden: Tensor,
    labels: Tensor,
    weights: Tensor,
    teacher: Head | None,
    taught: Tensor | None,
    markov: MarkovHead | None = None,
    before: Tensor | None = None,
) -> Tensor:
    """The losses of one chunk, each a weighted sum. The teacher's logits exist for this chunk only."""
    logits = head(hidden)
    if markov is not None and before is not None:
        logits = logits + markov(before).float()
    log_q = logits.log_softmax(-1)
    losses = [-log_q.gather(1, labels[:, None])[:, 0]]
    if teacher is not None and taught is not None:
        with torch.no_grad():
            log_p = teacher(taught).log_softmax(-1)
        losses.append((log_p.exp() * (log_p - log_q)).sum(1))
    return torch.stack([(loss * weights).sum() for loss in losses])


@torch.no_grad()
def examine(model: PreTrainedModel) -> tuple[int | None, ...]:
    """Switch a model to our attention and try it on a few tokens: returns the sliding windows among its layers.

    Raises if a layer does not use our attention or `Head` computes other logits: training would be silently wrong.
    """
    model.set_attn_implementation(NAME)
    model.eval()
    here = torch.arange(8, device=model.device)[None]
    masks = _Recorder(Visibility(torch.zeros_like(here), torch.zeros_like(here), here, here))
    inputs = {"input_ids": here, "position_ids": here, "use_cache": False, "stream_masks": masks}
    logits = model(**inputs).logits
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    ours = Head(model)(model.base_model(**inputs).last_hidden_state)
    if len(masks.asked) != 2 * layers:
        raise MarsError(f"{type(model).__name__} cannot be trained: not all of its layers use the attention interface")
    if not torch.allclose(ours, logits.float(), rtol=1e-2, atol=1e-2):
        raise MarsError(f"{type(model).__name__} cannot be trained: it makes its logits in a way we do not know")
    return tuple(dict.fromkeys(masks.asked))


class _Recorder(dict[int | None, Tensor]):
    """Masks on demand, with a list of the sliding windows that were asked for."""

    def __init__(self, visibility: Visibility) -> None:
        self._visibility = visibility
        self.asked: list[int | None] = []

    def __getitem__(self, sliding: int | None) -> Tensor:
        self.asked.append(sliding)
        return visibility_table(self._visibility, self._visibility, sliding)[:, None]
