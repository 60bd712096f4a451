"""The engine on a CUDA device: captured steps against the plain decoder on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from mars import SamplingParams
from mars.api import Model
from mars.core.grammar import lark_grammar
from mars.core.request import Request
from mars.engine import Engine, compilation, cuda_graphs, run
from mars.engine.cuda_graphs import GraphRunner
from mars.engine.policy import CapturedCosts
from mars.method.acceptance import Dial
from mars.method.sampling import gumbel
from mars.method.windows import Window
from mars.models import Checkpoint
from mars.reference import Decoder
from tests.conftest import FAMILIES, gated_checkpoint, tiny_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = [[start, 2, 3, *range(length)] for start, length in enumerate([1, 7, 3, 9, 2, 5, 8])]
PROMPTS += [[index % 10 for index in range(length)] for length in (70, 150)]  # more than one chunk


@pytest.fixture(autouse=True)
def uncompiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Most tests are about captured graphs; compiling takes long and is tested once."""
    torch.backends.cuda.matmul.allow_tf32 = False
    stance = "default" if "compiled" in request.node.name else "force_eager"
    with torch.compiler.set_stance(stance):
        yield


def on_gpu(checkpoint: Checkpoint) -> Checkpoint:
    if checkpoint.adapter is not None:
        checkpoint.adapter.cuda()
    return replace(checkpoint, module=checkpoint.module.cuda())


CHAIN, TREE, CANDIDATES = Window.of(1, 4), Window.of(4, 4), Window.of(4, 4, 5)
LOSSLESS = [("one-token", None), *(("exact", window) for window in (CHAIN, TREE, CANDIDATES, None))]


def wide(_count: int, window: Window) -> float:
    return 1 + 0.001 * window.width


def texts(engine: Engine, requests: list[Request]) -> list[list[int]]:
    outputs = dict(run(engine, requests))
    engine.check()
    return [outputs[index].token_ids for index in range(len(requests))]


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_write_what_the_plain_decoder_writes(family: str) -> None:
    requests = [Request(each, Dial("one-token"), max_new_tokens=24) for each in PROMPTS]
    expected = [answer.token_ids for answer in Decoder(tiny_checkpoint(family), requests).finish()]
    engine = Engine(on_gpu(tiny_checkpoint(family)), max_num_seqs=8, memory=2**24, candidates=5, cost=wide)
    for dial, window in LOSSLESS:
        asked = [replace(each, dial=Dial(dial), block_size=4, window=window) for each in requests]
        assert texts(engine, asked) == expected, (dial, window)


def test_compiled_layers_write_the_same() -> None:
    requests = [Request(each, Dial("exact"), max_new_tokens=24, block_size=4) for each in PROMPTS]
    for family in ("llama", "qwen2", "gemma2"):
        expected = [answer.token_ids for answer in Decoder(tiny_checkpoint(family), requests).finish()]
        assert texts(Engine(on_gpu(tiny_checkpoint(family)), max_num_seqs=8, memory=2**24), requests) == expected


@pytest.mark.parametrize("how", ["eager", "compiled"])  # the fixture reads it
def test_the_device_looks_drafts_up(how: str) -> None:
    dials = [("exact", None, {}), ("exact", CHAIN, {}), ("threshold=0.3", None, {}), ("exact", None, {"seed": 3})]
    requests = [
        Request(
            prompt,
            Dial.parse(dial),
            SamplingParams(temperature=0.8 * bool(seed), **seed),
            max_new_tokens=40,
            ignore_end=True,
            block_size=4,
            window=window,
        )
        for prompt in PROMPTS
        for dial, window, seed in dials
    ]
    expected = [answer.token_ids for answer in Decoder(gated_checkpoint("llama"), requests).finish()]
    forwards = []
    for lookup in (False, True):
        engine = Engine(on_gpu(gated_checkpoint("llama")), memory=2**24, cost=wide, lookup=lookup)
        outputs = dict(run(engine, requests))
        assert [outputs[index].token_ids for index in range(len(requests))] == expected
        forwards.append(sum(each.forwards for each in outputs.values()))
    assert forwards[1] < forwards[0]


@pytest.mark.parametrize("make", [tiny_checkpoint, gated_checkpoint], ids=["merged", "gated"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_batch_invariant_steps_write_what_the_plain_decoder_writes(
    family: str, make: Callable[[str], Checkpoint]
) -> None:
    requests = [Request(each, Dial("one-token"), max_new_tokens=24) for each in PROMPTS]
    expected = [answer.token_ids for answer in Decoder(make(family), requests).finish()]
    engine = Engine(on_gpu(make(family)), max_num_seqs=8, memory=2**24, candidates=5, cost=wide, batch_invariant=True)
    assert engine.is_batch_invariant
    for dial, window in LOSSLESS:
        asked = [replace(each, dial=Dial(dial), block_size=4, window=window) for each in requests]
        assert texts(engine, asked) == expected, (dial, window)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_in_bfloat16_the_text_does_not_depend_on_the_load(family: str) -> None:
    """With sampling neighbours, prompts that share their beginning, small chunks, and so few pages that some wait."""
    checkpoint = on_gpu(gated_checkpoint(family, torch.bfloat16))
    sampling = [SamplingParams(), SamplingParams(temperature=0.8, seed=3)]
    prompts = [*PROMPTS, *([*range(10)] * 5 + [index] for index in range(8))]
    requests = [
        Request(each, Dial("one-token"), sampling[index % 2], max_new_tokens=40) for index, each in enumerate(prompts)
    ]
    alone = Engine(checkpoint, max_num_seqs=1, memory=2**24, candidates=5, cost=wide, batch_invariant=True)
    expected = [texts(alone, [each])[0] for each in requests]
    for memory in (2**24, 2**16):
        engine = Engine(
            checkpoint, max_num_seqs=8, memory=memory, prefill_tokens=20, candidates=5, cost=wide, batch_invariant=True
        )
        for dial, window in LOSSLESS:
            asked = [replace(each, dial=Dial(dial), block_size=4, window=window) for each in requests]
            assert texts(engine, asked) == expected, (dial, window, memory)


FORMS = pytest.mark.parametrize("most_bytes", [0, 2**30], ids=["low-rank", "two-sets"])


def gated_texts(family: str, most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every dial and window, as the plain decoder writes them; drafts of the last dials are emitted unverified."""
    monkeypatch.setattr(compilation, "SECOND_SET_BYTES", most_bytes)
    engine = Engine(on_gpu(gated_checkpoint(family)), max_num_seqs=8, memory=2**24, candidates=5, cost=wide)
    for dial, window in [
        ("one-token", None),
        ("exact", CHAIN),
        ("exact", TREE),
        ("exact", CANDIDATES),
        ("threshold=0.3", CHAIN),
        ("threshold=0", TREE),
    ]:
        requests = [Request(each, Dial.parse(dial), max_new_tokens=24, block_size=4, window=window) for each in PROMPTS]
        expected = [answer.token_ids for answer in Decoder(gated_checkpoint(family), requests).finish()]
        assert texts(engine, requests) == expected, (dial, window)


@FORMS
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3"])
def test_gated_adapters_act_in_captured_steps(family: str, most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gated_texts(family, most_bytes, monkeypatch)


@FORMS
def test_gated_adapters_act_in_compiled_layers(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gated_texts("qwen2", most_bytes, monkeypatch)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token_steps_have_the_bits_of_the_base_model_compiled(
    dtype: torch.dtype, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of captured steps, with a gated adapter and without."""
    monkeypatch.setattr(compilation, "SECOND_SET_BYTES", most_bytes)
    found = []
    for adapted in (True, False):
        checkpoint = on_gpu(gated_checkpoint("qwen2", dtype))
        if not adapted and checkpoint.adapter is not None:
            checkpoint.adapter.detach()
            checkpoint = replace(checkpoint, adapter=None, settings=None)
        engine = Engine(checkpoint, max_num_seqs=8, memory=2**24, cost=wide, block_size=4)
        runner, seen = engine._runner, list[torch.Tensor]()
        forward = runner._forward

        def noting(*args, forward=forward, seen=seen, **options):
            logits = forward(*args, **options)
            seen.append(logits)
            return logits

        monkeypatch.setattr(runner, "_forward", noting)
        requests = [Request(each, Dial("one-token"), max_new_tokens=8, ignore_end=True) for each in PROMPTS[:6]]
        written = texts(engine, requests)
        found.append((written, seen[-1].clone()))  # the captured graph's, of its last replay
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


SAMPLING: list[dict] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 3, "min_p": 0.1},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": {3: 1.5}},
    {"temperature": 0.5, "top_p": 0.5, "frequency_penalty": 1.0, "logit_bias": {3: 1.5}},
]


def test_memory_that_runs_out_at_a_capture_does_not_turn_graphs_off(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request(each, Dial("exact"), max_new_tokens=24, block_size=4) for each in PROMPTS]
    expected = [answer.token_ids for answer in Decoder(tiny_checkpoint("llama"), requests).finish()]
    engine = Engine(on_gpu(tiny_checkpoint("llama")), max_num_seqs=8, memory=2**24, cost=wide)
    runner = engine._runner
    assert isinstance(runner, GraphRunner)
    free = torch.cuda.mem_get_info()[0]
    ballast = torch.empty(free - 2**28, dtype=torch.uint8, device="cuda")  # real memory, all but 256 MiB
    monkeypatch.setattr(cuda_graphs, "RETRY_SECONDS", 0.0)
    run_step = runner._run_step

    def wasteful(*args):
        torch.empty(2**30, dtype=torch.uint8, device="cuda")
        return run_step(*args)

    with monkeypatch.context() as patched, pytest.warns(UserWarning, match="not enough memory to capture"):
        patched.setattr(runner, "_run_step", wasteful)
        assert runner._captured_step(8, Window()) is None
    del ballast
    torch.cuda.empty_cache()
    assert texts(engine, requests) == expected
    assert runner._steps


def test_threads_share_the_steps_of_a_gpu() -> None:
    """Graphs are captured in whichever thread steps first."""
    requests = [Request(each, Dial("exact"), max_new_tokens=24, block_size=4) for each in PROMPTS]
    expected = [answer.token_ids for answer in Decoder(tiny_checkpoint("llama"), requests).finish()]
    model = Model(on_gpu(tiny_checkpoint("llama")), max_num_seqs=8, memory=2**24)
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        outputs = threads.map(lambda each: model.generate(each, dial="exact", max_new_tokens=24), PROMPTS)
        assert [each.token_ids for each in outputs] == expected
    model.engine().check()


def test_graphs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_GRAPHS", 3)
    requests = [Request(each, Dial("exact"), max_new_tokens=24, block_size=4) for each in PROMPTS]
    expected = [answer.token_ids for answer in Decoder(tiny_checkpoint("llama"), requests).finish()]
    engine = Engine(on_gpu(tiny_checkpoint("llama")), max_num_seqs=8, memory=2**24)
    assert texts(engine, requests) == expected
    assert len(engine._runner._steps) == 3


def test_every_kind_of_sampling_is_captured() -> None:
    kinds = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.8, top_p=0.9, seed=2),
        SamplingParams(frequency_penalty=0.5, repetition_penalty=1.2),
        SamplingParams(logit_bias={3: 1.5}),
        SamplingParams(),
    ]
    dials = ["exact", "relaxed=0.3", "threshold=0.5", "threshold:entropy=0.4", "one-token"]
    requests = [
        Request(prompt, Dial.parse(dial), kind, max_new_tokens=20, block_size=4)
        for prompt, dial, kind in zip(PROMPTS, dials, kinds, strict=False)
    ]
    treed = [replace(each, window=TREE) for each in requests]  # as on a GPU where the text depends on it
    expected = [Decoder(tiny_checkpoint("llama"), [each]).finish()[0].token_ids for each in treed]
    engine = Engine(on_gpu(tiny_checkpoint("llama")), max_num_seqs=8, memory=2**24, cost=wide)
    assert texts(engine, requests) == expected
    for request, alone in zip(requests, expected, strict=True):
        assert texts(engine, [request]) == [alone]


def test_after_the_warm_up_nothing_is_captured_whatever_is_asked() -> None:
    dials = [Dial("exact"), Dial("one-token"), Dial("relaxed", 0.5), Dial("threshold", 0.9)]
    dials += [Dial("threshold", 0.8, "entropy"), Dial("threshold", 0.5, "margin")]
    engine = Engine(on_gpu(tiny_checkpoint("llama")), max_num_seqs=4, memory=2**24, cost=wide)
    runner = engine._runner
    assert isinstance(runner, GraphRunner)
    assert list(engine.warm_up())[-1][0] > 0
    captured = set(runner._steps), set(runner._prefills)
    for options in SAMPLING:
        sampling = SamplingParams(**options, seed=1)
        requests = [Request(each, Dial("exact"), sampling, max_new_tokens=99, block_size=4) for each in PROMPTS[:3]]
        sequences = [engine.add_request(each) for each in requests]
        for dial in (second for first in dials for second in (first, *dials)):  # from every one to every other
            for sequence in sequences:
                sequence.set_dial(dial)
            for _ in range(3):
                engine.step()
        for sequence in sequences:
            engine.abort(sequence)
    assert (set(runner._steps), set(runner._prefills)) == captured


def test_grammars_are_followed_though_the_device_works_ahead() -> None:
    pytest.importorskip("llguidance")
    grammar = lark_grammar("start: /([a-e]{2}[f-i])+j/")
    requests = [
        Request(prompt, Dial(dial), max_new_tokens=20, block_size=4, grammar=grammar if index % 2 else None)
        for index, (prompt, dial) in enumerate(zip(PROMPTS[:6], ["exact", "exact", "one-token"] * 2, strict=True))
    ]
    expected = [Decoder(tiny_checkpoint("llama"), [each]).finish()[0].token_ids for each in requests]
    assert (
        texts(Engine(on_gpu(tiny_checkpoint("llama")), max_num_seqs=8, memory=2**24, cost=wide), requests) == expected
    )


def test_a_step_waits_for_the_device_at_most_once() -> None:
    engine = Engine(on_gpu(tiny_checkpoint("llama")), max_num_seqs=8, memory=2**24, cost=wide)
    requests = [Request(each, Dial("exact"), max_new_tokens=90, block_size=4) for each in PROMPTS[:4]]
    sequences = [engine.add_request(each) for each in requests]
    for _ in range(3):
        engine.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        steps = engine.num_steps
        while engine.num_running == 4:
            engine.step()
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(each.message) for each in caught if "called a synchronizing" in str(each.message)]
    assert engine.num_steps > steps and not waits  # the only wait is for an event, which is not counted
    while not all(each.is_finished for each in sequences):
        engine.step()


def test_costs_follow_real_steps() -> None:
    engine = Engine(on_gpu(gated_checkpoint("llama")), max_num_seqs=8, memory=2**24)
    texts(engine, [Request(each, Dial("exact"), max_new_tokens=40, block_size=4) for each in PROMPTS[:8]])
    costs = engine._costs
    assert isinstance(costs, CapturedCosts) and costs._seen
    assert all(0 < costs(size, window) < 1 for size, window in costs._seen)


def test_memory_is_flat() -> None:
    engine = Engine(on_gpu(tiny_checkpoint("llama")), max_num_seqs=4, memory=2**24, cost=wide)
    requests = [Request(each, Dial("exact"), max_new_tokens=40, block_size=4) for each in PROMPTS]
    texts(engine, requests)
    used = torch.cuda.memory_allocated()
    for _ in range(5):
        texts(engine, requests)
    assert torch.cuda.memory_allocated() - used < 100_000


def test_drawing_compiles_for_a_large_vocabulary() -> None:
    seeds, positions = torch.tensor([1, 2**62, -5], device="cuda"), torch.tensor([[3], [4], [5]], device="cuda")

    def best(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return gumbel(seeds, positions, 49152).argmax(2)

    assert torch.equal(torch.compile(best, dynamic=False)(seeds, positions), best(seeds, positions))
