"""One model, many callers: threads, event loops, and callers who leave early."""

from __future__ import annotations

import _thread
import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from tokenizers import Regex, pre_tokenizers

import mars
from mars.core.grammar import json_grammar

from .conftest import CHAT_TEMPLATE, tiny_checkpoint

ENDLESS = {"ignore_end": True, "max_new_tokens": 150}


@pytest.fixture(scope="module")
def shared_model() -> mars.Model:
    checkpoint = tiny_checkpoint("llama")
    checkpoint.tokenizer.chat_template = CHAT_TEMPLATE
    checkpoint.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<end>|."), "isolated")
    return mars.Model(checkpoint, max_num_seqs=8)


@pytest.fixture
def model(shared_model: mars.Model) -> Iterator[mars.Model]:
    """A model, of which nothing may be left over."""
    yield shared_model
    assert_idle(shared_model)


def assert_idle(model: mars.Model) -> None:
    engine = model.engine()
    assert (engine.num_running, engine.num_waiting, engine.scheduler.pages.used) == (0, 0, 0)
    assert not model.shared_engine()._pending
    engine.check()


def in_threads(count: int, work: Callable[[int], object]) -> list[object]:
    with ThreadPoolExecutor(count) as pool:
        return [each.result(timeout=60) for each in [pool.submit(work, index) for index in range(count)]]


def options(index: int) -> dict[str, object]:
    """Calls of many kinds: dials, lengths, stop strings, sampling."""
    kinds: list[dict[str, object]] = [
        {"dial": "exact"},
        {"dial": "one-token", "stop": ["ca", "b"]},
        {"dial": "threshold=0.1", "temperature": 0.8, "seed": index},
        {"dial": "relaxed=0.2", "min_new_tokens": 5},
    ]
    return kinds[index % 4] | {"max_new_tokens": 8 + index}


def question(index: int) -> str:
    return "abcdefghij"[index % 10] * (1 + index % 7) + "bad"


# --- threads


def test_threads_get_their_own_answers(model: mars.Model) -> None:
    def ask(index: int) -> list[object]:
        found: list[object] = []
        for each in range(index, index + 5):
            one = model.generate(question(each), **options(each))
            pair = model.generate([question(each), question(each + 1)], **options(each))
            streamed = list(model.stream(question(each), **options(each)))
            found += [one.token_ids, one.text, one.finish_reason, [other.token_ids for other in pair], streamed]
        return found

    expected = [ask(index) for index in range(12)]
    assert in_threads(12, ask) == expected


def test_threads_share_steps(model: mars.Model) -> None:
    streams = [model.stream(question(index), dial="one-token", **ENDLESS) for index in range(4)]
    before = model.engine().num_steps
    outputs = in_threads(4, lambda index: streams[index].result)
    assert [each.forwards for each in outputs] == [150] * 4
    assert model.engine().num_steps - before < 200


def test_threads_on_the_real_model(smollm: mars.Model) -> None:
    questions = ["Name a colour.", "Count to three.", "Who wrote Hamlet?", "Write a haiku."]
    expected = [smollm.generate(each, max_new_tokens=6).text for each in questions]
    assert in_threads(4, lambda index: smollm.generate(questions[index], max_new_tokens=6).text) == expected
    assert_idle(smollm)


def test_a_grammar_may_be_compiled_in_any_thread(smollm: mars.Model) -> None:
    grammar = json_grammar({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    request = replace(smollm.request("Give me a number.", dial="exact", max_new_tokens=10), grammar=grammar)
    expected = dict(smollm.run([request]))[0].text
    assert expected.startswith("{")
    assert in_threads(3, lambda _: dict(smollm.run([request]))[0].text) == [expected] * 3


def test_larger_blocks_while_others_run() -> None:
    model = mars.Model(tiny_checkpoint("llama"))
    first = model.stream([1, 2, 3], **ENDLESS)
    expected = model.generate([1, 2, 3], **ENDLESS).token_ids
    next(first)
    assert model.generate([1, 2, 3], block_size=6, **ENDLESS).token_ids == expected
    assert in_threads(6, lambda index: model.generate([1, 2, 3], block_size=3 + index, **ENDLESS).token_ids) == (
        [expected] * 6
    )
    assert model.engine().block_size == 8
    assert first.result.token_ids == expected
    assert_idle(model)


def test_callers_in_and_out_of_inference_mode() -> None:
    model = mars.Model(tiny_checkpoint("llama"))

    def ask(index: int) -> list[int]:
        with torch.inference_mode(index % 2 == 0):
            model.generate([1, 2, 3], logit_bias={3: 1.0}, frequency_penalty=0.5, max_new_tokens=4)
            return model.generate([1, 2, 3], **ENDLESS).token_ids

    expected = [ask(index) for index in range(4)]
    assert in_threads(4, ask) == expected == [expected[0]] * 4


def test_a_step_that_fails_is_told_to_those_in_it(model: mars.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = model.generate(question(1), **ENDLESS).token_ids
    runner = model.engine()._runner
    step, calls = runner.step, 0

    def fails_once(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("out of memory")
        return step(*arguments)

    def ask(_: int) -> object:
        try:
            return model.generate(question(1), **ENDLESS).token_ids
        except RuntimeError as error:
            return str(error)

    monkeypatch.setattr(runner, "step", fails_once)
    found = in_threads(12, ask)  # of which 8 fit
    assert 1 <= found.count("out of memory") <= 8
    assert [each for each in found if each != "out of memory"] == [expected] * (12 - found.count("out of memory"))
    assert model.generate(question(1), **ENDLESS).token_ids == expected


def test_an_engine_that_always_fails_keeps_nobody_waiting(model: mars.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no device")

    def ask(index: int) -> None:
        with pytest.raises(RuntimeError, match="no device"):
            list(model.stream(question(index), **ENDLESS))

    for name in ("prefill", "step"):
        monkeypatch.setattr(model.engine()._runner, name, fails)
        in_threads(10, ask)
        monkeypatch.undo()
    monkeypatch.setattr(model.engine().scheduler, "schedule", fails)
    in_threads(10, ask)


@pytest.mark.parametrize("others", [0, 3])
def test_an_interrupted_call_leaves_the_others_alone(model: mars.Model, others: int) -> None:
    expected = [model.generate(question(index), **ENDLESS).token_ids for index in range(others)]
    again = threading.Timer(2, _thread.interrupt_main)  # Python drops an interrupt that comes during a finalizer
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(model.generate, question(index), **ENDLESS) for index in range(others)]
        with pytest.raises(KeyboardInterrupt):
            for count, _ in enumerate(model.stream(question(9), dial="one-token", **ENDLESS)):
                if count == 3:
                    threading.Timer(0.002, _thread.interrupt_main).start()  # comes during one of the next steps
                    again.start()
            threading.Event().wait(5)
        again.cancel()
        assert [each.result(timeout=60).token_ids for each in running] == expected


# --- callers who leave early


def test_abandoned_streams_let_go(model: mars.Model) -> None:
    stream = model.stream(question(1), **ENDLESS)
    next(stream)
    assert model.engine().num_running == 1
    del stream
    assert_idle(model)
    for _ in model.stream(question(2), **ENDLESS):
        break
    assert_idle(model)
    cycle = [model.stream(question(3), **ENDLESS)]
    next(cycle[0])
    cycle.append(cycle)  # type: ignore[arg-type]
    del cycle
    gc.collect()
    assert_idle(model)
    model.stream(question(4), **ENDLESS)
    assert_idle(model)


def test_a_closed_stream(model: mars.Model) -> None:
    with model.stream(question(1), dial="one-token", **ENDLESS) as stream:
        first = next(stream)
        assert model.engine().num_running == 1
    assert_idle(model)
    assert list(stream) == []
    assert stream.text == stream.result.text == first
    assert stream.result.finish_reason == "abort"
    done = model.stream(question(1), max_new_tokens=3)
    assert done.result.finish_reason == "length"
    done.close()
    assert done.result.finish_reason == "length" and len(done.result.token_ids) == 3


def test_streams_are_left_while_others_step(model: mars.Model) -> None:
    """Some of them by the garbage collector, at any moment."""
    expected = [model.generate(question(index), **ENDLESS).token_ids for index in range(4)]

    def leave(index: int) -> object:
        for each in range(20):
            cycle = [model.stream(question(each), **ENDLESS)]
            cycle.append(cycle)  # type: ignore[arg-type]
            if each % 3:
                next(cycle[0])
            if each % 4 == 0:
                cycle[0].close()
        return model.generate(question(index), **ENDLESS).token_ids

    before = gc.get_threshold()
    gc.set_threshold(50)
    try:
        assert in_threads(4, leave) == expected
    finally:
        gc.set_threshold(*before)
    gc.collect()


def test_a_run_that_is_left(model: mars.Model) -> None:
    outputs = model.run([model.request(question(index), **ENDLESS) for index in range(100)])
    next(outputs)
    outputs.close()
    assert_idle(model)
    for _ in model.run([model.request(question(index), max_new_tokens=1 + 9 * index) for index in range(9)]):
        break
    gc.collect()


def test_a_stream_that_another_thread_closes(model: mars.Model) -> None:
    stream = model.stream(question(1), dial="one-token", ignore_end=True, max_new_tokens=240)
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(list, stream)
        stream.close()
        assert len(reader.result(timeout=60)) < 240
    assert stream.result.finish_reason == "abort"


def test_dials_turn_while_another_thread_steps(model: mars.Model) -> None:
    expected = model.generate(question(1), **ENDLESS).token_ids
    stream = model.stream(question(1), dial="one-token", **ENDLESS)

    def turn(index: int) -> object:
        if index:
            return model.generate(question(1), **ENDLESS).token_ids
        for count, _ in enumerate(stream):
            stream.dial = ("exact", "one-token")[count % 2]
            assert str(stream.dial) == ("exact", "one-token")[count % 2]
        return stream.result.token_ids

    assert in_threads(2, turn) == [expected] * 2


# --- event loops


def test_many_async_streams(model: mars.Model) -> None:
    expected = [model.generate(question(index), **options(index)) for index in range(20)]
    before = model.engine().num_steps

    async def read(index: int) -> tuple[str, list[int]]:
        stream = model.astream(question(index), **options(index))
        pieces = [piece async for piece in stream]
        output = await stream.result()
        assert "".join(pieces) == stream.text == output.text and pieces == output.pieces
        return output.text, output.token_ids

    async def everything() -> list[object]:
        return await asyncio.gather(*map(read, range(20)))

    found = asyncio.run(everything())
    assert found == [(each.text, each.token_ids) for each in expected]
    assert model.engine().num_steps - before < sum(each.forwards for each in expected) / 2


def test_the_loop_goes_on_while_a_stream_is_awaited(model: mars.Model) -> None:
    steppers = set()
    engine = model.engine()
    step = engine.step
    engine.step = lambda: (steppers.add(threading.current_thread()), step())[1]  # type: ignore[method-assign]

    async def read() -> None:
        assert (await model.agenerate(question(1), **ENDLESS)).num_tokens == 150

    try:
        asyncio.run(read())
    finally:
        del engine.step  # type: ignore[method-assign]
    assert steppers and threading.main_thread() not in steppers


def test_async_streams_are_left(model: mars.Model) -> None:
    async def leave() -> None:
        async for _ in model.astream(question(1), **ENDLESS):
            break
        assert_idle(model)
        async with model.astream(question(2), **ENDLESS) as stream:
            await anext(stream)
            assert model.engine().num_running == 1
        assert_idle(model)
        assert [piece async for piece in stream] == []
        assert (await stream.result()).finish_reason == "abort"
        unread = model.astream(question(3), **ENDLESS)
        unread.close()
        assert unread.text == "" and (await unread.result()).token_ids == []

    asyncio.run(leave())


@pytest.mark.parametrize("pause", [0, 0.001, 0.02])
def test_a_cancelled_task_aborts_its_request(model: mars.Model, pause: float) -> None:
    async def cancel() -> None:
        tasks = [asyncio.create_task(model.agenerate([question(n), "abc"], **ENDLESS)) for n in range(3)]
        other = asyncio.create_task(model.agenerate(question(1), **ENDLESS))
        await asyncio.sleep(pause)
        for task in tasks:
            task.cancel()
        assert all(
            isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*tasks, return_exceptions=True)
        )
        assert (await other).num_tokens == 150

    asyncio.run(cancel())


def test_the_dial_of_an_async_stream_turns(model: mars.Model) -> None:
    async def turn() -> mars.RequestOutput:
        stream = model.astream(question(1), dial="exact", window="chain", **ENDLESS)  # whatever a window costs here
        stream.dial = "one-token"
        pieces = [await anext(stream) for _ in range(5)]
        stream.dial = "exact"
        pieces += [piece async for piece in stream]
        output = await stream.result()
        assert "".join(pieces) == output.text and output.steps[:5] == [1] * 5
        with pytest.raises(mars.MarsError, match="unknown dial"):
            stream.dial = "warp"
        return output

    output = asyncio.run(turn())
    assert output.dial == "exact" and output.forwards < output.num_tokens
    assert output.token_ids == model.generate(question(1), **ENDLESS).token_ids


def test_async_mistakes_are_told(model: mars.Model) -> None:
    async def ask() -> None:
        with pytest.raises(mars.MarsError, match="unknown dial"):
            await model.agenerate("abc", dial="warp")
        with pytest.raises(mars.MarsError, match="did you mean temperature"):
            async for _ in model.astream("abc", temprature=1):
                pass
        with pytest.raises(mars.MarsError, match="bytes"):
            await model.agenerate(["abc", b"abc"], **ENDLESS)

    asyncio.run(ask())


def test_threads_and_loops_together(model: mars.Model) -> None:
    expected = [model.generate(question(index), **ENDLESS).token_ids for index in range(6)]

    async def read(index: int) -> list[int]:
        return (await model.agenerate(question(index), **ENDLESS)).token_ids

    def ask(index: int) -> object:
        return asyncio.run(read(index)) if index % 2 else model.generate(question(index), **ENDLESS).token_ids

    assert in_threads(6, ask) == expected
