"""The file that ships with a checkpoint decodes in plain transformers what the package's own decoder decodes."""

from __future__ import annotations

import gc
import importlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chi2, chi2_contingency
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    dynamic_module_utils,
    pipeline,
)
from transformers.generation import BaseStreamer

import mars
from mars.integrations.transformers.bundle import ship
from mars.method.sampling import SamplingParams, SamplingTensors
from mars.models import Checkpoint, Settings
from mars.models.attention import own_attention
from mars.models.builtin import ADAPTER
from mars.models.saving import save_checkpoint
from mars.reference import Decoder
from tests.conftest import END, MASK, gated_checkpoint, tiny_checkpoint, tiny_tokenizer

FAMILIES = ["llama", "qwen2", "gemma2", "mistral"]
NEW_TOKENS = 18


def prompts(rows: int = 5, longest: int = 20) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(10) for _ in range(rng.randint(1, longest))] for _ in range(rows)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from a second thread, and lose much where it has to wait for a busy core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def module_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where transformers keeps its copy of the shipped file: by default in the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", [*sys.path])
        yield


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, mars.Model]]:
    """A checkpoint folder with the file in it, and the same model in the package's hands."""
    home = tmp_path_factory.mktemp("checkpoints")

    @cache
    def build(family: str) -> tuple[Path, mars.Model]:
        folder, checkpoint = home / family, tiny_checkpoint(family)
        save_checkpoint(checkpoint, folder)
        ship(folder)
        return folder, mars.Model(checkpoint)

    return build


def load(folder: Path, **options: Any) -> PreTrainedModel:
    if folder.name.startswith(
        "gemma2"
    ):  # older versions of transformers leave out its softcap with their default attention
        options["attn_implementation"] = "eager"
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32", **options)


def answer(model: PreTrainedModel, folder: Path, prompt: list[int], **options: Any) -> list[int]:
    """The new tokens that the shipped file writes. A model that was loaded with it is faster: it reads it once."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | options
    if "generate" not in vars(model):
        options |= {"custom_generate": str(folder), "trust_remote_code": True}
    out = model.generate(torch.tensor([prompt]), **options)
    assert out[0, : len(prompt)].tolist() == prompt
    return out[0, len(prompt) :].tolist()


def plain(model: PreTrainedModel, prompt: list[int], **options: Any) -> list[int]:
    """The new tokens that transformers itself writes; it does not know that the mask is no word."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "suppress_tokens": [MASK]} | options
    out = type(model).generate(model, ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_is_transformers_greedy(family: str, shipped) -> None:
    folder, _ = shipped(family)
    model = load(folder)
    several = 0
    for prompt in prompts():
        expected = plain(model, prompt)
        assert answer(model, folder, prompt, dial="one-token") == expected
        assert model.mars_statistics["tokens_per_forward"] == 1
        assert answer(model, folder, prompt) == expected, "exact is the checkpoint's own dial"
        assert model.mars_statistics["tokens"] == len(expected)
        several += len(expected) - model.mars_statistics["forwards"]
    assert several > 0, "no draft was ever accepted: a weak test"


@pytest.mark.parametrize("dial", ["relaxed=0.2", "threshold=0.7", "threshold=0", "threshold:entropy=0.5"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_dial_is_the_packages_own(family: str, dial: str, shipped) -> None:
    folder, own = shipped(family)
    model = load(folder)
    for prompt, expected in zip(prompts(), own.generate(prompts(), dial=dial, max_new_tokens=NEW_TOKENS), strict=True):
        assert answer(model, folder, prompt, dial=dial) == expected.token_ids
        assert model.mars_statistics["forwards"] == expected.forwards


@pytest.mark.parametrize("dial", ["one-token", "exact", "relaxed=0.3", "threshold=0.6"])
def test_repetition_penalty_is_the_packages_own(dial: str, shipped) -> None:
    folder, own = shipped("llama")
    model = load(folder)
    options = {"dial": dial, "max_new_tokens": NEW_TOKENS, "repetition_penalty": 1.7}
    words = [[word] for word in range(6)]  # short prompts: what a run repeats is mostly its own
    written = [answer(model, folder, prompt, **options) for prompt in words]
    assert written == [each.token_ids for each in own.generate(words, **options)]
    assert written != [answer(model, folder, prompt, dial=dial) for prompt in words], "nothing was penalised"


def test_a_padded_batch_is_its_rows_one_by_one(shipped) -> None:
    folder, _ = shipped("mistral")
    model, rows = load(folder), prompts()
    width = max(map(len, rows))
    ids = torch.tensor([[END] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    for dial in ("exact", "threshold=0.5"):
        alone = [answer(model, folder, row, dial=dial) for row in rows]
        lengths = {len(row) for row in alone}
        assert len(lengths) > 1, "all answers are equally long: a weak test"
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            custom_generate=str(folder),
            trust_remote_code=True,
            dial=dial,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=3,
        )
        assert out[:, :width].equal(ids)
        assert out[:, width:].tolist() == [row + [3] * (max(lengths) - len(row)) for row in alone]


def test_padding_without_an_attention_mask_is_known_by_its_token(shipped) -> None:
    folder, _ = shipped("llama")
    model, prompt = load(folder), [1, 2, 3, 4]
    expected = answer(model, folder, prompt)
    assert answer(model, folder, [9, 9, *prompt], pad_token_id=9) == expected
    assert answer(model, folder, [9, 9, *prompt], pad_token_id=END) != expected


def test_lengths_are_exact(shipped) -> None:
    folder, _ = shipped("llama")
    model, prompt = load(folder), prompts()[0]
    for dial in ("exact", "threshold=0"):
        whole = answer(model, folder, prompt, dial=dial, eos_token_id=None)
        assert len(whole) == NEW_TOKENS
        for limit in range(1, 7):
            short = answer(model, folder, prompt, dial=dial, eos_token_id=None, max_new_tokens=limit)
            assert short == whole[:limit]
            total = {"max_new_tokens": None, "max_length": len(prompt) + limit}
            assert answer(model, folder, prompt, dial=dial, eos_token_id=None, **total) == short
    assert len(answer(model, folder, prompt, eos_token_id=None, max_new_tokens=None)) == 20, "transformers' default"


def test_an_end_token_inside_a_run_cuts_exactly(shipped) -> None:
    folder, _ = shipped("llama")
    model, prompt = load(folder), prompts()[0]
    for dial in ("exact", "threshold=0"):
        whole = answer(model, folder, prompt, dial=dial, eos_token_id=None)
        for end in set(whole):
            cut = whole[: whole.index(end) + 1]
            assert answer(model, folder, prompt, dial=dial, eos_token_id=end) == cut
            assert answer(model, folder, prompt, dial=dial, eos_token_id=[MASK, end]) == cut


class Listener(BaseStreamer):
    def __init__(self) -> None:
        self.heard: list[list[int]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.heard.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_hears_the_prompt_and_then_each_run(shipped) -> None:
    folder, _ = shipped("llama")
    model, prompt, listener = load(folder), prompts()[0], Listener()
    written = answer(model, folder, prompt, dial="threshold=0.3", streamer=listener)
    assert listener.heard[0] == prompt
    assert [token for run in listener.heard[1:] for token in run] == written
    assert len(listener.heard) - 1 == model.mars_statistics["forwards"] < len(written)
    assert listener.ended


def test_a_trusted_checkpoint_generates_by_itself(shipped) -> None:
    folder, _ = shipped("llama")
    model, prompt = load(folder, trust_remote_code=True), prompts()[0]
    ids, expected = torch.tensor([prompt]), plain(load(folder), prompt)
    options = {"dial": "exact", "max_new_tokens": NEW_TOKENS}
    for out in (
        model.generate(ids, **options),
        model.generate(inputs=ids, **options),
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options),
        model.generate(ids, GenerationConfig(max_new_tokens=NEW_TOKENS)),
    ):
        assert out[0].tolist() == prompt + expected
    assert model.mars_statistics["tokens"] == len(expected)
    assert plain(model, prompt) == expected, "transformers' own is still there"


def test_a_pipeline_follows_the_dial(shipped) -> None:
    folder, own = shipped("llama")
    write = pipeline("text-generation", str(folder), trust_remote_code=True, dtype="float32", device="cpu")
    text = write("b", dial="threshold=0.3", max_new_tokens=NEW_TOKENS, do_sample=False, return_full_text=False)
    assert text[0]["generated_text"] == own.generate([1], dial="threshold=0.3", max_new_tokens=NEW_TOKENS).text


@pytest.mark.parametrize(
    "option",
    [
        {"num_beams": 2},
        {"num_return_sequences": 2},
        {"return_dict_in_generate": True},
        {"stop_strings": ["a"]},
        {"logits_processor": [print]},
        {"typical_p": 0.9},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 1},
        {"guidance_scale": 2.0},
        {"inputs_embeds": torch.ones(1, 1, 32)},
        {"cache_implementation": "static"},
        {"temprature": 0.5},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_is_not_supported_is_refused_by_name(option: dict[str, Any], shipped) -> None:
    folder, _ = shipped("llama")
    with pytest.raises(ValueError, match=next(iter(option))):
        answer(load(folder), folder, [1, 2], **option)


def test_options_that_are_off_are_no_reason_to_refuse(shipped) -> None:
    folder, _ = shipped("llama")
    off = {"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "output_scores": False, "logits_processor": []}
    model = load(folder)
    assert answer(model, folder, [1, 2], cache_implementation="hybrid", **off) == plain(model, [1, 2])


@pytest.mark.parametrize(
    ("dial", "complaint"),
    [
        ("fast", "unknown dial 'fast'"),
        ("exact=1", "takes no value"),
        ("relaxed", "needs a value"),
        ("relaxed=0", "out of range"),
        ("relaxed=x", "not a number"),
        ("threshold=1.1", "out of range"),
        ("threshold:luck=0.9", "unknown dial"),
    ],
)
def test_a_wrong_dial_is_refused(dial: str, complaint: str, shipped) -> None:
    folder, _ = shipped("llama")
    with pytest.raises(ValueError, match=complaint):
        answer(load(folder), folder, [1, 2], dial=dial)


def test_prompts_that_make_no_sense_are_refused(shipped) -> None:
    folder, _ = shipped("llama")
    model = load(folder, trust_remote_code=True)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for mask in ([[1, 1, 1], [1, 1, 0]], [[1, 1, 1], [1, 0, 1]], [[1, 1, 1], [0, 0, 0]], [[1, 1], [1, 1]]):
        with pytest.raises(ValueError, match="attention_mask"):
            model.generate(ids, attention_mask=torch.tensor(mask))
    for given in ({}, {"inputs": ids, "input_ids": ids}, {"inputs": ids[0]}, {"inputs": ids[:, :0]}):
        with pytest.raises(ValueError, match="prompts"):
            model.generate(**given)
    with pytest.raises(ValueError, match="no room"):
        model.generate(ids, max_length=3)
    with pytest.raises(ValueError, match="streamer"):
        model.generate(ids, streamer=Listener())


def test_a_checkpoint_without_settings_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint("llama").module.save_pretrained(tmp_path)
    ship(tmp_path)
    with pytest.raises(ValueError, match="no MARS settings"):
        answer(load(tmp_path), tmp_path, [1, 2])


def test_it_runs_where_the_package_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / "never-loaded-before", tmp_path / "nor-this-one"]
    checkpoints = [tiny_checkpoint("llama"), gated_checkpoint("llama")]
    for folder, checkpoint in zip(folders, checkpoints, strict=True):
        save_checkpoint(checkpoint, folder, ship)
    expected = [mars.Model(each).generate([1, 2, 3], max_new_tokens=NEW_TOKENS).token_ids for each in checkpoints]
    for name in [name for name in sys.modules if name.partition(".")[0] == "mars"]:
        monkeypatch.setitem(sys.modules, name, None)  # makes every import of it fail
    with pytest.raises(ImportError):
        importlib.import_module("mars.method.acceptance")
    assert [answer(load(folder), folder, [1, 2, 3], dial="exact") for folder in folders] == expected


def test_the_built_in_model(smollm: mars.Model, shipped) -> None:
    """Its masks are trained. The base model was loaded from elsewhere, so the call names the adapter."""
    folder, _ = shipped("llama")
    base = mars.load("smollm2-135m-base", device="cpu", dtype="float32").checkpoint
    prompt = base.encode("Count from one to twenty.")
    call = {"max_new_tokens": 24, "adapter": str(ADAPTER)}
    bare = {"max_new_tokens": 24}
    trusting = smollm.generate(prompt, dial="threshold=0.5", max_new_tokens=24)
    with own_attention(base.module) as model:
        assert answer(model, folder, prompt, dial="exact", **call) == plain(model, prompt, **bare)
        assert model.mars_statistics["tokens_per_forward"] > 1.2
        assert answer(model, folder, prompt, dial="threshold=0.5", **call) == trusting.token_ids
        assert model.mars_statistics["forwards"] == trusting.forwards < trusting.num_tokens

        # The default top_k of transformers applies. One token at a time, equal seeds draw equal tokens.
        sampled = {"do_sample": True, "max_new_tokens": 8, "temperature": 2.5, "repetition_penalty": 1.2}
        torch.manual_seed(3)
        expected = plain(model, prompt, **bare | sampled)
        torch.manual_seed(3)
        assert answer(model, folder, prompt, dial="one-token", **call | sampled) == expected


# Gated adapters: the folder has the base model's files, and its generation config says nothing of MARS.


@pytest.fixture(scope="module")
def with_adapter(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    home = tmp_path_factory.mktemp("gated")

    @cache
    def build(family: str) -> Path:
        save_checkpoint(drafting(family), home / family, ship)
        return home / family

    return build


def drafting(family: str) -> Checkpoint:
    """Its Markov head drafts what follows the last token alone. In the model ``perfect`` that is all that counts."""
    checkpoint = gated_checkpoint("llama" if family == "perfect" else family, markov=12)
    module, adapter, head = checkpoint.module, checkpoint.adapter, checkpoint.head
    assert adapter is not None and head is not None
    with torch.no_grad(), adapter.nowhere():
        for layer in module.model.layers if family == "perfect" else ():
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        head.before.copy_(torch.eye(12))
        head.after.copy_(100 * module(torch.arange(12)[:, None]).logits[:, 0].T)
    return checkpoint


def base(model: PreTrainedModel, prompt: list[int], **options: Any) -> list[int]:
    """The new tokens of transformers and the base model alone: no token is suppressed."""
    return plain(model, prompt, suppress_tokens=None, **options)


def traces(model: PreTrainedModel) -> list[Any]:
    """Modules, bits of the weights, and hooks."""
    hooks = [(len(each._forward_hooks), len(each._forward_pre_hooks)) for each in model.modules()]
    return [*hooks, *((name, each.clone()) for name, each in model.state_dict().items())]


def same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(
        one[0] == other[0] and (torch.equal(one[1], other[1]) if isinstance(one[1], Tensor) else one == other)
        for one, other in zip(before, after, strict=True)
    )


@pytest.mark.parametrize("family", [*FAMILIES, "perfect"])
def test_exact_with_a_gated_adapter_is_the_base_model(family: str, with_adapter) -> None:
    folder = with_adapter(family)
    model = load(folder, trust_remote_code=True)
    before, tokens, forwards = traces(model), 0, 0
    assert not hasattr(model.generation_config, "mars")
    for prompt in prompts():
        expected = base(model, prompt)
        assert answer(model, folder, prompt, dial="one-token") == expected
        assert model.mars_statistics["tokens_per_forward"] == 1
        assert answer(model, folder, prompt) == expected, "exact is the adapter's own dial"
        tokens, forwards = tokens + len(expected), forwards + model.mars_statistics["forwards"]
    assert tokens / forwards > (2.5 if family == "perfect" else 1), "no draft was ever accepted: a weak test"
    assert same(before, traces(model))


@pytest.mark.parametrize("dial", ["relaxed=0.2", "threshold=0", "threshold=0.7"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_dial_with_a_gated_adapter_is_the_packages_own(family: str, dial: str, with_adapter) -> None:
    folder = with_adapter(family)
    model, own = load(folder, trust_remote_code=True), mars.load(folder, device="cpu", dtype="float32")
    for prompt, expected in zip(prompts(), own.generate(prompts(), dial=dial, max_new_tokens=NEW_TOKENS), strict=True):
        assert answer(model, folder, prompt, dial=dial) == expected.token_ids
        assert model.mars_statistics["forwards"] == expected.forwards


def test_a_trusted_gated_checkpoint_generates_by_itself(with_adapter) -> None:
    folder = with_adapter("perfect")
    model, prompt, listener = load(folder, trust_remote_code=True), [3, 1], Listener()
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None}
    expected = base(load(folder), prompt, **options)
    out = model.generate(torch.tensor([prompt]), dial="exact", streamer=listener, **options)
    assert out[0].tolist() == prompt + expected
    assert model.mars_statistics["tokens_per_forward"] == 3, "1, 4, 4, 4, 4, 1"
    assert len(listener.heard) - 1 == model.mars_statistics["forwards"]
    assert base(model, prompt, **options) == expected, "transformers' own is still there"


@pytest.mark.parametrize("family", ["llama", "perfect"])
def test_sampling_with_a_gated_adapter_repeats_with_a_seed(family: str, with_adapter) -> None:
    """The tokens are the base model's: torch gives every position the same noise as in transformers' own sampling."""
    folder = with_adapter(family)
    model, written = load(folder, trust_remote_code=True), list[list[int]]()
    options = {"do_sample": True, "temperature": 1.5, "eos_token_id": None}
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        written.append(answer(model, folder, [1, 2], **options))
        assert model.mars_statistics["tokens_per_forward"] > 1
        torch.manual_seed(seed)
        assert base(model, [1, 2], **options) == written[-1]
    assert written[0] == written[1] != written[2]


def test_a_base_from_elsewhere_names_the_adapter(with_adapter, tmp_path: Path) -> None:
    folder, alone, elsewhere = with_adapter("llama"), tmp_path / "adapter", tmp_path / "base"
    adapted = load(folder)
    adapted.save_pretrained(elsewhere)
    (alone / "mars").mkdir(parents=True)
    for file in (folder / "mars").iterdir():
        (alone / "mars" / file.name).write_bytes(file.read_bytes())
    model = load(elsewhere)
    with pytest.raises(ValueError, match=r"no MARS settings.*adapter"):
        answer(model, folder, [1, 2])
    for name in (str(alone), alone / "mars", str(folder)):
        assert answer(model, folder, [1, 2], adapter=name, dial="threshold=0") == answer(
            adapted, folder, [1, 2], dial="threshold=0"
        )
    with pytest.raises(ValueError, match="no gated adapter in"):
        answer(model, folder, [1, 2], adapter=str(elsewhere))
    with pytest.raises(ValueError, match="the weights of this one are others"):
        answer(load(with_adapter("qwen2")), folder, [1, 2], adapter=str(alone))


def test_the_adapter_is_read_once_and_kept_as_long_as_its_model(tmp_path: Path) -> None:
    save_checkpoint(gated_checkpoint("llama"), tmp_path / "model", ship)
    folder = tmp_path / "model"
    model = load(folder, trust_remote_code=True)
    expected = model.generate(torch.tensor([[1, 2]]), dial="threshold=0", max_new_tokens=9)
    (folder / "mars" / "adapter.safetensors").unlink()
    assert model.generate(torch.tensor([[1, 2]]), dial="threshold=0", max_new_tokens=9).equal(expected)
    kept = model.generate.func.__wrapped__.__globals__["_ADAPTERS"]
    assert model in kept
    count = len(kept)
    del model
    gc.collect()
    assert len(kept) == count - 1
    with pytest.raises(ValueError, match="no MARS settings"):
        load(folder, trust_remote_code=True).generate(torch.tensor([[1, 2]]))


def test_the_adapter_follows_the_dtype_of_its_model(with_adapter) -> None:
    folder = with_adapter("llama")
    model = load(folder)
    answer(model, folder, [1, 2])
    model.bfloat16()
    assert answer(model, folder, [1, 2]) == base(model, [1, 2])


def test_an_exception_leaves_the_model_as_it_was(with_adapter) -> None:
    class Broken(Listener):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.heard) > 2:
                raise OSError("the pipe is closed")

    folder = with_adapter("llama")
    model = load(folder)
    before, expected = traces(model), base(model, [1, 2])
    with pytest.raises(OSError, match="pipe"):
        answer(model, folder, [1, 2], streamer=Broken())
    with pytest.raises(ValueError, match="unknown dial"):
        answer(model, folder, [1, 2], dial="fast")
    assert same(before, traces(model))
    assert base(model, [1, 2]) == expected


# Sampling: a vocabulary so small that the distribution of whole answers can be known.

WORDS, LENGTH, ROWS = 4, 4, 800
PROMPT = [1, 0, 2]


@pytest.fixture(scope="module")
def gambler(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, mars.Model]:
    module = tiny_checkpoint("llama", seed=1, vocab_size=WORDS + 1, pad_token_id=None).module
    with torch.no_grad():  # soften the model: a sharp one has too few likely texts to tell distributions apart
        module.lm_head.weight.mul_(0.7)
    checkpoint = Checkpoint("gambler", module, tiny_tokenizer(), Settings(WORDS))
    folder = tmp_path_factory.mktemp("sampling") / "gambler"
    save_checkpoint(checkpoint, folder)
    ship(folder)
    return load(folder, trust_remote_code=True), mars.Model(checkpoint)


class Remembering:
    """The model, computing everything once: few words make few texts. Its cache holds the words themselves."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.generation_config = model, model.generation_config
        self.known: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, input_ids: Tensor, past_key_values: DynamicCache, logits_to_keep: int, **_: Any) -> Any:
        words = input_ids[:, None, :, None]
        text = tuple(past_key_values.update(words, words, 0)[0].flatten().tolist())
        if text not in self.known:
            self.known[text] = self.model(torch.tensor([text])).logits
        return SimpleNamespace(logits=self.known[text][:, -logits_to_keep:].clone())


def sample(model: PreTrainedModel, dial: str, **options: Any) -> Counter[tuple[int, ...]]:
    torch.manual_seed(0)
    generate = model.generate.func  # the shipped function, before it was given its model
    ids, gambler = torch.tensor([PROMPT] * ROWS), Remembering(model)
    out = generate(ids, model=gambler, dial=dial, do_sample=True, max_new_tokens=LENGTH, **options)
    assert gambler.mars_statistics["tokens_per_forward"] > 1.1 or dial == "one-token"
    return Counter(tuple(row) for row in out[:, len(PROMPT) :].tolist())


def ar_probabilities(model: PreTrainedModel, sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every text, from the plain model."""
    texts = list(product(range(WORDS), repeat=LENGTH))
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *text] for text in texts])).logits[:, len(PROMPT) - 1 : -1]
    batch = SamplingTensors.of([sampling] * len(texts), WORDS + 1, banned=WORDS)
    chosen = batch.scores(batch.adjust(logits)).softmax(2).gather(2, torch.tensor(texts)[:, :, None])[:, :, 0]
    return dict(zip(texts, chosen.double().prod(1).tolist(), strict=True))


@pytest.mark.parametrize(
    ("dial", "options"),
    [
        ("one-token", {"temperature": 1.5, "top_k": 3, "min_p": 0.2}),
        ("exact", {"temperature": 1.0}),
        ("exact", {"temperature": 1.5, "top_p": 0.8}),
    ],
)
def test_exact_samples_what_the_ar_model_samples(dial: str, options: dict[str, Any], gambler) -> None:
    model, _ = gambler
    counts = sample(model, dial, **options)
    expected = {text: p * ROWS for text, p in ar_probabilities(model, SamplingParams(**options)).items()}
    assert all(expected[text] > 0 for text in counts), "a text that the AR model never writes"
    common = [text for text, count in expected.items() if count >= 5]
    rest = ROWS - sum(expected[text] for text in common)
    statistic = sum((counts[text] - expected[text]) ** 2 / expected[text] for text in common)
    if rest > 5:
        statistic += (ROWS - sum(counts[text] for text in common) - rest) ** 2 / rest
    assert chi2.sf(statistic, len(common) - (rest <= 5)) > 1e-3


@pytest.mark.parametrize("dial", ["relaxed=0.02", "threshold=0.35"])
def test_other_dials_sample_what_the_package_samples(dial: str, gambler) -> None:
    model, own = gambler
    options = {"temperature": 1.3, "top_k": 2}
    counts = sample(model, dial, **options)
    requests = [own.request(PROMPT, dial=dial, max_new_tokens=LENGTH, seed=row, **options) for row in range(4 * ROWS)]
    expected = Counter(tuple(each.token_ids) for each in Decoder(own.checkpoint, requests).finish())
    common = [text for text, count in expected.items() if count >= 40]
    table = [
        [each[text] for text in common] + [each.total() - sum(each[text] for text in common)]
        for each in (counts, expected)
    ]
    assert chi2_contingency(table).pvalue > 1e-3
