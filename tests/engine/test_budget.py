"""Ragged windows: how they are packed, what each sequence feeds, and what is written."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mars import MarsError, SamplingParams
from mars.core.request import Request
from mars.core.sequence import Sequence
from mars.engine import Engine, budget, run, runner
from mars.engine.budget import BINS, PRICES, PROMISE, BudgetPolicy, DraftValues, budgets, ragged_windows
from mars.engine.cuda_graphs import padded_size
from mars.engine.packing import ABSENT, Packing
from mars.engine.policy import PROBE
from mars.method.acceptance import Dial
from mars.method.windows import Window
from mars.reference import Decoder
from tests.conftest import gated_checkpoint, tiny_checkpoint

CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [Window(), Window.of(1, 4), Window.of(4, 4, 5), Window.of(2, 2, 1)], ids=str)
def test_text_comes_before_masks(window: Window) -> None:
    packing = Packing.whole(3, window, CPU)
    assert packing.rows.flatten()[packing.items].tolist() == list(range(3 * window.width))
    is_text = window.is_text(torch.arange(window.width)).repeat(3)
    count = int(packing.num_text)
    assert is_text[packing.items].tolist() == [True] * count + [False] * (3 * window.width - count)
    assert count == 3 * (window.width - window.all_masks)
    fed = torch.ones(3, window.width, dtype=torch.bool)
    ragged = Packing.ragged(window, fed, 3 * window.width + 2)
    assert torch.equal(ragged.rows, packing.rows) and ragged.items.tolist() == [*packing.items.tolist(), ABSENT, ABSENT]


@given(st.lists(st.lists(st.booleans(), min_size=10, max_size=10), min_size=1, max_size=6))
def test_what_is_not_fed_has_no_place(fed: list[list[bool]]) -> None:
    window, mine = Window(3, 2, 3), torch.tensor(fed)
    packing = Packing.ragged(window, mine, 60)
    assert torch.equal(packing.rows != ABSENT, mine)
    places = packing.rows[mine]
    assert sorted(places.tolist()) == list(range(len(places)))
    values = torch.arange(mine.numel()).view(mine.shape)
    assert torch.equal(packing.pack(values)[places], values[mine])
    texts = packing.rows[:, :4][mine[:, :4]]
    assert int(packing.num_text) == len(texts) and (texts < len(texts)).all()


def worth_feeding(batch: list, hope: torch.Tensor, price: float) -> list[tuple[int, int, int]]:
    """Drafts, mask groups and masks of each sequence at a price."""
    found = []
    for row, (probabilities, waiting, most) in enumerate(batch):
        chances = [(min(int(each * BINS), BINS - 1) + 0.5) / BINS for each in probabilities[:waiting]]
        survival = [each for each in accumulate(chances, mul) if each > price]
        worth = [PROMISE * max(float(each) - price, 0.0) for each in hope[row + 1]]
        accepted = survival[-1] if survival else 1.0
        ahead = sum(accepted * each > price for each in worth[:most])
        early = bool(survival) and (1 - survival[0]) * worth[0] > price
        found.append((len(survival), 1 + early, ahead))
    return found


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.floats(0, 1), min_size=3, max_size=3), st.integers(0, 3), st.integers(0, 3)),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 60),
)
def test_what_is_worth_most_is_fed(batch: list, room: int) -> None:
    """All that is worth the lowest price at which it fits; then for some sequences what is worth the next lower one."""
    count = len(batch)
    values = DraftValues(count, 3, CPU)
    values.hope = torch.rand(count + 1, 3).sort(1, descending=True).values
    slots = torch.arange(1, count + 1)
    values.probability[1:] = torch.tensor([each for each, _, _ in batch])
    drafts, masks = (torch.tensor([each[part] for each in batch]) for part in (1, 2))
    found = list(zip(*(each.tolist() for each in values.allot(count + room, slots, drafts, masks)), strict=True))

    def tokens(windows: list[tuple[int, int, int]]) -> int:
        return sum(first + groups * ahead for first, groups, ahead in windows)

    wanted = [worth_feeding(batch, values.hope, price) for price in PRICES]
    level = next(each for each, windows in enumerate(wanted) if tokens(windows) <= room)
    assert tokens(found) <= room
    if not level:
        assert found == wanted[0]
        return
    pairs = list(zip(found, wanted[level], wanted[level - 1], strict=True))
    assert all(mine in (here, lower) for mine, here, lower in pairs)
    missed = [max(tokens([lower]) - tokens([here]), 0) for mine, here, lower in pairs if mine != lower]
    assert not missed or sum(max(tokens([lower]) - tokens([here]), 0) for mine, here, lower in pairs) > room - tokens(
        wanted[level]
    )


def test_sequences_that_are_alike_share_too_little_room() -> None:
    """At the start nothing is known of any: no price divides them, and yet some feed masks."""
    values, slots = DraftValues(8, 3, CPU), torch.arange(1, 9)
    found = values.allot(8 + 4, slots, torch.zeros(8, dtype=torch.long), torch.full((8,), 3))
    assert 0 < int((found.groups * found.masks).sum()) <= 4


def test_padding_feeds_nothing() -> None:
    values = DraftValues(2, 3, CPU)
    found = values.allot(40, torch.tensor([1, 0, 0]), torch.tensor([0, 3, 3]), torch.full((3,), 3))
    assert found.drafts[1:].tolist() == found.masks[1:].tolist() == [0, 0]
    assert found.masks[0] > 0


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged windows for any number of sequences, through PyTorch."""
    monkeypatch.setattr(budget, "FEWEST", 1)
    monkeypatch.setattr(runner, "FEWEST", 1)
    monkeypatch.setattr("mars.engine.engine.cpu_model", lambda *_: None)


def ragged_engine(family: str = "qwen2", **options: object) -> Engine:
    """Tokens cost enough that windows which are alike do not pay."""

    def cost(count: int, window: Window) -> float:
        return 20 + window.tokens(count)

    limits = {"max_num_seqs": 8, "memory": 2**24, "prefill_tokens": 20, "cost": cost}
    return Engine(gated_checkpoint(family), ragged=True, **(limits | options))


SAMPLING = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(frequency_penalty=0.6, presence_penalty=0.3),
    SamplingParams(temperature=1.0, top_p=0.8, repetition_penalty=1.2, seed=3),
]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("async_steps", [0, 1, 2])
@pytest.mark.parametrize("memory", [2**24, 2**17], ids=["room", "preempted"])
def test_ragged_windows_write_what_the_plain_decoder_writes(async_steps: int, memory: int) -> None:
    checkpoint = gated_checkpoint("qwen2")
    dials = ["exact", "exact", "exact", "one-token"]
    requests = [
        Request(
            [1, 2, 3, number % 7, number % 5],
            Dial.parse(dials[number % 4]),
            SAMPLING[number // 2 % 4],
            max_new_tokens=10 + 3 * number % 17,
            block_size=2 + number % 3,
            ignore_end=True,
        )
        for number in range(16)
    ]
    expected = [answer.token_ids for answer in Decoder(checkpoint, requests).finish()]
    mine = ragged_engine(async_steps=async_steps, memory=memory)
    fed, step = list[Window](), mine._runner.step
    mine._runner.step = lambda inputs, window, longest: (fed.append(window), step(inputs, window, longest))[1]
    outputs = dict(run(mine, requests))
    assert [outputs[index].token_ids for index in range(len(requests))] == expected
    assert sum(each.budget > 0 for each in fed) > len(fed) / 4, "hardly any step was ragged"
    assert all(each.agreement == 1 for each in outputs.values())
    mine.check()


@pytest.mark.usefixtures("few")
def test_drafts_that_were_not_fed_are_not_counted() -> None:
    mine = ragged_engine(async_steps=1)
    policy = mine.policy
    assert isinstance(policy, BudgetPolicy)
    fed = list[tuple[int, int]]()
    observe = policy.observe_drafts
    policy.observe_drafts = lambda sequence, drafts, accepted: (
        fed.append((drafts, len(sequence.draft_probabilities))),
        observe(sequence, drafts, accepted),
    )[1]
    list(run(mine, [Request([1, 2, each], Dial("exact"), max_new_tokens=40, block_size=4) for each in range(6)]))
    assert fed and all(drafts <= known for drafts, known in fed)
    assert any(0 < drafts < known for drafts, known in fed), "every draft was fed"


@pytest.mark.usefixtures("few")
def test_no_choice_no_ragged_window() -> None:
    """The text of `relaxed` depends on its window, so a step with such a sequence has windows that are alike."""
    mine = ragged_engine()
    checkpoint = gated_checkpoint("qwen2")
    exact, relaxed = (
        Sequence.of(Request([1], Dial.parse(dial), block_size=4), checkpoint) for dial in ("exact", "relaxed=0.5")
    )
    assert mine.policy.choose([exact] * 4).budget
    assert not mine.policy.choose([exact, relaxed]).budget


def test_number_of_tokens_go_by_sequences() -> None:
    assert budgets(budget.FEWEST - 1) == [] and ragged_windows(64, 1) == []
    assert budgets(64) == sorted(budgets(64)) and budgets(64)[0] > 64
    assert [each.tokens(64) for each in ragged_windows(64, 4)] == budgets(64)


def test_a_ragged_window_is_one_that_was_captured() -> None:
    """Graphs go by padded sizes."""

    def cost(count: int, window: Window) -> float:
        return 4 * padded_size(count) + window.tokens(padded_size(count))

    policy = BudgetPolicy(4, 2, cost, DraftValues(64, 3, CPU), padded_size)
    sequence = Sequence.of(Request([1], Dial("exact"), block_size=4), gated_checkpoint("qwen2"))
    for count in (13, 33, 50):
        window = policy.choose([sequence] * count)
        assert window in ragged_windows(padded_size(count), 4) and window.budget > padded_size(count)
    assert not policy.choose([sequence] * 12).budget


def test_now_and_then_a_step_has_single_tokens() -> None:
    """So that it stays known what these cost."""

    def cost(count: int, window: Window) -> float:
        return 4 * padded_size(count) + window.tokens(padded_size(count))

    policy = BudgetPolicy(4, 2, cost, DraftValues(64, 3, CPU), padded_size, checks=True)
    sequence = Sequence.of(Request([1], Dial("exact"), block_size=4), gated_checkpoint("qwen2"))
    windows = [policy.choose([sequence] * 50) for _ in range(3 * PROBE)]
    assert 2 <= windows.count(Window()) <= 3
    assert sum(each.budget > 0 for each in windows) > 2 * PROBE


def test_ragged_and_lookup_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mars.engine.engine.cpu_model", lambda *_: None)
    with pytest.raises(MarsError, match="leave one out"):
        Engine(tiny_checkpoint("llama"), block_size=4, ragged=True, lookup=True)
