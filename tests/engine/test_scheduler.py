"""The scheduler without a model: admission, priorities, preemption, prefill chunks, and pages that are never lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars.core.output import RequestOutput
from mars.core.request import Request
from mars.core.sequence import Sequence, StepResult
from mars.engine.pages import Pages
from mars.engine.scheduler import QueueFullError, Schedule, Scheduler
from mars.errors import MarsError
from mars.method.acceptance import Dial
from mars.method.sampling import SamplingParams

PAGE, MARGIN, BLOCK = 4, 4, 2


def scheduler(pages: int = 40, max_num_seqs: int = 4, prefill_tokens: int = 8, **options) -> Scheduler:
    options = {"margin": MARGIN, "step_tokens": BLOCK, "max_waiting": None} | options
    return Scheduler(Pages(pages, PAGE), max_num_seqs=max_num_seqs, prefill_tokens=prefill_tokens, **options)


def sequence(prompt: list[int], max_tokens: int = 6) -> Sequence:
    return Sequence(
        request=Request(prompt, max_new_tokens=max_tokens),
        dial=Dial("one-token"),
        sampling=SamplingParams(seed=0),
        max_tokens=max_tokens,
        end_tokens=frozenset(),
        matcher=None,
        output=RequestOutput(),
        tokens=list(prompt),
    )


def advance(mine: Scheduler, schedule: Schedule) -> None:
    """What the engine does with a schedule, with a model that always writes 7."""
    for each in schedule.decode:
        each.process(StepResult(0, 7, [], [], 0, []), each.dial)
        mine.cache_pages(each)
        if each.is_finished:
            mine.remove(each)


def run(mine: Scheduler, steps: int) -> list[Schedule]:
    schedules = []
    for _ in range(steps):
        schedule = mine.schedule(in_flight=0)
        assert schedule is not None
        schedules.append(schedule)
        advance(mine, schedule)
        mine.check()
    return schedules


def test_a_prompt_is_prefilled_in_chunks_all_but_its_last_token() -> None:
    mine, text = scheduler(), sequence(list(range(20)))
    mine.add(text, 0)
    schedules = run(mine, 4)
    chunks = [chunk for each in schedules for chunk in each.prefill]
    assert [(start, tokens) for _, start, tokens in chunks] == [
        (0, list(range(8))),
        (8, list(range(8, 16))),
        (16, list(range(16, 19))),
    ]
    assert [len(each.decode) for each in schedules] == [0, 0, 1, 1]
    assert [each.begin for each in schedules] == [[], [], [text], []]


def test_the_page_table_is_told_of_every_page() -> None:
    mine = scheduler(max_num_seqs=2)
    texts = [sequence([1, 2, 3], 20), sequence([4, 5, 6, 7, 8, 9], 20)]
    for each in texts:
        mine.add(each, 0)
    table: dict[tuple[int, int], int] = {}
    for _ in range(12):
        schedule = mine.schedule(0)
        table |= {(slot, index): page for slot, index, page in schedule.page_updates}
        for each in texts:
            assert [table[each.slot, index] for index in range(len(each.pages))] == each.pages
            assert len(each.pages) * PAGE >= each.cursor + MARGIN
        advance(mine, schedule)


def test_the_urgent_run_first_and_preempt_others_once_their_results_are_known() -> None:
    mine = scheduler(max_num_seqs=1)
    slow, urgent = sequence([1, 2]), sequence([3, 4])
    mine.add(slow, 5)
    run(mine, 1)
    mine.add(urgent, 0)
    assert mine.schedule(in_flight=1) is None, "the newest tokens of the slow one are not known yet"
    assert mine.schedule(in_flight=0).decode == [urgent]
    assert slow.slot is None and mine.waiting == [slow] and slow.tokens == [1, 2, 7]


def test_the_least_urgent_gives_its_pages_back() -> None:
    mine = scheduler(pages=9, max_num_seqs=3)
    texts = [sequence([start] * 6, 16) for start in range(3)]
    for each in texts:
        mine.add(each, 0)
    run(mine, 3)
    assert [each.slot is None for each in texts] == [False, False, True], "there are too few pages for three"
    run(mine, 60)
    assert all(each.is_finished for each in texts) and mine.pages.used == 0


def test_a_cached_prefix_is_shared_and_waited_for() -> None:
    mine = scheduler(prefill_tokens=4)
    prefix = list(range(12))
    first, second = sequence([*prefix, 1]), sequence([*prefix, 2])
    mine.add(first, 0)
    mine.add(second, 0)
    assert [each is first for each in mine.schedule(0).begin] == [] and mine.waiting == [second]
    schedules = run(mine, 4)
    prefilled = [tokens for each in schedules for _, _, tokens in each.prefill]
    assert prefilled == [[4, 5, 6, 7], [8, 9, 10, 11]], "the second one prefills nothing"
    assert second.pages[:3] == first.pages[:3]


def test_what_cannot_be_served_is_refused() -> None:
    mine = scheduler(pages=4, max_waiting=1)
    with pytest.raises(MarsError, match="more memory"):
        mine.add(sequence([1] * 5, 50), 0)
    mine.add(sequence([1], 2), 0)
    with pytest.raises(QueueFullError, match="waiting"):
        mine.add(sequence([1], 2), 0)


arrivals = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=20),
        st.integers(1, 12),
        st.integers(0, 2),
        st.integers(0, 10),
        st.sampled_from([None, None, 3]),
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, max_examples=200)
@given(arrivals, st.integers(12, 40), st.integers(1, 4), st.integers(1, 10))
def test_every_request_ends_and_nothing_is_lost(schedule, pages, max_num_seqs, prefill_tokens) -> None:
    mine = scheduler(pages, max_num_seqs, prefill_tokens)
    texts = [sequence(prompt, most) for prompt, most, *_ in schedule]
    for now in range(3000):
        for text, (_, _, priority, arrival, aborted_after) in zip(texts, schedule, strict=True):
            if arrival == now:
                mine.add(text, priority)
            if aborted_after is not None and now == arrival + aborted_after and not text.is_finished:
                text.output.finish("abort")
                mine.remove(text)
        [step] = run(mine, 1)
        order = [each.order for each in sorted(step.decode)]
        assert all(one < other for one, other in pairwise(order))
        if now > 10 and all(each.is_finished for each in texts):
            break
    assert mine.pages.used == 0 and not mine.running and not mine.waiting
    for text, (prompt, most, *_, aborted_after) in zip(texts, schedule, strict=True):
        if aborted_after is None:
            assert text.tokens == prompt + [7] * most
