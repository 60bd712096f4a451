"""The forward whose bits do not depend on the load, against plain PyTorch: interpreted where there is no GPU."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from mars.core.request import Request
from mars.engine import Engine, compilation, run
from mars.engine.cache import PagedCache, layer_shapes
from mars.engine.device_state import DeviceState
from mars.engine.packing import Packing
from mars.engine.paged_attention import PagedWindows
from mars.engine.runner import Runner
from mars.method.acceptance import Dial
from mars.method.windows import Window, build_windows
from mars.models import Checkpoint
from mars.reference import Decoder
from tests.conftest import gated_checkpoint, tiny_checkpoint

pytest.importorskip("triton")
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from mars.engine.invariant import InvariantModel
from mars.engine.kernels import invariant_attention, products
from mars.engine.kernels.layers import add_and_norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {"tie_word_embeddings": True},
}
WINDOWS = {"one-token": Window(), "chain": Window.of(1, 4), "tree=2": Window.of(2, 4), "tree": Window.of(4, 4)}
CURSORS = [37, 0, 140]


@pytest.fixture(autouse=True)
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny layers have few inputs, and few keys: several parts all the same."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setattr(products, "LEAST_INPUTS", 16)
    monkeypatch.setattr(products, "inputs_at_once", lambda *_: 16)


@pytest.fixture(autouse=True)
def ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies through NumPy, whose order of summation may depend on the shape of a tile."""
    if DEVICE.type == "cuda":
        return

    def dot(_: object, a: TensorHandle, b: TensorHandle, total: TensorHandle, *__: object) -> TensorHandle:
        kind = total.data.dtype
        terms = (a.data[:, i, None].astype(kind) * b.data[None, i].astype(kind) for i in range(a.data.shape[1]))
        return TensorHandle(sum(terms, np.zeros_like(total.data)) + total.data, total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def runners(checkpoint: Checkpoint) -> tuple[Runner, Runner]:
    """One through transformers, one through the kernels, with the same keys and values in their caches."""
    checkpoint.module.to(DEVICE)
    if checkpoint.adapter is not None:
        checkpoint.adapter.to(DEVICE)
    made = []
    shapes = layer_shapes(checkpoint)
    for model in (None, InvariantModel(checkpoint)):
        state = DeviceState(len(CURSORS), 3, 12, checkpoint.vocabulary, DEVICE)
        state.set_pages([(slot, page, 12 * slot + page - 11) for slot in range(1, 4) for page in range(12)])
        cache = PagedCache(shapes, 40, 16, DEVICE)
        torch.manual_seed(0)
        for each in (store for layer in cache.layers for store in layer):
            each.normal_()
        made.append(Runner(checkpoint, state, cache, 4, model))
        made[-1]._uses_kernel = False
    return made[0], made[1]


def fed(runner: Runner, window: Window, sequences: list[tuple[int, int, int, list[int]]]) -> Tensor:
    """Logits (sequences, width, vocabulary) of sequences given by slot, cursor, last token and drafts."""
    slots, cursors, last = (torch.tensor([each[part] for each in sequences], device=DEVICE) for part in range(3))
    count = torch.tensor([len(each[3]) for each in sequences], device=DEVICE)
    windows = build_windows(
        window,
        runner.checkpoint.mask_token_id or 0,
        last=last,
        drafts=torch.tensor([[*each[3], *[0] * (3 - len(each[3]))] for each in sequences], device=DEVICE),
        draft_count=count,
        emitted=count < 0,
        groups=torch.full_like(count, window.groups),
        masks=torch.full_like(count, window.masks),
    )
    lengths = torch.full_like(cursors, window.width)
    with torch.inference_mode():
        packing = Packing.whole(len(slots), window, DEVICE)
        attention = runner._attention(window, slots, cursors, windows.visibility, lengths, packing, None)
        positions = packing.pack(cursors[:, None] + windows.visibility.position)
        return runner._forward(packing.pack(windows.tokens), positions, attention)[packing.rows]


def logits(runner: Runner, window: Window) -> Tensor:
    """Some sequences have fewer drafts than the window has room for."""
    drafts = [[2, 3, 4], [], [8]]
    ends = zip((1, 2, 3), CURSORS, (1, 4, 7), drafts, strict=True)
    return fed(runner, window, [(slot, cursor, last, some[: window.drafts]) for slot, cursor, last, some in ends])


@pytest.mark.parametrize("window", [Window(), Window.of(2, 4)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, window: Window) -> None:
    plain, invariant = runners(tiny_checkpoint(family, **FAMILIES[family]))
    torch.testing.assert_close(logits(invariant, window), logits(plain, window), atol=1e-3, rtol=1e-3)
    for mine, theirs in zip(invariant.cache.layers, plain.cache.layers, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("most_bytes", [0, 2**30], ids=["low rank", "two sets"])
def test_masks_have_their_adapter(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "SECOND_SET_BYTES", most_bytes)
    plain, invariant = runners(gated_checkpoint("qwen3"))
    for window in (Window(), Window.of(1, 4), Window.of(4, 4)):
        torch.testing.assert_close(logits(invariant, window), logits(plain, window), atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests of captured steps do this there")
def test_an_engine_writes_what_the_plain_decoder_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small chunks, with prompts that share their beginning; `threshold` emits drafts unverified."""
    requests = [
        Request([0, 1, 2, *rest], Dial.parse(dial), max_new_tokens=4, block_size=4, window=Window.of(groups, 4))
        for dial, groups, rest in [("exact", 1, [6]), ("exact", 4, [7, 8, 9]), ("threshold=0.3", 1, [7, 8])]
    ]
    expected = [answer.token_ids for answer in Decoder(gated_checkpoint("qwen2"), requests).finish()]
    monkeypatch.setattr("mars.engine.engine.cpu_model", lambda *_: None)
    checkpoint = gated_checkpoint("qwen2")
    cost = lambda _count, window: window.width  # noqa: E731
    engine = Engine(checkpoint, max_num_seqs=3, memory=2**22, prefill_tokens=4, cost=cost)
    engine._runner._invariant = InvariantModel(checkpoint)
    outputs = dict(run(engine, requests))
    assert [outputs[index].token_ids for index in range(len(requests))] == expected


WIDE: dict[str, dict[str, object]] = {
    "llama": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
    "qwen2": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2},
}
"""Real layers, for a GPU"""


def prepared(family: str) -> Checkpoint:
    """In bfloat16 and wide on a GPU, with weights of a size at which attention does not look at one token alone."""
    if DEVICE.type != "cuda":
        return gated_checkpoint(family)
    checkpoint = gated_checkpoint(family, torch.bfloat16, max_position_embeddings=1024, **WIDE[family])
    for weight in (*checkpoint.module.parameters(), *checkpoint.adapter.parameters()):
        weight.data *= 0.2
    checkpoint.adapter.to(DEVICE)
    return replace(checkpoint, module=checkpoint.module.to(DEVICE))


@pytest.mark.parametrize("seed", range(20 if DEVICE.type == "cuda" else 1))
@pytest.mark.parametrize("family", WIDE)
def test_logits_have_the_same_bits_in_any_window_chunk_and_company(
    family: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token after the other, alone, against drawn chunks of prefill, windows and other sequences."""
    draw, on_gpu = random.Random(seed), DEVICE.type == "cuda"
    length, others = (700, draw.choice([0, 1, 4, 39])) if on_gpu else (24, 1)
    if on_gpu:
        monkeypatch.undo()  # real layers have parts as they are
    checkpoint = prepared(family)
    model, shapes, pages = InvariantModel(checkpoint), layer_shapes(checkpoint), length // 16 + 2

    def fresh(slots: int) -> Runner:
        state = DeviceState(slots, 3, pages, checkpoint.vocabulary, DEVICE)
        state.set_pages([(slot, page, pages * slot + page) for slot in range(1, slots + 1) for page in range(pages)])
        return Runner(checkpoint, state, PagedCache(shapes, pages * (slots + 1), 16, DEVICE), 4, model)

    def drawn(count: int) -> list[int]:
        return [draw.randrange(10) for _ in range(count)]

    text = drawn(length)
    alone, together = fresh(1), fresh(1 + others)
    expected = [fed(alone, Window(), [(1, at, token, [])])[0, 0] for at, token in enumerate(text)]
    company = [(slot, 0, drawn(draw.randrange(1, length - 8))) for slot in range(2, 2 + others)]
    at = 0
    while at < length // 2:
        chunk = text[at : at + draw.randrange(1, length // 3)]
        together.prefill([*company, (1, at, chunk)])
        at += len(chunk)
    while at < length:
        window = Window.of(draw.randrange(1, 5), 4) if draw.random() < 0.7 else Window()
        drafts = text[at + 1 : at + 1 + draw.randrange(window.drafts + 1)]
        beside = [(slot, len(other), 3, drawn(draw.randrange(window.drafts + 1))) for slot, _, other in company]
        found = fed(together, window, [*beside, (1, at, text[at], drafts)])[-1]
        for ahead in range(1 + len(drafts)):
            assert torch.equal(found[ahead], expected[at + ahead]), (at + ahead, str(window), others)
        at += 1 + len(drafts)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_parts_of_a_product_add_up(bias: bool) -> None:
    """To the same bits, whether one program sums all of them or whoever reads them."""
    x, weights, added = torch.randn(9, 80), torch.randn(40, 80), torch.randn(40) if bias else None
    x, weights, added = (None if each is None else each.to(DEVICE) for each in (x, weights, added))
    tile = products.Tile(16, 64, 4, 2)
    left = products.product(x, weights, added, parts=4, tile=tile)
    assert left.shape == (4, 9, 40)
    whole = sum(left[1:], left[0]) + (0 if added is None else added)
    torch.testing.assert_close(whole, linear(x, weights, added), atol=1e-4, rtol=1e-4)
    many = products.product(x.repeat(400, 1), weights, added, parts=4, tile=tile)
    assert torch.equal(many[:9], whole)
    norm = torch.ones(40, device=DEVICE)
    hidden, other = torch.zeros_like(whole), torch.zeros_like(whole)
    assert torch.equal(add_and_norm(hidden, left, added, norm, 1e-5), add_and_norm(other, whole, None, norm, 1e-5))
    assert torch.equal(hidden, whole)


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("sliding", [None, 30])
def test_attention_has_the_same_bits_however_it_is_split(name: str, sliding: int | None) -> None:
    window, cursors = WINDOWS[name], [0, 130, 700]
    count = torch.tensor([0, min(1, window.drafts), window.drafts], device=DEVICE)
    built = build_windows(
        window,
        0,
        last=count,
        drafts=torch.zeros(3, 3, dtype=torch.long, device=DEVICE),
        draft_count=count,
        emitted=count < 0,
        groups=torch.full_like(count, window.groups),
        masks=torch.full_like(count, window.masks),
    )
    table = (torch.randperm(144) + 1).view(3, 48).to(DEVICE)
    lengths = torch.full_like(count, window.width)
    where = {"slots": torch.arange(3, device=DEVICE), "cursors": torch.tensor(cursors, device=DEVICE)}
    store = tuple(torch.randn(2, 145, 2, 16, 16, device=DEVICE))
    query = torch.randn(3 * window.width, 6, 16, device=DEVICE)
    options = {"positions": built.visibility.position.contiguous(), "reach": built.visibility.reach.contiguous()}
    options |= {"window": window, "page_table": table, "lengths": lengths, "scale": 0.3, "sliding": sliding} | where
    packing = Packing.whole(3, window, DEVICE)
    options["rows"] = packing.rows
    found = [invariant_attention.attend(query, store, **options, splits=splits) for splits in (1, 2, 7)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])

    cache = PagedCache([], 0, 16, DEVICE)
    cache.layers = [tuple(each.clone() for each in store)]
    nothing = torch.zeros_like(lengths)  # is stored anew
    windows = PagedWindows(cache, window, table, visibility=built.visibility, lengths=nothing, packing=packing, **where)
    query = query.transpose(0, 1)
    expected = windows.attend_densely(
        0, query, *query.new_zeros(2, 2, query.shape[1], 16), sliding=sliding, scale=0.3, softcap=None, sinks=None
    )
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("splits", [1, 2])
def test_padding_of_a_chunk_reads_no_pages_behind_the_text(splits: int) -> None:
    """The last chunk of a text ends in padding, for which the page table has no entries."""
    window = Window(drafts=15)
    columns = torch.arange(16, device=DEVICE)[None]
    pages = torch.tensor([[1, 2, 3, 10**9]], device=DEVICE)  # no such page
    cursors, lengths, slots = torch.tensor([[40], [5], [0]], device=DEVICE)
    store = tuple(torch.randn(2, 4, 1, 16, 16, device=DEVICE))
    query = torch.randn(16, 2, 16, device=DEVICE)
    where = {"window": window, "slots": slots, "cursors": cursors, "positions": columns, "reach": columns, "scale": 0.3}
    where["rows"] = columns
    found = invariant_attention.attend(query, store, page_table=pages[:, :3], lengths=lengths, splits=splits, **where)
    keys, values = (each[1:, 0].flatten(0, 1) for each in store)
    for column in range(5):
        shares = (query[column] @ keys[: 41 + column].T * 0.3).softmax(-1)
        torch.testing.assert_close(found[column], shares @ values[: 41 + column], atol=1e-5, rtol=1e-5)


def test_parts_grow_with_the_text() -> None:
    assert [invariant_attention.parts_of(each) for each in (0, 1, 128, 129, 1024, 1025, 3072, 3073, 131072)] == [
        *(0, 1, 1, 2, 8, 9, 16, 17, 57)
    ]


def test_the_kernels_compile_for_gpus_without_one() -> None:
    """Interpreted, a kernel may do what it cannot do when compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    subprocess.run([sys.executable, str(script)], env=environment, check=True, timeout=580)
