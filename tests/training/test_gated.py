"""The loss of a gated adapter: the masks alone are trained, and the clean stream is the base model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars.method.streams import IGNORED, Streams, lay_out, random_anchors
from mars.method.visibility import Visibility
from mars.models.gated import GatedAdapter
from mars.training import objective
from mars.training.attention import stream_masks
from mars.training.gated import ATTRIBUTE
from mars.training.objective import Head, Objective, batch_tensors, examine
from mars.training.recipe import Loss
from mars.training.run import load_model
from tests.conftest import gated_checkpoint, tiny_checkpoint
from tests.training.conftest import small_recipe
from tests.training.test_objective import LENGTH, packed

FAMILIES = ["llama", "qwen3", "gemma2", "mistral", "phi3", "gpt_oss"]
LOSS = Loss(clean=0.0, labels=0.3, distill=0.7)


def streams_of(adapter: GatedAdapter, groups: int = 6) -> Streams:
    pack = packed()
    anchors = random_anchors(pack, groups, torch.Generator().manual_seed(0))
    return lay_out(pack, anchors, 3, adapter.mask_token, groups * 3 + 1)


def in_training(family: str, markov: int = 4) -> tuple[PreTrainedModel, GatedAdapter]:
    checkpoint = gated_checkpoint(family, markov=markov)
    assert checkpoint.adapter is not None
    checkpoint.adapter.scale = 0.5
    return checkpoint.module.requires_grad_(False), checkpoint.adapter.requires_grad_(True)


def joint_states(model: PreTrainedModel, streams: Streams) -> Tensor:
    """Both streams in one forward; the adapter sees by the ids which tokens are masks."""
    masks = stream_masks(streams.visibility, streams.visibility, examine(model), flex=False)
    inputs = {"input_ids": streams.tokens, "position_ids": streams.positions, "use_cache": False}
    states: Tensor = model.base_model(**inputs, stream_masks=masks).last_hidden_state
    return states


def plain_terms(model: PreTrainedModel, adapter: GatedAdapter, streams: Streams) -> dict[str, Tensor]:
    """The losses by their definition, mask by mask."""
    logits, rows = Head(model)(joint_states(model, streams)), len(streams.tokens)
    found: dict[str, list[list[Tensor]]] = {name: [[] for _ in range(rows)] for name in ("labels", "distill")}
    for row, column in (streams.labels[:, LENGTH:] != IGNORED).nonzero().tolist():
        mask, label = LENGTH + column, int(streams.labels[row, LENGTH + column])
        stands_for = int(streams.visibility.position[row, mask])
        changed = logits[row, mask]
        if adapter.head is not None:
            changed = changed + adapter.head(streams.tokens[row, stands_for])
        log_q, log_p = changed.log_softmax(-1), logits[row, stands_for].detach().log_softmax(-1)
        found["labels"][row].append(-log_q[label])
        found["distill"][row].append((log_p.exp() * (log_p - log_q)).sum())
    return {name: torch.stack([torch.stack(each).mean() for each in terms]).mean() for name, terms in found.items()}


def gradients(adapter: GatedAdapter) -> dict[str, Tensor]:
    made = {name: each.grad.clone() for name, each in adapter.named_parameters() if each.grad is not None}
    adapter.zero_grad()
    return made


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)


@pytest.mark.parametrize("markov", [0, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_passes_give_the_loss_and_gradient_of_one(family: str, markov: int) -> None:
    """The clean stream's keys and values, kept without a graph, are all that the masks need of it."""
    model, adapter = in_training(family, markov)
    streams = streams_of(adapter)
    expected = plain_terms(model, adapter, streams)
    (LOSS.labels * expected["labels"] + LOSS.distill * expected["distill"]).backward()
    theirs = gradients(adapter)
    assert theirs.keys() == dict(adapter.named_parameters()).keys()
    assert all(each.abs().max() > 1e-3 for each in theirs.values()), "a weak test"
    with Objective(LOSS, adapter=adapter).installed(model):
        terms = model(**batch_tensors(streams, LENGTH))
        terms["loss"].backward()
    assert terms.keys() == {"loss", "labels", "distill"}
    assert close({name: terms[name] for name in expected}, {name: each.detach() for name, each in expected.items()})
    assert close(gradients(adapter), theirs)


@pytest.mark.parametrize("how", ["chunks", "checkpointing"])
def test_saving_memory_changes_no_gradient(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradient checkpointing, layers are computed again when the forward is over: still as masks."""
    model, adapter = in_training("llama")
    streams, made = streams_of(adapter), list[dict[str, Tensor]]()
    for saving in (False, True):
        if saving and how == "chunks":
            monkeypatch.setattr(objective, "CHUNK", 5)
        elif saving:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with Objective(LOSS, adapter=adapter).installed(model):
            model.train()
            model(**batch_tensors(streams, LENGTH))["loss"].backward()
        made.append(gradients(adapter))
    assert close(*made)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_flex_attention_gives_the_dense_loss(family: str) -> None:
    model, adapter = in_training(family)
    batch, losses = batch_tensors(streams_of(adapter), LENGTH), list[dict[str, Tensor]]()
    for flex in (False, True):
        with torch.no_grad(), Objective(LOSS, flex=flex, adapter=adapter).installed(model):
            losses.append(model(**batch))
    assert close(*losses)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_clean_stream_is_the_base_models_bit_for_bit(family: str) -> None:
    model, adapter = in_training(family)
    streams, base = streams_of(adapter), tiny_checkpoint(family).module
    clean = Visibility(*(each[:, :LENGTH] for each in streams.visibility))
    inputs = {"input_ids": streams.tokens[:, :LENGTH], "position_ids": streams.positions[:, :LENGTH]}
    masks = stream_masks(clean, clean, examine(base), flex=False)
    expected = base.base_model(**inputs, use_cache=False, stream_masks=masks).last_hidden_state
    trained = Objective(LOSS, adapter=adapter)
    with trained.installed(model):
        found = trained.hidden(model, batch_tensors(streams, LENGTH))
    assert torch.equal(found.view(len(expected), -1, expected.shape[2])[:, :LENGTH], expected)
    assert found.requires_grad


def test_no_gradient_reaches_the_base_model(chat_model: Path, chats: Path, tmp_path: Path) -> None:
    made = load_model(small_recipe(chat_model, chats, tmp_path, lora={"r": 4}))
    model, adapter = made.language_model, made.adapter
    assert adapter is not None and adapter.mask_token == model.config.vocab_size
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with Objective(LOSS, adapter=adapter).installed(model):
        for step in range(2):  # in the first, ``b`` is zero and so is the gradient of ``a``
            model(**batch_tensors(streams_of(adapter), LENGTH))["loss"].backward()
            reached = {name for name, each in model.named_parameters() if each.grad is not None and each.grad.any()}
            torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.1).step()
            assert reached
            assert all(name.startswith(f"{ATTRIBUTE}.") for name in reached), step
    trained = {name for name, each in model.state_dict().items() if not torch.equal(each, before[name])}
    assert trained == {f"{ATTRIBUTE}.{name}" for name in adapter.state_dict()}
