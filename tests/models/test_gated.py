"""Gated adapters: the base model stays as it is, bit for bit, and adapters of other bases are refused."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import mars
from mars.method.markov import MarkovHead
from mars.models import Checkpoint, Settings, load_checkpoint, save_checkpoint
from mars.models.attention import own_attention
from mars.models.gated import samples
from tests.conftest import gated_checkpoint

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "phi3", "granite", "gpt_oss")


def logits(checkpoint: Checkpoint, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(), own_attention(checkpoint.module) as model:
        found: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
        return found


ON_A_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
ON_ANY_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
IN_BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@ON_ANY_DEVICE
@IN_BOTH
@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_computed_as_by_the_base_model(family: str, dtype: torch.dtype, device: str) -> None:
    checkpoint = gated_checkpoint(family, dtype)
    adapter = checkpoint.adapter.to(device)
    checkpoint.module.to(device)
    text = torch.randint(0, checkpoint.vocabulary, (2, 9), device=device)
    masks = torch.full((2, 3), adapter.mask_token, device=device)
    with_masks = torch.cat([text, masks], 1)
    alone, before = logits(checkpoint, text), logits(checkpoint, with_masks)
    for weight in adapter.parameters():
        weight.data += torch.randn_like(weight)
    after = logits(checkpoint, with_masks)
    clean = before[:, :9], after[:, :9]
    if (family, device) == ("gpt_oss", "cuda"):  # masks that choose other experts change how many tokens these compute
        torch.testing.assert_close(*clean)
    else:
        assert torch.equal(*clean), "the adapter's values change a clean logit"
    assert not torch.equal(before[:, 9:], after[:, 9:]), "the adapter has no effect"
    adapter.detach()
    assert torch.equal(logits(checkpoint, text), alone)


@ON_ANY_DEVICE
@IN_BOTH
def test_the_built_in_model_computes_text_as_its_base(dtype: torch.dtype, device: str) -> None:
    ours, base = (load_checkpoint(name, device=device, dtype=dtype) for name in ("smollm2-135m", "smollm2-135m-base"))
    tokens = torch.tensor([base.encode("Why is the sky blue?")], device=device)
    assert torch.equal(logits(ours, tokens), logits(base, tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_writes_the_base_models_text(family: str) -> None:
    """As transformers' own ``generate`` writes it; drafts are accepted and rejected on the way."""
    checkpoint = gated_checkpoint(family)
    model = mars.Model(checkpoint)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 1]]
    with checkpoint.adapter.nowhere(), own_attention(checkpoint.module) as base:
        ends = list(checkpoint.end_tokens)
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": ends}
        expected = [base.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts]
    for window in ("chain", "tree"):
        answers = model.generate(prompts, dial="exact", window=window, max_new_tokens=24)
        assert [each.token_ids for each in answers] == expected


def test_the_head_sees_the_token_before_each_mask() -> None:
    """Drafts are those of the logits plus the head's row for the token before, one after the other."""
    checkpoint = gated_checkpoint("llama")
    head = checkpoint.head
    assert isinstance(head, MarkovHead)
    text = torch.tensor([[1, 2, 3]])
    masks = torch.full((1, 3), checkpoint.mask_token_id)
    found = logits(checkpoint, torch.cat([text, masks], 1))[0, 2:]
    expected = [int(found[0].argmax())]
    for row in found[1:]:
        expected.append(int((row + head(torch.tensor(expected[-1]))).argmax()))
    answer = mars.Model(checkpoint).generate([1, 2, 3], dial="threshold=0", max_new_tokens=4, ignore_end=True)
    assert answer.token_ids == expected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(gated_checkpoint("llama"), tmp_path / "model")
    return tmp_path / "model"


def test_a_saved_checkpoint_is_the_base_model_to_others(folder: Path) -> None:
    loaded, text = load_checkpoint(folder, device="cpu", dtype="float32"), torch.tensor([[1, 2, 3, 4]])
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(plain(text).logits, logits(loaded, text))
    assert loaded.settings == Settings(12, 4)
    fed = torch.tensor([[1, 2, 3, 12, 12]])
    assert torch.allclose(logits(loaded, fed), logits(gated_checkpoint("llama"), fed), atol=0.2)


def test_base_and_adapter_apart(folder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "adapter"
    alone.mkdir()
    (folder / "mars").rename(alone / "mars")
    assert load_checkpoint(folder, device="cpu").settings is None
    together = load_checkpoint(folder, adapter=alone, device="cpu", dtype="bfloat16")
    assert together.adapter is not None and together.adapter.mask_row.dtype == torch.bfloat16


def test_adapters_of_other_models_are_refused(folder: Path, tmp_path: Path) -> None:
    for number, other in enumerate((gated_checkpoint("qwen2"), gated_checkpoint("llama"))):
        if number:
            other.module.get_input_embeddings().weight.data += 0.01
        save_checkpoint(Checkpoint("other", other.module, other.tokenizer), tmp_path / str(number))
        with pytest.raises(mars.MarsError, match=r"belongs to .*: the weights of this one are others"):
            load_checkpoint(tmp_path / str(number), adapter=folder, device="cpu")


def test_a_fingerprint_does_not_depend_on_pytorchs_defaults() -> None:
    module = gated_checkpoint("llama", hidden_size=576).module
    weight = module.model.layers[0].mlp.up_proj.weight
    expected, before = samples(weight), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert torch.equal(samples(weight), expected)
    finally:
        torch.set_default_dtype(before)


def test_damaged_files_are_named(folder: Path) -> None:
    weights = folder / "mars" / "adapter.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(mars.MarsError, match="damaged"):
        load_checkpoint(folder, device="cpu")
    (folder / "mars" / "config.json").write_text("{")
    with pytest.raises(mars.MarsError, match="damaged"):
        load_checkpoint(folder, device="cpu")
