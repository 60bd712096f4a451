"""The engine against the plain decoder: token for token, whatever comes and goes around a request."""

from __future__ import annotations

import gc
import random
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mars import MarsError, Sampling
from mars.decoding.attention import own_attention
from mars.decoding.decoder import Decoder
from mars.decoding.grammar import lark_grammar
from mars.decoding.request import Answer, Generation, Request
from mars.engine import Engine, QueueFullError
from mars.engine.cache import layer_shapes
from mars.engine.layout import Layout
from mars.method.acceptance import Dial
from mars.method.windows import Shape
from mars.models import Checkpoint
from tests.conftest import END, FAMILIES, MASK, tiny_checkpoint

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


def engine(pages: int = 400, rows: int = 4, price: float = WIDE, family: str = "llama", **options) -> Engine:
    def cost(count: int, layout: Layout) -> float:
        return 1 + price * count * layout.width

    memory = pages * bytes_per_page(family)
    return Engine(checkpoint(family), rows=rows, memory=memory, page_size=PAGE, cost=cost, **options)


def plain(request: Request, family: str = "llama") -> Generation:
    return Decoder(checkpoint(family), [replace(request)]).finish()[0]


def ask(start: int = 1, dial: str = "exact", length: int = 30, **options) -> Request:
    return Request([start, 2, 3, 4, 5], Dial.parse(dial), max_new_tokens=length, block_size=4, **options)


def pattern(regex: str) -> str:
    return lark_grammar(f"start: /{regex}/")


def possible(request: Request) -> Request:
    """The request without what contradicts the rest of it."""
    least = 0 if request.grammar else min(request.min_new_tokens, request.max_new_tokens)
    made = replace(request, min_new_tokens=least, ignore_end=request.ignore_end and not request.grammar)
    made.obey(made.dial)
    return made


DIALS = ["one-token", "exact", "relaxed=0.2", "threshold=0.3", "threshold:entropy=0.4", "threshold:margin=0.1"]
letters = st.integers(0, MASK - 2)
requests = st.builds(
    Request,
    prompt=st.one_of(
        st.lists(letters, min_size=1, max_size=20),
        st.lists(letters, max_size=4).map(lambda end: [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, *end]),  # shared
    ),
    dial=st.sampled_from(DIALS).map(Dial.parse),
    sampling=st.one_of(
        st.just(Sampling()),
        st.builds(
            Sampling,
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
    shape=st.sampled_from([None, Shape(1), Shape(2), Shape(None)]),
    grammar=st.sampled_from([None, None, None, pattern("[a-e]{3,20}j?"), pattern("(a[bc]|c|de+f)+")]),
).map(possible)


@dataclass
class Arrival:
    request: Request
    step: int
    priority: int
    cancelled_after: int | None
    """Steps"""


arrivals = st.builds(
    Arrival,
    request=requests,
    step=st.integers(0, 25),
    priority=st.integers(0, 2),
    cancelled_after=st.one_of(st.none(), st.none(), st.integers(0, 10)),
)


@settings(deadline=None, max_examples=60, phases=PHASES)
@given(
    st.lists(arrivals, min_size=1, max_size=8),
    st.integers(20, 60),
    st.integers(1, 4),
    st.integers(1, 20),
    st.sampled_from([WIDE, 0.05, 10]),
    st.integers(0, 2),
)
def test_any_schedule_gives_the_plain_text(schedule, pages, rows, prefill_tokens, price, ahead) -> None:
    """With few pages there are preemptions, with few rows there is a queue."""
    mine = engine(pages, rows, price, prefill_tokens=prefill_tokens, ahead=ahead)
    answers: dict[int, Answer] = {}
    for now in range(5000):
        for index, arrival in enumerate(schedule):
            if arrival.step == now:
                answers[index] = mine.add(replace(arrival.request), arrival.priority)
            gone = arrival.cancelled_after is not None and now == arrival.step + arrival.cancelled_after
            if gone and answers[index].finish_reason is None:
                mine.cancel(answers[index])
        mine.step()
        mine.check()
        if len(answers) == len(schedule) and all(answer.finish_reason for answer in answers.values()):
            break
    assert mine.running == mine.waiting == mine.pages.used == 0
    for index, arrival in enumerate(schedule):
        expected, found = plain(arrival.request), answers[index]
        if found.finish_reason == "cancelled":
            assert found.token_ids == expected.token_ids[: len(found.token_ids)]
        else:
            assert found.token_ids == expected.token_ids
            assert "".join(found.pieces) == expected.text
            assert found.finish_reason == expected.finish_reason


@settings(deadline=None, max_examples=40, phases=PHASES)
@given(requests, st.lists(st.tuples(st.integers(1, 8), st.sampled_from(DIALS)), max_size=4))
def test_turning_the_dial_midway_is_turning_it_in_the_plain_decoder(request_, turns) -> None:
    request_ = replace(request_, shape=request_.shape or Shape())
    ours, theirs = replace(request_), replace(request_)
    mine, oracle = engine(), Decoder(checkpoint(), [theirs])
    answer = mine.add(ours)
    for steps, dial in [*turns, (1000, DIALS[0])]:
        for _ in range(steps):
            if answer.finish_reason is None:
                mine.step()
                oracle.step()
                assert answer.token_ids == oracle.answers[0].token_ids
        for each in (ours, theirs):
            each.obey(Dial.parse(dial))
    assert answer.finish_reason == oracle.answers[0].finish_reason


@pytest.mark.parametrize("shape", ["chain", "tree=2", "tree"])
@pytest.mark.parametrize("dial", DIALS)
def test_a_window_asked_for_takes_as_many_forwards_as_in_the_plain_decoder(dial: str, shape: str) -> None:
    wanted = [ask(start, dial, length=60, shape=Shape.parse(shape)) for start in range(6)]
    mine = engine()
    found = mine.finish([mine.add(replace(request)) for request in wanted])
    for request, answer in zip(wanted, found, strict=True):
        expected = plain(request)
        assert answer.token_ids == expected.token_ids
        assert (answer.checked, answer.agreed) == (expected.checked, expected.agreed)
        assert answer.steps == expected.steps


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    dials = ["exact", "exact", "threshold=0.3", "one-token"]
    wanted = [ask(start, dial, length=40) for start, dial in enumerate(dials)]
    mine = engine(family=family, prefill_tokens=3)
    found = mine.finish([mine.add(replace(request)) for request in wanted])
    assert [answer.token_ids for answer in found] == [plain(request, family).token_ids for request in wanted]


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_context_ends_where_it_ends(family: str, ahead: int) -> None:
    """Windows reach past the last position; texts do not."""
    short = tiny_checkpoint(family, max_position_embeddings=48)
    request = Request([1, 2, 3], Dial("exact"), Sampling(logit_bias={END: -100.0}), 400, block_size=4)
    mine = Engine(short, rows=1, page_size=PAGE, ahead=ahead, cost=lambda rows, layout: 1.0)
    found = mine.finish([mine.add(replace(request))])[0]
    assert found.token_ids == Decoder(short, [request]).finish()[0].token_ids
    assert len(found.token_ids) == 48 - 3


def test_a_beginning_read_once_is_not_read_again() -> None:
    mine = engine()
    prompt = list(range(10)) * 3
    first = mine.finish([mine.add(Request(prompt, Dial("one-token"), max_new_tokens=4))])[0]
    read: list[int] = []
    prefill = mine._runner.prefill
    mine._runner.prefill = lambda chunks: (read.extend(len(chunk.tokens) for chunk in chunks), prefill(chunks))[1]
    again = mine.finish([mine.add(Request(prompt, Dial("one-token"), max_new_tokens=4))])[0]
    assert again.token_ids == first.token_ids
    assert sum(read) == (len(prompt) - 1) % PAGE
    turn = [*prompt, *first.token_ids, 7, 7]
    read.clear()
    mine.finish([mine.add(Request(turn, Dial("one-token"), max_new_tokens=4))])
    assert sum(read) < 2 * PAGE


def test_a_beginning_that_many_bring_at_once_is_read_once() -> None:
    mine = engine(prefill_tokens=8)
    read: list[int] = []
    prefill = mine._runner.prefill
    mine._runner.prefill = lambda chunks: (read.extend(len(chunk.tokens) for chunk in chunks), prefill(chunks))[1]
    wanted = [Request([*range(10)] * 3 + [end], Dial("exact"), max_new_tokens=6, block_size=4) for end in range(4)]
    found = mine.finish([mine.add(replace(request)) for request in wanted])
    assert [each.token_ids for each in found] == [plain(request).token_ids for request in wanted]
    assert sum(read) == 30 + 3 * (30 % PAGE)


def test_urgent_rows_push_out_others_and_these_come_back() -> None:
    mine = engine(rows=1)
    slow = mine.add(ask(1, length=30), priority=5)
    mine.step()
    urgent = mine.add(ask(2, length=5), priority=0)
    while urgent.finish_reason is None:
        mine.step()
    assert slow.finish_reason is None
    mine.finish([slow])
    assert slow.token_ids == plain(ask(1, length=30)).token_ids


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    mine = engine(prefill_tokens=4)
    first = mine.add(ask(1, "one-token", length=40))
    mine.step()
    mine.step()
    before = len(first.token_ids)
    long = mine.add(Request([1, 2] * 40, Dial("one-token"), max_new_tokens=2))
    for _ in range(10):
        mine.step()
    assert not long.token_ids
    assert len(first.token_ids) >= before + 10


def test_the_window_follows_the_number_of_rows() -> None:
    """A forward here costs a fixed price and one per token: wide windows for one row, narrow ones for many."""
    widths: list[tuple[int, int]] = []

    def run(rows: int) -> None:
        mine = engine(rows=64, price=0.02)
        decode = mine._runner.decode
        mine._runner.decode = lambda batch, layout, reach: (
            widths.append((rows, layout.width)),
            decode(batch, layout, reach),
        )[1]
        answers = [mine.add(ask(start % 10, length=8)) for start in range(rows)]
        for _ in range(3):
            mine.step()
        assert mine.running == rows or all(answer.finish_reason for answer in answers)

    for rows in (1, 8, 60):
        run(rows)
    width = {rows: max(wide for number, wide in widths if number == rows) for rows in (1, 8, 60)}
    assert width[1] > width[8] > width[60] == 1


def test_what_cannot_be_served_is_refused() -> None:
    mine = engine(pages=10, max_waiting=2)
    with pytest.raises(MarsError, match="more memory"):
        mine.add(ask(length=200))
    with pytest.raises(MarsError, match="empty"):
        mine.add(Request([], Dial("exact"), block_size=4))
    for _ in range(2):
        mine.add(ask(length=4))
    with pytest.raises(QueueFullError, match="waiting"):
        mine.add(ask(length=4))
    with pytest.raises(MarsError, match="at least one row"):
        Engine(checkpoint(), rows=0)


def test_a_cancelled_request_leaves_at_once() -> None:
    mine = engine(rows=1)
    first, second = mine.add(ask(1)), mine.add(ask(2))
    mine.step()
    mine.cancel(first)
    mine.cancel(second)
    assert (first.finish_reason, second.finish_reason) == ("cancelled", "cancelled")
    assert mine.running == mine.waiting == mine.pages.used == 0
    mine.check()
    assert second.generation().tokens_per_forward == 0


def test_a_thousand_requests_leave_nothing_behind() -> None:
    """Mixed lengths, dials, priorities and cancellations; memory stays where it was after the first few hundred."""
    draw = random.Random(0)
    mine = engine(pages=120, rows=16, price=0.02, prefill_tokens=64)
    going: list[Answer] = []
    finished, memory = Counter[str | None](), list[int]()
    asked = 0
    while asked < 1000 or going:
        if asked < 1000 and mine.waiting < 4:
            prompt = [draw.randrange(MASK - 1) for _ in range(draw.randint(1, 40))]
            sampling = Sampling(temperature=draw.choice([0.0, 1.0]), seed=asked)
            dial = Dial.parse(draw.choice(DIALS))
            request = Request(prompt, dial, sampling, draw.randint(1, 30), block_size=draw.randint(2, 4))
            going.append(mine.add(request, draw.randint(0, 1)))
            asked += 1
            if asked % 100 == 0:
                gc.collect()
                memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
        if draw.random() < 0.05:
            mine.cancel(draw.choice(going))
        mine.step()
        finished.update(answer.finish_reason for answer in going if answer.finish_reason)
        going = [answer for answer in going if answer.finish_reason is None]
    mine.check()
    assert mine.running == mine.waiting == mine.pages.used == 0
    assert finished.total() == 1000 and min(finished[reason] for reason in ("stop", "length", "cancelled")) > 20
    assert memory[-1] - memory[3] < 20e6, memory


def test_a_slot_forgets_the_bias_of_its_last_row() -> None:
    mine = engine(rows=2)
    biased, plainly = ask(sampling=Sampling(logit_bias={3: 5.0})), ask(2)
    mine.finish([mine.add(replace(biased))])
    together = mine.finish([mine.add(replace(plainly)), mine.add(replace(biased))])
    assert [each.token_ids for each in together] == [plain(each).token_ids for each in (plainly, biased)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_is_followed_across_several_tokens(temperature: float) -> None:
    """Whatever the dial; and drafts pass in spite of it, though some break it."""
    regex = "([a-e]{2}[f-i])+j"
    sampling = Sampling(temperature=temperature, seed=3)
    found = {}
    for dial in ("one-token", "exact", "relaxed=0.2"):
        mine = engine(rows=8, ahead=1)
        asked = [ask(start, dial, grammar=pattern(regex), sampling=sampling) for start in range(8)]
        found[dial] = mine.finish([mine.add(each) for each in asked])
        for each in found[dial]:
            assert re.fullmatch(regex, each.text) or (each.finish_reason == "length" and "j" not in each.text)
            assert re.match(r"([a-e]{2}[f-i])*[a-e]{0,2}", each.text)[0].ljust(len(each.text), "j") == each.text
    assert [each.token_ids for each in found["exact"]] == [each.token_ids for each in found["one-token"]]
    assert sum(each.forwards for each in found["exact"]) < 0.9 * sum(each.tokens for each in found["exact"])


def test_a_slot_forgets_the_grammar_of_its_last_row() -> None:
    mine = engine(rows=2)
    guided, plainly = ask(grammar=pattern("[abc]{1,30}")), ask(2)
    mine.finish([mine.add(replace(guided))])
    together = mine.finish([mine.add(replace(plainly)), mine.add(replace(guided))])
    assert [each.token_ids for each in together] == [plain(each).token_ids for each in (plainly, guided)]


def test_grammars_that_cannot_be_followed_are_refused() -> None:
    mine = engine()
    with pytest.raises(MarsError, match="the grammar cannot be followed"):
        mine.add(ask(grammar=pattern("[a-")))
    with pytest.raises(MarsError, match="need the dial one-token, exact or relaxed"):
        mine.add(ask(grammar=pattern("a+"), dial="threshold=0.5"))
    with pytest.raises(MarsError, match="says where a text ends"):
        mine.add(ask(grammar=pattern("a+"), min_new_tokens=3))


@pytest.mark.parametrize("dial", ["one-token", "exact", "relaxed=0.2"])
def test_likelihoods_are_the_models_own(dial: str) -> None:
    """Log-probabilities of all tokens that were emitted, as one forward over the finished text gives them."""
    request = ask(dial=dial, length=25, logprobs=3, sampling=Sampling(temperature=0.8, logit_bias={2: 1.0}, seed=5))
    mine = engine()
    answer = mine.add(replace(request))
    mine.add(ask(4, dial="threshold=0.3"))
    mine.finish([answer])
    decoder = Decoder(checkpoint(), [replace(request)])
    decoder.finish()
    module = checkpoint().module
    with own_attention(module) as plain_model, torch.no_grad():
        logits = plain_model(torch.tensor([[*request.prompt, *answer.token_ids]])).logits[0].clone()
    logits[:, MASK] = -torch.inf
    expected = logits.log_softmax(1)[len(request.prompt) - 1 : -1]
    for found in (answer, decoder.answers[0]):
        assert found.token_ids == answer.token_ids and len(found.likelihoods) == len(found.token_ids)
        for token, likely, row in zip(found.token_ids, found.likelihoods, expected, strict=True):
            assert likely.logprob == pytest.approx(row[token].item(), abs=1e-4)
            best, ids = row.topk(3)
            assert [each for each, _ in likely.best] == ids.tolist()
            assert [logprob for _, logprob in likely.best] == pytest.approx(best.tolist(), abs=1e-4)
    with pytest.raises(MarsError, match="logprobs"):
        mine.add(replace(request, dial=Dial.parse("threshold=0.5")))
