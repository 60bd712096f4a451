"""Products of gated layers: the kernels against plain PyTorch, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from mars.core.request import Request
from mars.engine import Engine, compilation, run
from mars.engine.compilation import Compiled
from mars.engine.packing import NUM_TEXT
from mars.engine.step import StepInputs, StepOutputs
from mars.method.acceptance import Dial
from mars.method.windows import Window
from mars.models.attention import own_attention
from mars.reference import Decoder
from tests.conftest import gated_checkpoint

pytest.importorskip("triton")
from mars.engine.kernels.products import TILES, expand, inputs_at_once, product

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHAIN, TREE = Window.of(1, 4), Window.of(4, 4)
CANDIDATES = Window.of(2, 4, 3)
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter's products know no bfloat16
TOLERANCE = {torch.float32: {"atol": 1e-4, "rtol": 1e-4}, HALF: {"atol": 0.05, "rtol": 0.02}}


def some_text(count: int) -> Tensor:
    return torch.full((1,), count, device=DEVICE)


def are_masks(tokens: int, text: int) -> Tensor:
    """(tokens, 1)"""
    return torch.arange(tokens, device=DEVICE)[:, None] >= text


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("text", "masks", "outputs", "inputs"),
    [(4, 3, 40, 64), (48, 36, 33, 72), (12, 36, 64, 24), (2, 14, 17, 130), (32, 0, 40, 64), (0, 9, 40, 64)],
)
def test_two_sets(text: int, masks: int, outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> None:
    x = normal(text + masks, inputs, dtype=dtype)
    weights = normal(2, outputs, inputs, dtype=dtype)
    added = normal(outputs, dtype=dtype) if bias else None
    first, second = (linear(x, each, added) for each in weights)
    expected = torch.where(are_masks(len(x), text), second, first)
    for tile in {None, *(tile for _, _, tile in TILES[:: 1 if DEVICE.type == "cuda" else 3])}:
        for num_text in (text, some_text(text)):  # known to the host, and to the device alone
            found = product(x, weights, added, num_text, tile=tile)
            torch.testing.assert_close(found, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("sizes", [[40], [64, 33], [48, 16, 17]])
@pytest.mark.parametrize(("text", "masks", "rank"), [(4, 3, 16), (12, 36, 20), (28, 21, 144), (16, 0, 16)])
def test_expand(text: int, masks: int, rank: int, sizes: list[int], dtype: torch.dtype) -> None:
    outputs = sum(sizes)
    y = normal(text + masks, outputs + len(sizes) * rank, dtype=dtype)
    b = normal(outputs, rank, dtype=dtype)
    projected = y[:, outputs:].split(rank, 1)
    changes = [linear(a.float(), each.float()) for a, each in zip(projected, b.split(sizes), strict=True)]
    expected = y.clone()
    changed = (y[:, :outputs].float() + torch.cat(changes, 1)).to(dtype)
    expected[:, :outputs] = torch.where(are_masks(len(y), text), changed, y[:, :outputs])
    for num_text in (text, some_text(text)):
        found = y.clone()
        expand(found, b, sizes, num_text)
        torch.testing.assert_close(found, expected, **TOLERANCE[dtype])
        assert torch.equal(found[:text], y[:text]), "the text's rows have changed"
        assert torch.equal(found[:, outputs:], y[:, outputs:])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("outputs", [96, 1088])
def test_a_row_does_not_depend_on_the_number_of_others(outputs: int, dtype: torch.dtype) -> None:
    inputs, counts = 192, (1, 2, 4, 5, 8, 9, 16, 32, 40) if DEVICE.type == "cuda" else (2, 9)
    weights, added = normal(2, outputs, inputs, dtype=dtype), normal(outputs, dtype=dtype)
    text, masks = normal(4 * max(counts), inputs, dtype=dtype), normal(12 * max(counts), inputs, dtype=dtype)
    tile = None if DEVICE.type == "cuda" else TILES[0][2]  # interpreted, other tiles are summed in another order
    texts = 4 * max(counts)
    most = product(torch.cat([text, masks]), weights, added, some_text(texts), tile=tile)
    for count, each in itertools.product(counts, (3, 12)):  # a chain's masks, or a tree's
        fed = torch.cat([text[: 4 * count], masks[: each * count]])
        found = product(fed, weights, added, some_text(4 * count), tile=tile)
        assert torch.equal(found[: 4 * count], most[: 4 * count])
        assert torch.equal(found[4 * count :], most[texts : texts + each * count])


def test_inputs_are_summed_at_so_many_at_once() -> None:
    assert [inputs_at_once(each, torch.bfloat16) for each in (576, 1536, 40)] == [64, 128, 64]
    assert inputs_at_once(1536, torch.float32) == 64


@pytest.mark.parametrize("most_bytes", [0, 2**30], ids=["low rank", "two sets"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3", "gpt_oss"])
def test_prepared_models_compute_what_hooks_do(family: str, most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a step feeds it: text, then masks. In steps without masks the bits are the base model's."""
    monkeypatch.setattr(compilation, "SECOND_SET_BYTES", most_bytes)
    checkpoint = gated_checkpoint(family)
    module, adapter = checkpoint.module.to(DEVICE), checkpoint.adapter.to(DEVICE)
    adapter.scale = 1.5
    text = torch.randint(0, checkpoint.vocabulary, (1, 3 * CHAIN.width), device=DEVICE)
    fed = torch.where(are_masks(3 * CHAIN.width, 12)[:, 0], checkpoint.mask_token_id, text)

    def logits(tokens: Tensor) -> Tensor:
        with torch.inference_mode(), own_attention(module) as model, torch.compiler.set_stance("force_eager"):
            found: Tensor = model(input_ids=tokens, use_cache=False).logits
            return found

    expected, base = logits(fed), logits(text)
    prepared = Compiled(module, adapter)
    assert torch.equal(logits(text), base)
    with prepared.applied(has_masks=False), adapter.nowhere():
        torch.testing.assert_close(logits(text), base, atol=1e-5, rtol=1e-5)
    for num_text in (12, some_text(12)):
        NUM_TEXT.set(num_text)
        with prepared.applied(has_masks=True):
            torch.testing.assert_close(logits(fed), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests of captured steps do this there")
@pytest.mark.parametrize("most_bytes", [0, 2**30], ids=["low rank", "two sets"])
def test_steps_of_a_prepared_model_write_what_the_plain_decoder_writes(
    most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dial `threshold` emits drafts unverified, so its text depends on them."""
    monkeypatch.setattr(compilation, "SECOND_SET_BYTES", most_bytes)
    checkpoint = gated_checkpoint("qwen2")
    engine = Engine(checkpoint, max_num_seqs=4, memory=2**22, candidates=3, cost=lambda _count, window: window.width)
    prepared, run_step = Compiled(checkpoint.module, checkpoint.adapter), engine._runner._run_step

    def captured(inputs: StepInputs, window: Window, longest: int | None = None) -> StepOutputs:
        with prepared.applied(has_masks=window.all_masks > 0), torch.compiler.set_stance("force_eager"):
            return run_step(inputs, window, longest)

    monkeypatch.setattr(engine._runner, "_run_step", captured)
    for dial, window in [("exact", CHAIN), ("exact", CANDIDATES), ("threshold=0.3", CHAIN), ("threshold=0", TREE)]:
        options = {"max_new_tokens": 5, "block_size": 4, "window": window}
        requests = [Request(prompt, Dial.parse(dial), **options) for prompt in ([1, 2, 3], [4, 5])]
        expected = [answer.token_ids for answer in Decoder(gated_checkpoint("qwen2"), requests).finish()]
        outputs = dict(run(engine, requests))
        assert [outputs[index].token_ids for index in range(len(requests))] == expected, (dial, window)
