"""The two-stream forward: who sees whom in a real model, and the losses against their plain definition."""

from __future__ import annotations

import copy
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars.errors import MarsError
from mars.method.streams import IGNORED, Pack, Streams, lay_out, next_tokens, random_anchors
from mars.method.visibility import PADDING, visibility_table
from mars.training import objective
from mars.training.attention import stream_masks
from mars.training.objective import Head, Objective, batch_tensors, examine
from mars.training.recipe import Loss
from tests.conftest import FAMILIES, MASK, VOCABULARY, tiny_checkpoint

LENGTH = 24
ROOT = Path(__file__).parents[2]


def packed(seed: int = 0) -> Pack:
    """Two rows of two chats and some padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(MASK, (2, LENGTH), generator=generator)
    documents = torch.tensor([[0] * 10 + [1] * 11 + [PADDING] * 3, [0] * 14 + [1] * 10])
    assistant = torch.tensor([[False] * 3 + [True] * 7 + [False] * 4 + [True] * 7 + [False] * 3] * 2)
    return Pack(tokens, documents, assistant)


def laid_out(seed: int = 0, groups: int = 6) -> Streams:
    pack = packed(seed)
    return lay_out(pack, random_anchors(pack, groups, torch.Generator().manual_seed(seed)), 3, MASK, groups * 3 + 1)


def model_of(family: str = "llama") -> PreTrainedModel:
    return tiny_checkpoint(family).module.eval()


def logits_of(model: PreTrainedModel, streams: Streams, *, flex: bool = False) -> Tensor:
    masks = stream_masks(streams.visibility, streams.visibility, examine(model), flex=flex)
    inputs = {"input_ids": streams.tokens, "position_ids": streams.positions, "use_cache": False}
    with torch.no_grad():
        return model(**inputs, stream_masks=masks).logits


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_position_depends_on_what_it_sees_and_on_nothing_else(family: str) -> None:
    """Change one token: bit for bit the same logits wherever it is out of sight, others wherever it is in sight."""
    model, streams = model_of(family), laid_out()
    before, layers = logits_of(model, streams), model.config.num_hidden_layers
    direct = (
        torch.stack([visibility_table(streams.visibility, streams.visibility, window) for window in examine(model)])
        .any(0)[0]
        .long()
    )
    reached = direct
    for _ in range(layers - 1):  # a sliding window reaches further with every layer
        reached = (reached @ direct).clamp(max=1)
    for column in range(streams.tokens.shape[1]):
        changed = streams._replace(tokens=streams.tokens.clone())
        changed.tokens[0, column] = (changed.tokens[0, column] + 1) % VOCABULARY
        same = (logits_of(model, changed) == before)[0].all(1)
        assert torch.equal(~same, reached[:, column].bool()), column
        assert torch.equal(logits_of(model, changed)[1], before[1])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral", "gpt_oss"])
def test_flex_and_dense_attention_agree(family: str) -> None:
    model, streams = model_of(family), laid_out()
    asked = streams.labels != IGNORED
    dense, flex = (logits_of(model, streams, flex=flex)[asked] for flex in (False, True))
    assert torch.allclose(dense, flex, atol=1e-4)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_mask_sees_what_a_decoding_window_shows_it(family: str) -> None:
    """The masked stream's logits are those of the plain model fed the text up to the anchor and then masks."""
    if family in ("gpt_oss", "qwen3_moe"):
        pytest.skip("experts route by position in the batch: rounding differs")
    checkpoint = tiny_checkpoint(family)
    model, pack = checkpoint.module, packed()
    streams = lay_out(pack, torch.tensor([[5, 16], [4, 19]]), 3, MASK)
    ours = logits_of(model, streams)
    model.set_attn_implementation("eager")
    for row, (first, second) in enumerate([(5, 16), (4, 19)]):
        for group, anchor in enumerate((first, second)):
            begin = int((pack.documents[row] == pack.documents[row, anchor]).nonzero()[0])
            text = [*pack.tokens[row, begin : anchor + 1].tolist(), MASK, MASK, MASK]
            with torch.no_grad():
                plain = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
            assert torch.allclose(ours[row, LENGTH + 3 * group : LENGTH + 3 * group + 3], plain[-3:], atol=2e-4)
            assert torch.allclose(ours[row, begin : anchor + 1], plain[:-3], atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_the_head_makes_the_models_own_logits(family: str) -> None:
    changes = {"logits_scaling": 3.0} if family == "granite" else {}
    model = tiny_checkpoint(family, **changes).module
    ids = torch.arange(8)[None]
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids).last_hidden_state
        assert torch.allclose(Head(model)(hidden), model(input_ids=ids).logits, atol=1e-5)


def test_a_head_we_do_not_know_is_refused() -> None:
    model = model_of("llama")
    plain = model.forward
    model.forward = lambda **inputs: type("Out", (), {"logits": plain(**inputs).logits * 2})()
    with pytest.raises(MarsError, match="logits"):
        examine(model)


def plain_terms(model: PreTrainedModel, base: PreTrainedModel, streams: Streams) -> dict[str, Tensor]:
    """The losses by their definition: whole logits, one row after the other."""
    rows = len(streams.tokens)
    masks = stream_masks(streams.visibility, streams.visibility, (None,), flex=False)
    inputs = {"input_ids": streams.tokens, "position_ids": streams.positions, "use_cache": False, "stream_masks": masks}
    log_q = model.lm_head(model.model(**inputs).last_hidden_state).log_softmax(-1)
    log_base = base.lm_head(base.model(**inputs).last_hidden_state).log_softmax(-1).detach()
    totals = {name: torch.zeros(()) for name in ("clean", "base", "labels", "distill")}
    for row in range(rows):
        found: dict[str, list[Tensor]] = {name: [] for name in totals}
        for column, label in enumerate(streams.labels[row].tolist()):
            if label == IGNORED:
                continue
            here, place = log_q[row, column], int(streams.visibility.position[row, column])
            names, teacher = (
                (("clean", "base"), log_base[row, column])
                if column < LENGTH
                else (("labels", "distill"), log_q[row, place].detach())
            )
            found[names[0]].append(-here[label])
            found[names[1]].append((teacher.exp() * (teacher - here)).sum())
        for name, values in found.items():
            totals[name] = totals[name] + torch.stack(values).mean() / rows
    return totals


@pytest.mark.parametrize("chunk", [1, 7, 2048])
def test_chunked_losses_and_gradients_are_the_plain_ones(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "CHUNK", chunk)
    weights = Loss(clean=1.0, labels=0.3, distill=0.7, base=0.5)
    model, base, streams = model_of(), tiny_checkpoint("llama", seed=1).module, laid_out()
    examine(base)
    with Objective(weights, lambda: nullcontext(base)).installed(model):
        terms = model(**batch_tensors(streams, LENGTH))
        terms["loss"].backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    expected = plain_terms(model, base, streams)
    for name, value in expected.items():
        assert torch.allclose(terms[name], value, atol=1e-5), name
    sum(getattr(weights, name) * value for name, value in expected.items()).backward()
    for name, each in model.named_parameters():
        assert torch.allclose(gradients[name], each.grad, atol=1e-5), name


def test_the_teacher_is_not_taught() -> None:
    """Distillation from the clean stream moves the masks alone: with equal streams there is no gradient at all."""
    model, streams = model_of(), laid_out()
    frozen = copy.deepcopy(model)
    examine(frozen)
    with Objective(Loss(clean=0, labels=0, distill=1)).installed(model):
        model(**batch_tensors(streams, LENGTH))["loss"].backward()
    taught = model.model.embed_tokens.weight.grad.clone()
    plain = plain_terms(frozen, frozen, streams)["distill"]
    plain.backward()
    assert torch.allclose(taught, frozen.model.embed_tokens.weight.grad, atol=1e-6)


def test_masks_of_a_group_may_count_less_and_less() -> None:
    batch = batch_tensors(laid_out(), LENGTH, decay=0.5)
    streams = laid_out()
    offsets = streams.offsets.flatten()[batch["masks_at"]]
    real = batch["masks_weights"] > 0
    rows = batch["masks_at"] // streams.tokens.shape[1]
    for row in range(2):
        of_row = real & (rows == row)
        first = batch["masks_weights"][of_row & (offsets == 1)][0]
        assert torch.allclose(batch["masks_weights"][of_row], first * 0.5 ** (offsets[of_row] - 1))
        assert batch["masks_weights"][of_row].sum() == pytest.approx(1 / 2)


def test_without_masks_it_is_ordinary_fine_tuning() -> None:
    model, pack = model_of(), packed()
    streams = lay_out(pack, torch.empty(2, 0, dtype=torch.long), 1, MASK)
    assert torch.equal(streams.labels, next_tokens(pack))
    with Objective(Loss()).installed(model):
        terms = model(**batch_tensors(streams, LENGTH))
    assert set(terms) == {"loss", "clean"}
    assert terms["loss"].item() == pytest.approx(plain_clean_loss(model, streams), rel=1e-5)


def plain_clean_loss(model: PreTrainedModel, streams: Streams) -> float:
    logits = logits_of(model, streams)
    losses = [
        torch.nn.functional.cross_entropy(logits[row], streams.labels[row], ignore_index=IGNORED).item()
        for row in range(len(logits))
    ]
    return sum(losses) / len(losses)


def test_the_models_own_forward_comes_back() -> None:
    model = model_of()
    with Objective(Loss()).installed(model):
        assert "forward" in vars(model)
    assert "forward" not in vars(model)


def test_sharded_weights_give_the_same_loss_and_gradient() -> None:
    """FSDP2 over two processes, with the replaced forward and tied embeddings."""
    launcher = [
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        "tests.training.sharded_forward",
    ]
    done = subprocess.run(
        [sys.executable, "-m", *launcher], capture_output=True, text=True, check=False, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
