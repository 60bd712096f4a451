"""Products of gated layers: the kernels against plain PyTorch, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from mars.core.request import Request
from mars.engine import Engine, compilation, run
from mars.engine.compilation import Compiled
from mars.engine.step import StepInputs, StepOutputs
from mars.method.acceptance import Dial
from mars.method.windows import Window
from mars.models.attention import own_attention
from mars.reference import Decoder
from tests.conftest import gated_checkpoint

pytest.importorskip("triton")
from mars.engine.kernels.products import TILES, expand, inputs_at_once, two_sets

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHAIN, TREE, MASKS_FIRST = Window.of(1, 4), Window.of(4, 4), Window(drafts=0, groups=1, masks=7)
CANDIDATES = Window.of(2, 4, 3)
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter's products know no bfloat16
TOLERANCE = {torch.float32: {"atol": 1e-4, "rtol": 1e-4}, HALF: {"atol": 0.05, "rtol": 0.02}}


def are_masks(window: Window, sequences: int) -> Tensor:
    """(tokens, 1)"""
    return (torch.arange(window.width, device=DEVICE) >= window.verified).repeat(sequences)[:, None]


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("window", "sequences", "outputs", "inputs"),
    [(CHAIN, 1, 40, 64), (CHAIN, 12, 33, 72), (TREE, 3, 64, 24), (MASKS_FIRST, 2, 17, 130)],
)
def test_two_sets(window: Window, sequences: int, outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> None:
    x = normal(sequences * window.width, inputs, dtype=dtype)
    weights = normal(2, outputs, inputs, dtype=dtype)
    added = normal(outputs, dtype=dtype) if bias else None
    first, second = (linear(x, each, added) for each in weights)
    expected = torch.where(are_masks(window, sequences), second, first)
    for tile in {None, *(tile for _, _, tile in TILES[:: 1 if DEVICE.type == "cuda" else 3])}:
        found = two_sets(x, weights, added, window, tile)
        torch.testing.assert_close(found, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("sizes", [[40], [64, 33], [48, 16, 17]])
@pytest.mark.parametrize(("window", "sequences", "rank"), [(CHAIN, 1, 16), (TREE, 3, 20), (CHAIN, 7, 144)])
def test_expand(window: Window, sequences: int, rank: int, sizes: list[int], dtype: torch.dtype) -> None:
    outputs = sum(sizes)
    y = normal(sequences * window.width, outputs + len(sizes) * rank, dtype=dtype)
    b = normal(outputs, rank, dtype=dtype)
    projected = y[:, outputs:].split(rank, 1)
    changes = [linear(a.float(), each.float()) for a, each in zip(projected, b.split(sizes), strict=True)]
    expected = y.clone()
    changed = (y[:, :outputs].float() + torch.cat(changes, 1)).to(dtype)
    expected[:, :outputs] = torch.where(are_masks(window, sequences), changed, y[:, :outputs])
    found = y.clone()
    expand(found, b, sizes, window)
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])
    text = ~are_masks(window, sequences)[:, 0]
    assert torch.equal(found[text], y[text]), "the text's rows have changed"
    assert torch.equal(found[:, outputs:], y[:, outputs:])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("outputs", [96, 1088])
def test_a_row_does_not_depend_on_the_number_of_others(outputs: int, dtype: torch.dtype) -> None:
    """Nor on the window, whose masks are other rows then."""
    inputs, counts = 192, (1, 2, 4, 5, 8, 9, 16, 32, 40) if DEVICE.type == "cuda" else (2, 9)
    weights, added = normal(2, outputs, inputs, dtype=dtype), normal(outputs, dtype=dtype)
    x = normal(max(counts) * CHAIN.width, inputs, dtype=dtype)
    most = two_sets(x, weights, added, CHAIN)
    for count in counts:
        some = x[: count * CHAIN.width]
        assert torch.equal(two_sets(some, weights, added, CHAIN), most[: len(some)])
    text = x.view(-1, CHAIN.width, inputs)[:2, : CHAIN.verified]
    treed = torch.cat([text, x.new_zeros(2, TREE.width - TREE.verified, inputs)], 1)
    found = two_sets(treed.flatten(0, 1), weights, added, TREE).view(2, TREE.width, outputs)[:, : TREE.verified]
    assert torch.equal(found, most.view(-1, CHAIN.width, outputs)[:2, : CHAIN.verified])


def test_inputs_are_summed_at_so_many_at_once() -> None:
    assert [inputs_at_once(each, torch.bfloat16) for each in (576, 1536, 40)] == [64, 128, 64]
    assert inputs_at_once(1536, torch.float32) == 64


@pytest.mark.parametrize("most_bytes", [0, 2**30], ids=["low rank", "two sets"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3", "gpt_oss"])
def test_prepared_models_compute_what_hooks_do(family: str, most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a step feeds it: windows one behind the other. In steps without masks the bits are the base model's."""
    monkeypatch.setattr(compilation, "SECOND_SET_BYTES", most_bytes)
    checkpoint = gated_checkpoint(family)
    module, adapter = checkpoint.module.to(DEVICE), checkpoint.adapter.to(DEVICE)
    adapter.scale = 1.5
    text = torch.randint(0, checkpoint.vocabulary, (1, 3 * CHAIN.width), device=DEVICE)
    fed = torch.where(are_masks(CHAIN, 3)[:, 0], checkpoint.mask_token_id, text)

    def logits(tokens: Tensor) -> Tensor:
        with torch.inference_mode(), own_attention(module) as model, torch.compiler.set_stance("force_eager"):
            found: Tensor = model(input_ids=tokens, use_cache=False).logits
            return found

    expected, base = logits(fed), logits(text)
    prepared = Compiled(module, adapter)
    assert torch.equal(logits(text), base)
    with prepared.applied(Window()), adapter.nowhere():
        torch.testing.assert_close(logits(text), base, atol=1e-5, rtol=1e-5)
    with prepared.applied(CHAIN):
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
        with prepared.applied(window), torch.compiler.set_stance("force_eager"):
            return run_step(inputs, window, longest)

    monkeypatch.setattr(engine._runner, "_run_step", captured)
    for dial, window in [("exact", CHAIN), ("exact", CANDIDATES), ("threshold=0.3", CHAIN), ("threshold=0", TREE)]:
        options = {"max_new_tokens": 5, "block_size": 4, "window": window}
        requests = [Request(prompt, Dial.parse(dial), **options) for prompt in ([1, 2, 3], [4, 5])]
        expected = [answer.token_ids for answer in Decoder(gated_checkpoint("qwen2"), requests).finish()]
        outputs = dict(run(engine, requests))
        assert [outputs[index].token_ids for index in range(len(requests))] == expected, (dial, window)
