"""The engine against the plain decoder: token for token, whatever comes and goes around a request."""

from __future__ import annotations

import gc
import random
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from threading import Event

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mars import MarsError, SamplingParams
from mars.core.grammar import grammar_compiler, lark_grammar
from mars.core.output import RequestOutput
from mars.core.request import Request
from mars.core.sequence import Sequence
from mars.engine import Engine, QueueFullError, run
from mars.engine.cache import layer_shapes
from mars.engine.run import attach_processor, stop_found
from mars.method.acceptance import Dial
from mars.method.windows import Window, parse_window
from mars.models import Checkpoint
from mars.models.attention import own_attention
from mars.reference import Decoder
from tests.conftest import END, FAMILIES, MASK, VOCABULARY, tiny_checkpoint

PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
PAGE = 4
WIDE = 0.001
"""A price of a token fed that makes the widest window the best one; 10 makes it one-token"""


@cache
def checkpoint(family: str = "llama") -> Checkpoint:
    """In double precision where schedules are random: windows of different widths round differently."""
    made = tiny_checkpoint(family)
    return replace(made, module=made.module.double()) if family == "llama" else made


@cache
def bytes_per_page(family: str = "llama") -> int:
    return PAGE * sum(shape.bytes_per_token for shape in layer_shapes(checkpoint(family)))


def engine(pages: int = 400, num_seqs: int = 4, price: float = WIDE, family: str = "llama", **options) -> Engine:
    def cost(count: int, window: Window) -> float:
        return 1 + price * count * window.width

    memory = pages * bytes_per_page(family)
    limits = {"max_num_seqs": num_seqs, "memory": memory, "page_size": PAGE, "candidates": 4}
    return Engine(checkpoint(family), cost=cost, **limits | options)


def plain(request: Request, family: str = "llama") -> RequestOutput:
    return Decoder(checkpoint(family), [request]).finish()[0]


def ask(start: int = 1, dial: str = "exact", length: int = 30, **options) -> Request:
    return Request([start, 2, 3, 4, 5], Dial.parse(dial), max_new_tokens=length, block_size=4, **options)


def pattern(regex: str) -> str:
    return lark_grammar(f"start: /{regex}/")


def possible(window: str | None, **options) -> Request:
    """A request without what contradicts the rest of it."""
    request = Request(**options, window=window and parse_window(window, options["block_size"]))
    least = 0 if request.grammar else min(request.min_new_tokens, request.max_new_tokens)
    dial = Dial("exact") if request.grammar and request.dial.kind == "threshold" else request.dial
    return replace(request, dial=dial, min_new_tokens=least, ignore_end=request.ignore_end and not request.grammar)


def finish(mine: Engine, wanted: list[Request]) -> list[RequestOutput]:
    """Run requests to their end."""
    outputs = dict(run(mine, wanted))
    return [outputs[index] for index in range(len(wanted))]


DIALS = ["one-token", "exact", "relaxed=0.2", "threshold=0.3", "threshold:entropy=0.4", "threshold:margin=0.1"]
letters = st.integers(0, MASK - 2)
requests = st.builds(
    possible,
    prompt=st.one_of(
        st.lists(letters, min_size=1, max_size=20),
        st.lists(letters, max_size=4).map(lambda end: [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, *end]),  # shared
    ),
    dial=st.sampled_from(DIALS).map(Dial.parse),
    sampling=st.one_of(
        st.just(SamplingParams()),
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.7, 1.5]),
            top_p=st.sampled_from([1.0, 0.8]),
            presence_penalty=st.sampled_from([0.0, 0.8]),
            repetition_penalty=st.sampled_from([1.0, 1.2]),
            logit_bias=st.sampled_from([{}, {3: 1.5}]),
            seed=st.integers(0, 2**62),
        ),
    ),
    min_new_tokens=st.sampled_from([0, 0, 6]),
    ignore_end=st.sampled_from([False, False, True]),
    max_new_tokens=st.integers(1, 30),
    block_size=st.integers(2, 4),
    window=st.sampled_from([None, "chain", "tree=2", "tree", "chain+2", "tree=2+4"]),
    stop=st.sampled_from([(), (), ("ab", "c"), ("hh",)]),
    grammar=st.sampled_from([None, None, None, pattern("[a-e]{3,20}j?"), pattern("(a[bc]|c|de+f)+")]),
)


@dataclass
class Arrival:
    request: Request
    step: int
    priority: int
    aborted_after: int | None
    """Steps"""


arrivals = st.builds(
    Arrival,
    request=requests,
    step=st.integers(0, 25),
    priority=st.integers(0, 2),
    aborted_after=st.one_of(st.none(), st.none(), st.integers(0, 10)),
)


@settings(deadline=None, max_examples=60, phases=PHASES)
@given(
    st.lists(arrivals, min_size=1, max_size=8),
    st.integers(24, 60),
    st.integers(1, 4),
    st.integers(1, 20),
    st.sampled_from([WIDE, 0.05, 10]),
    st.integers(0, 2),
    st.booleans(),
)
def test_any_schedule_gives_the_plain_text(
    schedule, pages, num_seqs, prefill_tokens, price, async_steps, lookup
) -> None:
    """With few pages there are preemptions, with few sequences there is a queue."""
    mine = engine(pages, num_seqs, price, prefill_tokens=prefill_tokens, async_steps=async_steps, lookup=lookup)
    sequences: dict[int, Sequence] = {}
    for now in range(5000):
        for index, arrival in enumerate(schedule):
            if arrival.step == now:
                sequences[index] = mine.add_request(arrival.request, arrival.priority)
                attach_processor(mine, sequences[index])
            gone = arrival.aborted_after is not None and now == arrival.step + arrival.aborted_after
            if gone and not sequences[index].is_finished:
                mine.abort(sequences[index])
        for sequence in mine.step():
            stop_found(mine, sequence)
        mine.check()
        if len(sequences) == len(schedule) and all(each.is_finished for each in sequences.values()):
            break
    assert mine.num_running == mine.num_waiting == mine.scheduler.pages.used == 0
    for index, arrival in enumerate(schedule):
        expected, found = plain(arrival.request), sequences[index].output
        if found.finish_reason == "abort":
            assert found.token_ids == expected.token_ids[: len(found.token_ids)]
        else:
            assert found.token_ids == expected.token_ids
            assert "".join(found.pieces) == found.text == expected.text
            assert found.finish_reason == expected.finish_reason
            assert (found.num_verified, found.num_agreed) == (expected.num_verified, expected.num_agreed)


@settings(deadline=None, max_examples=40, phases=PHASES)
@given(requests, st.lists(st.tuples(st.integers(1, 8), st.sampled_from(DIALS)), max_size=4))
def test_turning_the_dial_midway_is_turning_it_in_the_plain_decoder(request_, turns) -> None:
    request_ = replace(request_, window=request_.window or Window.of(1, request_.block_size), stop=())
    mine, oracle = engine(), Decoder(checkpoint(), [request_])
    ours, theirs = mine.add_request(request_), oracle.sequences[0]
    for steps, dial in [*turns, (1000, DIALS[0])]:
        for _ in range(steps):
            if not ours.is_finished:
                while not mine.step():  # its grammar may not be ready yet
                    pass
                oracle.step()
                assert ours.output.token_ids == theirs.output.token_ids
        for each in (ours, theirs):
            each.set_dial(Dial.parse(dial))
    assert ours.output.finish_reason == theirs.output.finish_reason


@pytest.mark.parametrize("async_steps", [0, 1])
def test_drafts_from_the_text_save_forwards(async_steps: int) -> None:
    """Random models repeat themselves; the device looks up, the host is told."""
    wanted = [ask(start, length=60, ignore_end=True) for start in range(6)]
    masks, both = (finish(engine(lookup=lookup, async_steps=async_steps), wanted) for lookup in (False, True))
    assert [answer.token_ids for answer in masks] == [answer.token_ids for answer in both]
    assert sum(answer.forwards for answer in both) < sum(answer.forwards for answer in masks)
    assert max(count for answer in both for count in answer.steps) > 4, "no window had more drafts than masks make"


@pytest.mark.parametrize("window", ["chain", "tree=2", "tree", "chain+1", "tree+4"])
@pytest.mark.parametrize("dial", DIALS)
def test_a_window_asked_for_takes_as_many_forwards_as_in_the_plain_decoder(dial: str, window: str) -> None:
    wanted = [ask(start, dial, length=60, window=parse_window(window, 4)) for start in range(6)]
    mine = engine()
    found = finish(mine, wanted)
    for request, answer in zip(wanted, found, strict=True):
        expected = plain(request)
        assert answer.token_ids == expected.token_ids
        assert (answer.num_verified, answer.num_agreed) == (expected.num_verified, expected.num_agreed)
        assert answer.steps == expected.steps


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    dials = ["exact", "exact", "threshold=0.3", "one-token"]
    wanted = [ask(start, dial, length=40) for start, dial in enumerate(dials)]
    mine = engine(family=family, prefill_tokens=3)
    found = finish(mine, wanted)
    assert [answer.token_ids for answer in found] == [plain(request, family).token_ids for request in wanted]


@pytest.mark.parametrize("async_steps", [0, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_context_ends_where_it_ends(family: str, async_steps: int) -> None:
    """Windows reach past the last position; texts do not."""
    short = tiny_checkpoint(family, max_position_embeddings=48)
    request = Request([1, 2, 3], Dial("exact"), SamplingParams(logit_bias={END: -100.0}), 400, block_size=4)
    mine = Engine(short, max_num_seqs=1, page_size=PAGE, async_steps=async_steps, cost=lambda *_: 1.0)
    found = finish(mine, [request])[0]
    assert found.token_ids == Decoder(short, [request]).finish()[0].token_ids
    assert len(found.token_ids) == 48 - 3


def test_a_cached_prefix_is_not_prefilled_again() -> None:
    mine = engine()
    prompt = list(range(10)) * 3
    first = finish(mine, [Request(prompt, Dial("one-token"), max_new_tokens=4)])[0]
    read: list[int] = []
    prefill = mine._runner.prefill
    mine._runner.prefill = lambda chunks: (read.extend(len(tokens) for _, _, tokens in chunks), prefill(chunks))[1]
    again = finish(mine, [Request(prompt, Dial("one-token"), max_new_tokens=4)])[0]
    assert again.token_ids == first.token_ids
    assert sum(read) == (len(prompt) - 1) % PAGE
    turn = [*prompt, *first.token_ids, 7, 7]
    read.clear()
    finish(mine, [Request(turn, Dial("one-token"), max_new_tokens=4)])
    assert sum(read) < 2 * PAGE


def test_a_prefix_that_many_bring_at_once_is_prefilled_once() -> None:
    mine = engine(prefill_tokens=8)
    read: list[int] = []
    prefill = mine._runner.prefill
    mine._runner.prefill = lambda chunks: (read.extend(len(tokens) for _, _, tokens in chunks), prefill(chunks))[1]
    wanted = [Request([*range(10)] * 3 + [end], Dial("exact"), max_new_tokens=6, block_size=4) for end in range(4)]
    found = finish(mine, wanted)
    assert [each.token_ids for each in found] == [plain(request).token_ids for request in wanted]
    assert sum(read) == 30 + 3 * (30 % PAGE)


def test_urgent_requests_preempt_others_and_these_come_back() -> None:
    mine = engine(num_seqs=1)
    slow = mine.add_request(ask(1, length=30), priority=5)
    mine.step()
    urgent = mine.add_request(ask(2, length=5), priority=0)
    while not urgent.is_finished:
        mine.step()
    assert not slow.is_finished
    while not slow.is_finished:
        mine.step()
    assert slow.output.token_ids == plain(ask(1, length=30)).token_ids


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    mine = engine(prefill_tokens=4)
    first = mine.add_request(ask(1, "one-token", length=40)).output
    mine.step()
    mine.step()
    before = first.num_tokens
    long = mine.add_request(Request([1, 2] * 40, Dial("one-token"), max_new_tokens=2)).output
    for _ in range(10):
        mine.step()
    assert not long.token_ids
    assert first.num_tokens >= before + 10


def test_the_window_follows_the_number_of_sequences() -> None:
    """A step here costs a fixed price and one per token: wide windows for one sequence, narrow ones for many."""
    widths: list[tuple[int, int]] = []

    def measure(count: int) -> None:
        mine = engine(num_seqs=64, price=0.02, candidates=0)
        step = mine._runner.step
        mine._runner.step = lambda inputs, window, longest: (
            widths.append((len(inputs), window.width)),
            step(inputs, window, longest),
        )[1]
        sequences = [mine.add_request(ask(start % 10, length=8)) for start in range(count)]
        for _ in range(3):
            mine.step()
        assert mine.num_running == count or all(each.is_finished for each in sequences)

    for count in (1, 8, 60):
        measure(count)
    width = {count: max(wide for number, wide in widths if number == count) for count in (1, 8, 60)}
    assert width[1] > width[8] > width[60] == 1


def test_what_cannot_be_served_is_refused() -> None:
    mine = engine(pages=10, max_waiting=2, candidates=0)
    with pytest.raises(MarsError, match="more memory"):
        mine.add_request(ask(length=200))
    with pytest.raises(MarsError, match="empty"):
        mine.add_request(Request([], Dial("exact"), block_size=4))
    for _ in range(2):
        mine.add_request(ask(length=4))
    with pytest.raises(QueueFullError, match="waiting"):
        mine.add_request(ask(length=4))
    with pytest.raises(MarsError, match="max_num_seqs must be at least 1"):
        Engine(checkpoint(), max_num_seqs=0)


def test_an_aborted_request_leaves_at_once() -> None:
    mine = engine(num_seqs=1)
    first, second = mine.add_request(ask(1)), mine.add_request(ask(2))
    mine.step()
    mine.abort(first)
    mine.abort(second)
    assert (first.output.finish_reason, second.output.finish_reason) == ("abort", "abort")
    assert mine.num_running == mine.num_waiting == mine.scheduler.pages.used == 0
    mine.check()
    assert second.output.tokens_per_forward == 0


def test_a_thousand_requests_leave_nothing_behind() -> None:
    """Mixed lengths, dials, priorities and aborts; memory stays where it was after the first few hundred."""
    draw = random.Random(0)
    mine = engine(pages=120, num_seqs=16, price=0.02, prefill_tokens=64)
    going: list[Sequence] = []
    finished, memory = Counter[str | None](), list[int]()
    asked = 0
    while asked < 1000 or going:
        if asked < 1000 and mine.num_waiting < 4:
            prompt = [draw.randrange(MASK - 1) for _ in range(draw.randint(1, 40))]
            sampling = SamplingParams(temperature=draw.choice([0.0, 1.0]), seed=asked)
            dial = Dial.parse(draw.choice(DIALS))
            request = Request(prompt, dial, sampling, draw.randint(1, 30), block_size=draw.randint(2, 4))
            going.append(mine.add_request(request, draw.randint(0, 1)))
            asked += 1
            if asked % 100 == 0:
                gc.collect()
                memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
        if draw.random() < 0.05:
            mine.abort(draw.choice(going))
        mine.step()
        finished.update(each.output.finish_reason for each in going if each.is_finished)
        going = [each for each in going if not each.is_finished]
    mine.check()
    assert mine.num_running == mine.num_waiting == mine.scheduler.pages.used == 0
    assert finished.total() == 1000 and min(finished[reason] for reason in ("stop", "length", "abort")) > 20
    assert memory[-1] - memory[3] < 20e6, memory


def test_a_slot_loses_the_bias_of_its_last_sequence() -> None:
    mine = engine(num_seqs=2)
    biased, plainly = ask(sampling=SamplingParams(logit_bias={3: 5.0})), ask(2)
    finish(mine, [biased])
    together = finish(mine, [plainly, biased])
    assert [each.token_ids for each in together] == [plain(each).token_ids for each in (plainly, biased)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_is_followed_across_several_tokens(temperature: float) -> None:
    """Whatever the dial; and drafts pass in spite of it, though some break it."""
    regex = "([a-e]{2}[f-i])+j"
    sampling = SamplingParams(temperature=temperature, seed=3)
    found = {}
    for dial in ("one-token", "exact", "relaxed=0.2"):
        mine = engine(num_seqs=8, async_steps=1)
        asked = [ask(start, dial, grammar=pattern(regex), sampling=sampling) for start in range(8)]
        found[dial] = finish(mine, asked)
        for each in found[dial]:
            assert re.fullmatch(regex, each.text) or (each.finish_reason == "length" and "j" not in each.text)
            assert re.match(r"([a-e]{2}[f-i])*[a-e]{0,2}", each.text)[0].ljust(len(each.text), "j") == each.text
    assert [each.token_ids for each in found["exact"]] == [each.token_ids for each in found["one-token"]]
    assert sum(each.forwards for each in found["exact"]) < 0.9 * sum(each.num_tokens for each in found["exact"])


def test_a_slot_loses_the_grammar_of_its_last_sequence() -> None:
    mine = engine(num_seqs=2)
    guided, plainly = ask(grammar=pattern("[abc]{1,30}")), ask(2)
    finish(mine, [guided])
    together = finish(mine, [plainly, guided])
    assert [each.token_ids for each in together] == [plain(each).token_ids for each in (plainly, guided)]


def test_grammars_that_cannot_be_followed_are_refused() -> None:
    mine = engine()
    with pytest.raises(MarsError, match="the grammar cannot be followed"):
        mine.add_request(ask(grammar=pattern("[a-")))
    with pytest.raises(MarsError, match="need the dial one-token, exact or relaxed"):
        mine.add_request(ask(grammar=pattern("a+"), dial="threshold=0.5"))
    with pytest.raises(MarsError, match="says where a text ends"):
        mine.add_request(ask(grammar=pattern("a+"), min_new_tokens=3))


@pytest.mark.parametrize("dial", ["one-token", "exact", "relaxed=0.2"])
def test_logprobs_are_the_models_own(dial: str) -> None:
    """Log-probabilities of all tokens that were emitted, as one forward over the finished text gives them."""
    request = ask(
        dial=dial, length=25, logprobs=3, sampling=SamplingParams(temperature=0.8, logit_bias={2: 1.0}, seed=5)
    )
    mine = engine()
    answer = finish(mine, [request, ask(4, dial="threshold=0.3")])[0]
    module = checkpoint().module
    with own_attention(module) as plain_model, torch.no_grad():
        logits = plain_model(torch.tensor([[*request.prompt, *answer.token_ids]])).logits[0].clone()
    logits[:, MASK] = -torch.inf
    expected = logits.log_softmax(1)[len(request.prompt) - 1 : -1]
    for found in (answer, plain(request)):
        assert found.token_ids == answer.token_ids and len(found.logprobs) == len(found.token_ids)
        for token, likely, row in zip(found.token_ids, found.logprobs, expected, strict=True):
            assert likely.logprob == pytest.approx(row[token].item(), abs=1e-4)
            best, ids = row.topk(3)
            assert [each for each, _ in likely.top] == ids.tolist()
            assert [logprob for _, logprob in likely.top] == pytest.approx(best.tolist(), abs=1e-4)
    with pytest.raises(MarsError, match="logprobs"):
        mine.add_request(replace(request, dial=Dial.parse("threshold=0.5")))


# --- what goes wrong in one request stays there

AMBIGUOUS = lark_grammar(
    f"start: s\ns: {' | '.join(f'x{i}' for i in range(40))} | s s | /[a-j]/\n"
    + "\n".join(f"x{i}: s s | /[a-j]/ | x{(i + 1) % 40} s" for i in range(40))
)
"""After some ten tokens it has more readings than llguidance follows"""


def broken(*_: object) -> None:
    raise ZeroDivisionError("broken")


@pytest.mark.parametrize("where", ["process", "begin", "masks"])
@pytest.mark.parametrize("async_steps", [0, 1])
def test_an_error_of_one_sequence_ends_that_one_alone(where: str, async_steps: int, caplog) -> None:
    mine = engine(async_steps=async_steps)
    others = [mine.add_request(ask(start)) for start in range(2)]
    bad = mine.add_request(ask(7, grammar=pattern("[a-e]{3,20}j?")))
    if where == "process":
        bad.matcher.advance = broken
    elif where == "masks":
        bad.matcher.check = broken
    else:
        bad.sampling = replace(bad.sampling, logit_bias={VOCABULARY: 1.0})
    others.append(mine.add_request(ask(3)))
    told = {each for _ in range(200) for each in mine.step()}
    assert bad in told and bad.output.finish_reason == "error"
    assert ("logit_bias" if where == "begin" else "ZeroDivisionError: broken") in bad.output.error
    assert "Traceback" in caplog.text
    assert [each.output.token_ids for each in others] == [plain(each.request).token_ids for each in others]
    mine.check()
    assert mine.num_running == mine.num_waiting == mine.scheduler.pages.used == 0


def test_a_grammar_beyond_the_limits_of_llguidance_is_an_error() -> None:
    mine = engine()
    other = ask(2, length=20)
    bad, good = finish(mine, [ask(1, length=100, grammar=AMBIGUOUS), other])
    assert bad.finish_reason == "error" and "Current row has" in bad.error and bad.num_tokens > 1
    assert good.token_ids == plain(other).token_ids and good.error is None


@pytest.mark.parametrize("async_steps", [0, 1])
def test_an_error_that_nobody_can_be_blamed_for_ends_those_that_run(async_steps: int, monkeypatch) -> None:
    mine = engine(num_seqs=2, async_steps=async_steps)
    prompt = list(range(9)) * 5
    sequences = [mine.add_request(Request([*prompt, start], Dial("exact"), block_size=4)) for start in range(4)]
    with monkeypatch.context() as patched:
        patched.setattr(mine._runner, "prefill", broken)
        with pytest.raises(ZeroDivisionError) as raised:
            mine.step()
    failed = mine.fail_running(raised.value)
    assert failed and {each.output.finish_reason for each in failed} == {"error"}
    assert failed == [each for each in sequences if each.is_finished]
    while mine.num_running + mine.num_waiting:
        mine.step()
    for each in sequences:  # nobody shares pages that were never filled
        assert each in failed or each.output.token_ids == plain(each.request).token_ids
    assert len(failed) < 4


def test_a_fault_of_the_device_ends_the_engine() -> None:
    mine = engine()
    mine.add_request(ask())
    mine.step()
    with pytest.raises(torch.AcceleratorError):
        mine.fail_running(torch.AcceleratorError("illegal memory access"))


def test_a_slow_grammar_does_not_stall_the_others(monkeypatch) -> None:
    """Its masks are computed in a thread, and it is left out of steps until they are there."""
    mine, request = engine(), ask(1, grammar=pattern("[a-e]{3,20}j?"))
    compiler, gate = grammar_compiler(mine.checkpoint), Event()
    compute = compiler.masks
    monkeypatch.setattr(compiler, "masks", lambda *text: gate.wait(60) and compute(*text))
    slow, aborted, other = mine.add_request(request), mine.add_request(request), mine.add_request(ask(2))
    while not other.is_finished:
        mine.step()
    mine.abort(aborted)
    mine.check()
    assert slow.output.num_tokens == 0 and mine.step() == []
    gate.set()
    while not slow.is_finished:
        mine.step()
    assert slow.output.token_ids == plain(request).token_ids
    mine.check()
