"""Loading: every kind of name, settings that survive, adapters that merge, and models that are turned away."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import mars
from mars import MarsError, Settings
from mars.models import Checkpoint, save_checkpoint
from mars.models.settings import choose_mask_token
from mars.models.support import refuse_config
from tests.conftest import MASK, SMALL, tiny_checkpoint

PROMPT = [1, MASK, 3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    save_checkpoint(tiny_checkpoint("llama"), path)
    return path


def logits(module: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return module(torch.tensor([PROMPT])).logits


def test_save_and_load(folder: Path) -> None:
    model = mars.load(folder, dtype="float32")
    assert model.settings == Settings(MASK, 4, "exact")
    original = tiny_checkpoint("llama")
    assert torch.allclose(logits(model.checkpoint.module), logits(original.module), atol=1e-5)
    assert model.generate(PROMPT, max_new_tokens=9).dial == "exact"
    stored = json.loads((folder / "generation_config.json").read_text())
    assert stored["mars"] == {"mask_token_id": MASK, "block_size": 4, "dial": "exact"}
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    with pytest.raises(MarsError, match="exists already"):
        save_checkpoint(model.checkpoint, folder)


def test_a_saved_checkpoint_is_a_plain_one(folder: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.allclose(logits(plain), logits(tiny_checkpoint("llama").module), atol=1e-5)
    assert len(AutoTokenizer.from_pretrained(folder)) == len(tiny_checkpoint("llama").tokenizer)


def test_saving_a_loaded_model_and_failing_half_way_leaves_nothing(folder: Path, monkeypatch) -> None:
    checkpoint = mars.load(folder).checkpoint
    copy = folder.parent / "copy"
    save_checkpoint(checkpoint, copy)
    assert torch.equal(logits(mars.load(copy).checkpoint.module), logits(checkpoint.module))

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint.tokenizer, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(checkpoint, folder.parent / "half")
    assert sorted(path.name for path in folder.parent.iterdir()) == ["copy", "tiny"]


def test_without_settings_a_model_is_ar(folder: Path) -> None:
    config = folder / "generation_config.json"
    stored = json.loads(config.read_text())
    del stored["mars"]
    config.write_text(json.dumps(stored))
    model = mars.load(folder)
    assert model.settings is None
    assert model.generate(PROMPT, max_new_tokens=5).dial == "one-token"
    with pytest.raises(MarsError, match="mars train"):
        model.generate(PROMPT, dial="exact")


@pytest.mark.parametrize(
    "bad", [{"block_size": 4}, {"mask_token_id": 1, "block_size": 1}, {"mask_token_id": 1, "dial": "x"}]
)
def test_unusable_settings_are_named(folder: Path, bad: dict) -> None:
    config = folder / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mars": bad}))
    with pytest.raises(MarsError, match=r"generation_config\.json"):
        mars.load(folder)


def test_dtype_and_device(folder: Path) -> None:
    fast = "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"
    for dtype, form in ((None, fast), ("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "int8")):
        assert mars.load(folder, device="cpu", dtype=dtype).checkpoint.form == form
    with pytest.raises(MarsError, match="use float32, bfloat16, float16 or int8"):
        mars.load(folder, dtype="int4")


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "missing.gguf", "no-such/model-anywhere"])
def test_missing_models(name: str) -> None:
    with pytest.raises(MarsError, match=r"there is no|no model"):
        mars.load(name)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(MarsError, match="does not hold a usable model"):
        mars.load(tmp_path)


def test_truncated_weights_are_noticed(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(MarsError, match="does not hold a usable model"):
        mars.load(folder)


def test_missing_weights_are_noticed(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MarsError, match="1 weights are missing"):
        mars.load(folder)


def test_a_damaged_generation_config_is_noticed(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"mars": {')
    with pytest.raises(MarsError, match=r"generation_config\.json is damaged"):
        mars.load(folder)


def test_a_mask_token_outside_the_vocabulary(folder: Path) -> None:
    config = folder / "generation_config.json"
    config.write_text(config.read_text().replace(f'"mask_token_id": {MASK}', '"mask_token_id": 99'))
    with pytest.raises(MarsError, match="its mask token is 99"):
        mars.load(folder)


def test_home_is_spelled_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert mars.load("~/tiny").settings is not None
    with pytest.raises(MarsError, match="there is no folder"):
        mars.load("~/other")


# --- the mask token


def words(*specials: str, template: str | None = None, hole: int = 2) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": hole}, unk_token="a"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<end>",
        chat_template=template,
        additional_special_tokens=list(specials),
    )


@pytest.mark.parametrize(
    ("tokenizer", "rows", "expected"),
    [
        (words(), 8, 7),  # a spare row of the embedding
        (words("<|reserved_0|>", "<file>"), 5, 3),  # a special token that says it is spare
        (words("<file>", "<repo>"), 5, 4),  # any unused special token
        (words("<user>", "<repo>", template="{{'<repo>'}}"), 5, 3),  # but not one that the chat template uses
        (words(), 3, 3),  # a new row
        (words(hole=9), 10, 10),  # a vocabulary with holes: the last row is not spare
    ],
)
def test_choosing_a_mask_token(tokenizer, rows: int, expected: int) -> None:
    model = tiny_checkpoint("llama", vocab_size=rows, eos_token_id=2, pad_token_id=2).module
    assert choose_mask_token(model, tokenizer) == expected
    assert model.get_input_embeddings().num_embeddings == max(rows, expected + 1)


# --- adapters


def test_adapters_merge(folder: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig(r=4, target_modules="all-linear", trainable_token_indices=[MASK], init_lora_weights=False)
    adapted = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.add_(0.5)
    expected = logits(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    assert not torch.allclose(expected, logits(mars.load(folder, dtype="float32").checkpoint.module), atol=1e-2)
    for name, adapter in ((folder, tmp_path / "adapter"), (tmp_path / "adapter", None)):
        model = mars.load(name, adapter=adapter, dtype="float32")
        assert not isinstance(model.checkpoint.module, PeftModel)
        assert torch.allclose(logits(model.checkpoint.module), expected, atol=1e-4)
        assert model.settings == Settings(MASK, 4, "exact")


def test_an_adapter_may_bring_a_new_mask_row(tmp_path: Path) -> None:
    tokenizer = words()
    base = tiny_checkpoint("llama", vocab_size=3, eos_token_id=2, pad_token_id=2).module
    save_checkpoint(Checkpoint("base", base, tokenizer), tmp_path / "base")
    mask = choose_mask_token(base, tokenizer)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", trainable_token_indices=[mask]))
    adapted.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    Settings(mask).write(base.generation_config)
    base.generation_config.save_pretrained(tmp_path / "adapter")
    model = mars.load(tmp_path / "base", adapter=tmp_path / "adapter")
    assert (mask, model.checkpoint.vocabulary) == (3, 4)
    assert model.generate([0, 1], max_new_tokens=4).num_tokens > 0


def test_an_adapter_with_missing_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder)
    get_peft_model(base, LoraConfig(r=2, target_modules="all-linear")).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = load_file(path)
    save_file(dict(list(weights.items())[1:]), path)
    with pytest.raises(MarsError, match="missing adapter keys"):
        mars.load(folder, adapter=tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{")
    with pytest.raises(MarsError, match="does not say which model"):
        mars.load(tmp_path / "adapter")


def test_an_adapter_may_bring_the_settings(folder: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder)
    get_peft_model(base, LoraConfig(r=2, target_modules="all-linear")).save_pretrained(tmp_path / "adapter")
    Settings(MASK, 8, "threshold=0.9").write(base.generation_config)
    base.generation_config.save_pretrained(tmp_path / "adapter")
    assert mars.load(folder, adapter=tmp_path / "adapter").settings == Settings(MASK, 8, "threshold=0.9")


def test_adapters_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MarsError, match=r"adapter_config\.json"):
        mars.load(folder, adapter=tmp_path)
    other = tiny_checkpoint("llama", hidden_size=64).module
    get_peft_model(other, LoraConfig(r=2, target_modules="all-linear")).save_pretrained(tmp_path / "other")
    with pytest.raises(MarsError, match="does not fit"):
        mars.load(folder, adapter=tmp_path / "other")


# --- GGUF


def test_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    model = mars.load(path)
    assert model.settings is None
    assert not getattr(model.checkpoint.module, "is_quantized", False), "a trainer would refuse it"
    assert model.checkpoint.tokenizer.eos_token == "<end>"
    forever = {"max_new_tokens": 6, "logit_bias": {model.checkpoint.tokenizer.eos_token_id: -100.0}}
    answer = model.generate([0, 1, 2], **forever)
    assert answer.num_tokens == 6
    save_checkpoint(model.checkpoint, tmp_path / "plain")
    assert mars.load(tmp_path / "plain").generate([0, 1, 2], **forever).token_ids == answer.token_ids
    assert "GGUF" not in capsys.readouterr().err  # transformers' progress bar


def test_a_damaged_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF but not really")
    with pytest.raises(MarsError, match=r"could not be read as a GGUF model"):
        mars.load(path)


def write_gguf(path: Path) -> None:
    """A random Llama of two layers with a byte-level vocabulary."""
    hidden, inner, heads, layers = 32, 64, 4, 2
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)] + ["ab", "cd", "Ġ", "<end>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(letters))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(letters)
    writer.add_token_types([1] * (len(letters) - 1) + [3])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(len(letters) - 1)
    writer.add_eos_token_id(len(letters) - 1)
    rng = np.random.default_rng(0)

    def tensor(name: str, *shape: int) -> None:
        values = rng.normal(size=shape) * 0.3 if len(shape) > 1 else np.ones(shape)
        writer.add_tensor(name, values.astype(np.float32))

    tensor("token_embd.weight", len(letters), hidden)
    tensor("output.weight", len(letters), hidden)
    tensor("output_norm.weight", hidden)
    for layer in range(layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensor(f"blk.{layer}.{name}.weight", hidden, hidden)
        tensor(f"blk.{layer}.ffn_gate.weight", inner, hidden)
        tensor(f"blk.{layer}.ffn_up.weight", inner, hidden)
        tensor(f"blk.{layer}.ffn_down.weight", hidden, inner)
        tensor(f"blk.{layer}.attn_norm.weight", hidden)
        tensor(f"blk.{layer}.ffn_norm.weight", hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- refusals


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("t5", {}, "encoder-decoder"),
        ("mamba", {}, "recurrent"),
        ("rwkv", {}, "recurrent"),
        ("qwen3_next", {}, "rolled back"),
        ("lfm2", {}, "recurrent"),
        ("llama4_text", {}, "chunked"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        (
            "phi3",
            {
                "original_max_position_embeddings": 128,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [1.0] * 4,
                    "original_max_position_embeddings": 128,
                },
            },
            "longrope",
        ),
    ],
)
def test_models_that_cannot_work_are_refused_with_the_reason(family: str, options: dict, reason: str) -> None:
    base = {} if family in ("t5", "mamba", "rwkv", "qwen3_next", "lfm2", "llama4_text") else SMALL
    with pytest.raises(MarsError, match=reason):
        refuse_config(family, AutoConfig.for_model(family, **base | options))


def test_an_encoder_decoder_folder_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("t5", d_model=8, num_layers=1, vocab_size=16).save_pretrained(tmp_path)
    with pytest.raises(MarsError, match="encoder-decoder"):
        mars.load(tmp_path)


def test_chat_needs_a_template(folder: Path) -> None:
    checkpoint = mars.load(folder).checkpoint
    assert checkpoint.encode("abc")
    for attempt in ({"prompt": [{"role": "user", "content": "abc"}]}, {"prompt": "abc", "system": "be kind"}):
        with pytest.raises(MarsError, match="no chat template"):
            checkpoint.encode(**attempt)


def test_a_template_that_refuses(folder: Path) -> None:
    checkpoint = mars.load(folder).checkpoint
    checkpoint.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(MarsError, match="roles must alternate"):
        checkpoint.encode("abc")


def test_prompts(smollm) -> None:
    checkpoint: Checkpoint = smollm.checkpoint
    text = checkpoint.tokenizer.decode(checkpoint.encode("Hi!", system="Be brief."))
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    assert checkpoint.encode([5, 6]) == [5, 6]
    for empty in ("", "  \n", []):
        with pytest.raises(MarsError, match="empty"):
            checkpoint.encode(empty)
