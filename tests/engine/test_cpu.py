"""The compiled step on a CPU: against PyTorch, bit for bit in any windows, on other processors, without a compiler."""

from __future__ import annotations

import platform
import random
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import or_
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mars import Engine, MarsError, SamplingParams
from mars.core.request import Request
from mars.core.sequence import Sequence, StepResult
from mars.engine.cpu import CpuModel, CpuRunner, cpu_model, library
from mars.engine.cpu.model import PAGE, CpuCache, _of_rank
from mars.engine.cpu.weights import INT4, INT8, Matrix, quantise
from mars.engine.run import run
from mars.engine.step import StepInputs, StepOutputs
from mars.method.acceptance import Dial
from mars.method.lookup import MOST_DRAFTS
from mars.method.visibility import Visibility
from mars.method.windows import Window
from mars.models import Checkpoint
from mars.models.attention import own_attention
from mars.reference import Decoder
from tests.conftest import gated_checkpoint, tiny_checkpoint

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
FORMS = ["float32", "bfloat16", "int8"]
TEXT = [1, 5, 2, 9, 3, 3, 7, 0, 4, 8, 6, 1, 1, 2, 5, 9, 0, 3, 8, 4, 7]


def compiled(checkpoint: Checkpoint, form: str = "float32", pages: int = 32) -> CpuModel:
    model = CpuModel(checkpoint, form)  # type: ignore[arg-type]
    model.set_cache(CpuCache(model.shapes, pages))
    return model


def forward(model: CpuModel, windows: list[tuple[int, int, list[int]]], slots: int = 2) -> list[Tensor]:
    """Logits of chunks of text, each given by slot, start and tokens, all in one forward."""
    width = max(len(tokens) for _, _, tokens in windows)
    tokens = torch.tensor([[*each, *[-1] * (width - len(each))] for _, _, each in windows])
    columns = torch.arange(width).expand(len(windows), -1).contiguous()
    none = torch.zeros_like(columns)
    pages = torch.arange(1, 1 + 8 * slots).view(slots, 8)
    at = torch.tensor([slot for slot, _, _ in windows]), torch.tensor([start for _, start, _ in windows])
    logits = model.forward(tokens, Visibility(none, none, columns, columns), *at, pages).clone()
    return [rows[: len(each)] for rows, (_, _, each) in zip(logits.view(len(windows), width, -1), windows, strict=True)]


def expected(checkpoint: Checkpoint, tokens: list[int]) -> Tensor:
    with torch.inference_mode(), own_attention(checkpoint.module) as module:
        return module(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_gated", [False, True])
def test_logits_are_those_of_transformers(family: str, is_gated: bool) -> None:
    """With masks at the end: a gated adapter acts there, and nowhere else."""
    checkpoint = gated_checkpoint(family) if is_gated else tiny_checkpoint(family)
    tokens = [*TEXT, checkpoint.mask_token_id or 0, checkpoint.mask_token_id or 0]
    logits = expected(checkpoint, tokens)
    torch.testing.assert_close(forward(compiled(checkpoint), [(0, 0, tokens)])[0], logits, atol=2e-4, rtol=1e-4)
    for form, text, masks in (("bfloat16", 0.05, 0.1), ("int8", 0.1, 0.6 if is_gated else 0.1)):  # adapters have 4 bits
        found = forward(compiled(checkpoint, form), [(0, 0, tokens)])[0]
        for part, most in ((slice(len(TEXT)), text), (slice(len(TEXT), None), masks)):
            assert (found - logits)[part].norm() < most * logits[part].norm(), form


def test_heads_of_other_sizes_biases_and_untied_embeddings() -> None:
    odd = {"hidden_size": 42, "head_dim": 12, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 37}
    checkpoint = tiny_checkpoint("llama", intermediate_size=72, attention_bias=True, mlp_bias=True, **odd)
    assert checkpoint.module.lm_head.weight is not checkpoint.module.get_input_embeddings().weight
    for parameter in checkpoint.module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    logits = expected(checkpoint, TEXT)
    torch.testing.assert_close(forward(compiled(checkpoint), [(0, 0, TEXT)])[0], logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_bits_do_not_depend_on_windows_neighbours_or_threads(form: str, data: st.DataObject) -> None:
    """A text read in any chunks, beside another one, by one thread or two."""
    model = MODELS.setdefault(form, compiled(gated_checkpoint("qwen3"), form))
    whole = forward(model, [(0, 0, TEXT)])[0]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(TEXT) - 1), max_size=6)))
    chunks = [(a, TEXT[a:b]) for a, b in zip([0, *cuts], [*cuts, len(TEXT)], strict=True)]
    neighbour = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=20))
    threads = torch.get_num_threads()
    found = []
    try:
        for start, chunk in chunks:
            torch.set_num_threads(data.draw(st.sampled_from([1, 2])))
            windows = [(1, 0, neighbour), (0, start, chunk)] if data.draw(st.booleans()) else [(0, start, chunk)]
            found.append(forward(model, windows)[-1])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat(found), whole)


MODELS: dict[str, CpuModel] = {}


@pytest.mark.parametrize("kind", ["merged", "gated"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_step_in_one_call_decides_what_pytorch_decides(kind: str, data: st.DataObject) -> None:
    """Windows, what is accepted and predicted, and the state after it: of any state, in any windows."""
    checkpoint = gated_checkpoint("llama") if kind == "gated" else tiny_checkpoint("llama")
    engine = Engine(checkpoint, memory=2**20, block_size=4)
    runner, state = engine._runner, engine._state
    assert isinstance(runner, CpuRunner)
    count = data.draw(st.integers(1, 3))
    token, slots = st.integers(0, checkpoint.vocabulary - 1), list(range(1, count + 1))
    state.page_table[:, :4] = torch.arange(len(state.page_table) * 4).view(-1, 4) % 60
    texts = data.draw(st.lists(st.lists(token, min_size=2, max_size=20), min_size=count, max_size=count))
    runner.prefill([(slot, 0, text) for slot, text in zip(slots, texts, strict=True)])
    drafts = data.draw(st.lists(st.lists(token, max_size=MOST_DRAFTS), min_size=count, max_size=count))
    emitted = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    masks = st.tuples(st.integers(1, 4), st.integers(1, 3)) | st.just((0, 0))
    windows = [Window(len(each), *data.draw(masks)) for each in drafts]
    sequences = [Sequence.of(Request(prompt=text, dial=Dial("exact"), block_size=4), checkpoint) for text in texts]
    for sequence, slot in zip(sequences, slots, strict=True):
        sequence.slot = slot
    inputs = StepInputs.of(sequences, windows, checkpoint.vocabulary).feeding(windows)
    window = reduce(or_, windows)
    window = replace(window, groups=min(window.groups, data.draw(st.integers(1, 4))))  # sequences may ask for more

    def outcome(step: Callable[..., StepOutputs]) -> tuple[list[StepResult], list[Tensor]]:
        state.put([(s, len(t), t[-1], d, e) for s, t, d, e in zip(slots, texts, drafts, emitted, strict=True)])
        results = step(inputs, window, 64).results([False] * count)
        after = [state.cursor, state.last, state.draft_count, state.drafts_emitted]
        kept = [state.drafts[slot, : state.draft_count[slot]] for slot in slots]
        return results, [each[slots].clone() for each in after] + [each.clone() for each in kept]

    (found, found_state), (wanted, wanted_state) = outcome(runner.step), outcome(super(CpuRunner, runner).step)
    assert found == wanted
    assert all(map(torch.equal, found_state, wanted_state))


def test_the_nearest_change_of_a_smaller_rank() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(8, 20), torch.randn(30, 8)
    u, sizes, v = torch.linalg.svd(b @ a, full_matrices=False)
    first, second = _of_rank(3, a, b)
    assert first.shape == (3, 20) and second.shape == (30, 3)
    torch.testing.assert_close(second @ first, u[:, :3] * sizes[:3] @ v[:3], atol=1e-4, rtol=1e-4)
    assert all(map(torch.equal, _of_rank(8, a, b), (a, b)))


def answers(checkpoint: Checkpoint, requests: list[Request], **options: object) -> list[list[int]]:
    engine = Engine(checkpoint, candidates=5, **options)  # type: ignore[arg-type]
    assert isinstance(engine._runner, CpuRunner)
    outputs = dict(run(engine, requests))
    engine.check()
    return [outputs[number].token_ids for number in range(len(requests))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["merged", "gated"])
def test_exact_writes_what_one_token_alone_writes_at_any_load(form: str, kind: str) -> None:
    """Greedy and sampled; chain, tree and what the policy chooses; prompts in chunks; pages that run out."""
    plain = (gated_checkpoint if kind == "gated" else tiny_checkpoint)("llama")
    module = plain.module.to(torch.bfloat16) if form == "bfloat16" else plain.module
    if plain.adapter is not None and form == "bfloat16":
        plain.adapter.to(torch.bfloat16)
    checkpoint = replace(plain, module=module, is_int8=form == "int8")
    draw = random.Random(0)
    sampling = [SamplingParams(), SamplingParams(temperature=0.8, seed=5), SamplingParams(repetition_penalty=1.3)]
    requests = [
        Request(
            prompt=[draw.randrange(10) for _ in range(draw.randrange(1, 40))],
            dial=Dial.parse("exact"),
            sampling=sampling[number % 3],
            max_new_tokens=40,
            block_size=4,
            window=(None, Window.of(1, 4), Window.of(4, 4), Window.of(4, 4, 5))[number // 3 % 4],
            lookup=(None, 6, MOST_DRAFTS, 0)[number % 4],
        )
        for number in range(24)
    ]
    alone = [answers(checkpoint, [replace(each, dial=Dial.parse("one-token"))], max_num_seqs=1)[0] for each in requests]
    tight = 20 * PAGE * 8 * 2 * 3 * 2 * 4
    for options in ({"max_num_seqs": 24}, {"max_num_seqs": 5, "prefill_tokens": 7}, {"memory": tight}):
        for cost in (None, lambda count, window: 1.0):  # windows that pay, and what is measured
            assert answers(checkpoint, requests, cost=cost, **options) == alone, options


@pytest.mark.parametrize("window", [1, 2, 4])
def test_looking_up_takes_as_many_forwards_as_in_the_plain_decoder(window: int) -> None:
    """So the drafts are the same ones; several requests at once, some of which look nothing up."""
    checkpoint, draw = gated_checkpoint("llama"), random.Random(window)
    requests = [
        Request(
            prompt=[draw.randrange(10) for _ in range(draw.randrange(1, 30))],
            dial=Dial("exact"),
            max_new_tokens=60,
            ignore_end=True,
            block_size=4,
            window=Window.of(window, 4),
            lookup=lookup,
        )
        for lookup in (0, 2, 7, MOST_DRAFTS, MOST_DRAFTS)
    ]
    engine = Engine(checkpoint, max_num_seqs=3)
    outputs, plain = dict(run(engine, requests)), Decoder(checkpoint, requests).finish()
    assert [outputs[number].token_ids for number in range(5)] == [answer.token_ids for answer in plain]
    assert [outputs[number].forwards for number in range(5)] == [answer.forwards for answer in plain]
    assert plain[4].forwards < 55, "nothing was found: a weak test"


@settings(max_examples=20, deadline=None)
@given(turns=st.lists(st.tuples(st.integers(1, 6), st.sampled_from(["one-token", "exact"])), max_size=6))
def test_turning_the_dial_leaves_the_text_and_the_state_as_they_are(turns: list[tuple[int, str]]) -> None:
    checkpoint = gated_checkpoint("llama")
    request = Request([1, 5, 2, 9], Dial("exact"), max_new_tokens=40, ignore_end=True, block_size=4)
    engine = Engine(checkpoint, memory=2**21, cost=lambda *_: 1.0)
    sequence = engine.add_request(request)
    for steps, dial in turns:
        for _ in range(steps):
            engine.step()
        sequence.set_dial(Dial.parse(dial))
    while not sequence.is_finished:
        engine.step()
    assert sequence.output.token_ids == answers(checkpoint, [replace(request, dial=Dial("one-token"))])[0]
    engine.check()


def test_only_the_compiled_step_looks_drafts_up() -> None:
    engine = Engine(tiny_checkpoint("gemma"))
    with pytest.raises(MarsError, match="compiled step"):
        engine.add_request(Request([1], Dial("exact"), block_size=4, lookup=3))
    for wrong in (-1, MOST_DRAFTS + 1, 1.5):
        with pytest.raises(MarsError, match="lookup"):
            Engine(tiny_checkpoint("llama")).add_request(Request([1], Dial("exact"), block_size=4, lookup=wrong))


def test_weights_of_four_bits_are_found_and_kept() -> None:
    torch.manual_seed(0)
    scale, minimum = (torch.rand(64, 2, 1).half().float() for _ in range(2))
    codes = torch.randint(0, 16, (64, 2, 32)).float()
    codes[:, :, 0], codes[:, :, 1] = 0, 15  # quantisers use all levels
    weight = (scale * codes + minimum).flatten(1)
    assert Matrix.of(weight, "int8").kind == INT4
    noisy = weight + 0.01 * torch.randn_like(weight)
    assert Matrix.of(noisy, "int8").kind == INT8 and Matrix.of(noisy, "int8", drafts=True).kind == INT4
    for levels in (15, 255):
        codes, scale, minimum = quantise(noisy.unflatten(1, (-1, 32)), levels)
        error = (scale.float() * codes + minimum.float() - noisy.unflatten(1, (-1, 32))).abs()
        assert (error <= 0.51 * scale.float() + 1e-3).all()


X86 = ["-march=x86-64", "-march=x86-64-v3", "-march=x86-64-v4"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of another processor")
@pytest.mark.parametrize("flag", X86)
def test_other_instruction_sets(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SSE2, AVX2, and AVX-512 without what multiplies bytes or bfloat16: right answers, if other last bits."""
    if flag != X86[0] and not (torch.cpu._is_avx512_supported() if flag == X86[2] else torch.cpu._is_avx2_supported()):
        pytest.skip("not on this processor")
    checkpoint = gated_checkpoint("llama")
    tokens = [*TEXT, checkpoint.mask_token_id or 0]
    native = {form: forward(compiled(checkpoint, form), [(0, 0, tokens)])[0] for form in FORMS}
    monkeypatch.setenv("MARS_CPU_FLAGS", flag)
    for form, closeness in (("float32", 2e-5), ("bfloat16", 0.05), ("int8", 0.05)):
        model = compiled(checkpoint, form)
        found = forward(model, [(0, 0, tokens)])[0]
        assert (found - native[form]).norm() < closeness * native[form].norm(), form
        one_by_one = [forward(model, [(0, at, [token])])[0] for at, token in enumerate(tokens)]
        assert torch.equal(torch.cat(one_by_one), found), form


def test_without_a_compiler_pytorch_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = tiny_checkpoint("llama")
    request = Request(prompt=[1, 2, 3], dial=Dial.parse("exact"), max_new_tokens=12, block_size=4)
    known = answers(checkpoint, [request])
    monkeypatch.setenv("MARS_HOME", str(tmp_path))
    monkeypatch.setenv("MARS_CPU_FLAGS", "-O1")
    for path, says in (("", "no C compiler was found: install gcc or clang"), ("/bin:/usr/bin", "false failed")):
        monkeypatch.setenv("PATH", path)
        monkeypatch.setenv("CC", "false")
        assert cpu_model(checkpoint, PAGE) is None
        assert says in caplog.text and "decoding through PyTorch instead, in float32" in caplog.text
    engine = Engine(checkpoint)
    assert not isinstance(engine._runner, CpuRunner)
    assert dict(run(engine, [request]))[0].token_ids == known[0]
    assert not list(tmp_path.rglob("*.so"))


def test_the_compiled_library_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARS_HOME", str(tmp_path))
    library.load_library.__wrapped__(("-O1",))
    (made,) = tmp_path.rglob("*.so")
    changed = made.stat().st_mtime_ns
    library.load_library.__wrapped__(("-O1",))
    assert made.stat().st_mtime_ns == changed and [path.name for path in made.parent.iterdir()] == [made.name]
    monkeypatch.setattr(library, "SOURCE", tmp_path / "broken.c")
    (tmp_path / "broken.c").write_text("int mars_step(void) { return }")
    with pytest.raises(MarsError, match="error: expected expression"):
        library.load_library.__wrapped__(("-O1",))


@pytest.mark.parametrize("family", ["gemma", "phi", "gpt2", "qwen3_moe"])
def test_other_families_run_through_pytorch(family: str) -> None:
    assert cpu_model(tiny_checkpoint(family), PAGE) is None
