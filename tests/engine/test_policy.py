"""Window choice: what a window brings, against a simulation; what it costs; which one wins."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars.core.request import Request
from mars.core.sequence import Sequence
from mars.engine.policy import (
    PRIOR,
    Acceptance,
    CandidateHits,
    CapturedCosts,
    CostPoint,
    StepCosts,
    WindowPolicy,
    fastest,
    interpolate,
    tokens_per_forward,
)
from mars.method.acceptance import Dial
from mars.method.windows import Window
from tests.conftest import tiny_checkpoint

WINDOWS = [Window(), *(Window.of(groups, 4) for groups in (1, 2, 3, 4))]


def simulate(window: Window, passes: list[float], hit: float = 0.0, forwards: int = 40_000) -> float:
    """Tokens per forward of a sequence whose drafts pass with these chances, each given that those before it did."""
    draw, tokens, drafts, behind = random.Random(0), 0, False, False
    for _ in range(forwards):
        count = window.masks if drafts else 0
        chances = [1.0, *passes] if behind else passes
        accepted = next((i for i in range(count) if draw.random() >= chances[i]), count)
        tokens += accepted + 1
        behind = accepted < count and draw.random() < hit
        drafts = behind or accepted in [count, *range(count)][: window.groups]
    return tokens / forwards


@pytest.mark.parametrize("passes", [[0.8, 0.7, 0.6], [0.3, 0.9, 0.2], [1.0, 1.0, 1.0], [0.0, 0.5, 0.5]])
@pytest.mark.parametrize("hit", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_expected_tokens(window: Window, passes: list[float], hit: float) -> None:
    rates = [passes[0], passes[0] * passes[1], passes[0] * passes[1] * passes[2]]
    assert tokens_per_forward(window, rates, hit) == pytest.approx(simulate(window, passes, hit), rel=0.02)


def test_candidates_are_worth_what_they_explain() -> None:
    hits = CandidateHits(6)
    assert hits.rates()[0] == 0 and hits.rates() == sorted(hits.rates())
    for number in range(3000):
        hits.observe(3, [0, 0, 1, None][number % 4])
    none, one, two, three, *more = hits.rates()
    assert none == 0 and one == pytest.approx(0.5, abs=0.02) and two == pytest.approx(0.75, abs=0.02)
    assert three == pytest.approx(0.75, abs=0.02) and more == sorted(more)

    def cost(_: int, window: Window) -> float:
        return 1 + 0.005 * window.width

    windows = Window.useful(4, 6)
    assert [str(each) for each in windows[-2:]] == ["tree+3", "tree+6"]
    assert fastest(windows, [0.7, 0.5, 0.3], 1, cost, hits.rates()).candidates == 3
    assert not fastest(windows, [0.7, 0.5, 0.3], 1, cost, [0.0] * 7).candidates
    assert not fastest(windows, [0.7, 0.5, 0.3], 1, lambda _, window: window.width, hits.rates()).candidates


def test_acceptance_is_observed_and_decays() -> None:
    seen = Acceptance(3)
    assert seen.rates() == pytest.approx([PRIOR, PRIOR**2, PRIOR**3])
    for _ in range(2000):
        seen.observe(3, 1)  # the first passes, the second does not, the third is never asked
    first, second, _third = seen.rates()
    assert first > 0.95 and second < 0.05
    for _ in range(20_000):
        seen.decay()
    assert seen.rates() == pytest.approx([PRIOR, PRIOR**2, PRIOR**3], abs=0.01)


def test_a_wide_window_pays_for_few_sequences_and_for_good_drafts() -> None:
    def cost(sequences: int, window: Window) -> float:
        return 1 + 0.01 * sequences * window.width

    good, bad = [0.9, 0.8, 0.7], [0.05, 0.0, 0.0]
    widths = [fastest(WINDOWS, good, sequences, cost).width for sequences in (1, 8, 32, 256)]
    assert widths == sorted(widths, reverse=True) and widths[0] > widths[-1] == 1
    assert fastest(WINDOWS, bad, 4, cost) == Window()


@given(st.integers(1, 1000))
def test_costs_between_and_beyond_what_was_measured(size: int) -> None:
    points = [CostPoint(*each) for each in ((1, 1.0), (7, 1.6), (16, 2.5), (56, 6.5))]
    assert interpolate(points, size) == pytest.approx(0.9 + 0.1 * size)


def test_a_noisy_measurement_never_makes_a_forward_free() -> None:
    assert interpolate([CostPoint(1, 3.0), CostPoint(7, 1.0)], 500) > 0


# --- a machine that others use too

GOOD, CHAIN = [0.8, 0.64, 0.5], Window.of(1, 4)


class Machine:
    """A scripted clock: a step takes ``one`` and ``more`` per further token, ``load`` times as long if others work."""

    def __init__(self, one: float = 1.0, more: float = 0.05) -> None:
        self.one, self.more, self.load = one, more, lambda timed: 1.0
        self.timed = 0

    def seconds(self, num_seqs: int, window: Window) -> float:
        self.timed += 1
        return (self.one + self.more * (num_seqs * window.width - 1)) * self.load(self.timed)

    time_step = seconds

    def padded_size(self, num_seqs: int) -> int:
        return num_seqs

    def measured_steps(self, num_seqs: int) -> list[tuple[int, Window]]:
        return [(1, Window()), (1, CHAIN), (1, Window.of(4, 4)), (8, CHAIN)]


class Decoding:
    """Steps of one sequence whose drafts are accepted with the chances that ``rates`` say."""

    def __init__(self, machine: Machine, costs: StepCosts, rates: list[float], *, explores: bool = True) -> None:
        checkpoint = tiny_checkpoint("llama")
        self.sequences = [Sequence.of(Request([1, 2], Dial("exact"), block_size=4), checkpoint)]
        self.policy = WindowPolicy(4, 1, costs, explores=explores)
        self.machine, self.costs, self.rates = machine, costs, rates
        self.tokens, self.seconds, self.drafts, self.draw = 0, 0.0, False, random.Random(0)

    def step(self) -> Window:
        window = self.policy.choose(self.sequences)
        taken = self.machine.seconds(1, window)
        self.costs.observe(1, window, taken)
        count = window.masks if self.drafts else 0
        chance = self.draw.random()
        accepted = sum(chance < rate for rate in self.rates[:count])
        if count:
            self.policy.acceptance.observe(count, accepted)
        else:
            self.policy.acceptance.decay()
        self.policy.observe_step([window], 1 + accepted, taken)
        self.tokens, self.seconds = self.tokens + 1 + accepted, self.seconds + taken
        self.drafts = accepted in [count, *range(count)][: window.groups]
        return window

    def steps(self, count: int) -> list[Window]:
        return [self.step() for _ in range(count)]


def test_a_burst_of_other_work_slows_all_measurements_and_not_one() -> None:
    for begin in range(12):  # three turns of four steps
        machine = Machine()
        machine.load = lambda timed, begin=begin: 5.0 if begin < timed <= begin + 4 else 1.0
        measured = StepCosts(machine, turns=3).measure(1)
        assert [point.seconds for point in measured] == pytest.approx([1.0, 1.3, 1.75, 3.75])


def test_windows_come_back_after_a_distorted_measurement() -> None:
    machine = Machine()
    machine.load = lambda timed: 4.0 if 2 <= timed <= 4 else 1.0  # all the sizes but the first one
    decoding = Decoding(machine, StepCosts(machine), GOOD)
    assert not decoding.step().groups
    assert sum(bool(window.groups) for window in decoding.steps(150)) > 20
    assert all(window.groups for window in decoding.steps(500))


def test_windows_come_back_when_the_machine_is_free_again() -> None:
    machine = Machine(one=1.0, more=0.4)  # others leave so little that only single tokens pay
    decoding = Decoding(machine, StepCosts(machine), GOOD)
    assert sum(bool(window.groups) for window in decoding.steps(400)) < 40
    machine.more = 0.05
    decoding.steps(150)
    assert all(window.groups for window in decoding.steps(500))


@pytest.mark.parametrize("load", [3.0, 1 / 3])
def test_a_machine_that_gets_slower_or_faster_keeps_its_windows(load: float) -> None:
    machine = Machine()
    decoding = Decoding(machine, StepCosts(machine), GOOD)
    decoding.steps(50)
    machine.load = lambda timed: load if timed < 400 or timed % 40 < 20 else 1.0
    assert sum(bool(window.groups) for window in decoding.steps(1000)) > 950


@pytest.mark.parametrize("more", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("rates", [GOOD, [0.3, 0.1, 0.0], [0.0, 0.0, 0.0]])
def test_trying_chains_costs_little_where_they_do_not_pay(more: float, rates: list[float]) -> None:
    machine = Machine(more=more)
    decoding = Decoding(machine, StepCosts(machine), rates)
    decoding.steps(3000)
    assert decoding.tokens / decoding.seconds > 0.93


def test_measured_costs_that_stay_are_not_explored() -> None:
    machine = Machine(more=0.5)
    decoding = Decoding(machine, StepCosts(machine), GOOD, explores=False)
    assert not any(window.groups for window in decoding.steps(2000))


# --- captured steps, measured once, and what real ones say


class Captured(Machine):
    """Real steps take ``further`` times as much for further tokens as measured ones, and ``later`` besides."""

    further, later = 1.0, 0.0

    def measured_steps(self, num_seqs: int) -> list[tuple[int, Window]]:
        return [(num_seqs, window) for window in (Window(), *Window.useful(4))]

    def seconds(self, num_seqs: int, window: Window) -> float:
        return self.one + self.later + self.further * self.more * (num_seqs * window.width - 1)


def decoding_of(machine: Captured, rates: list[float]) -> Decoding:
    decoding = Decoding(machine, CapturedCosts(machine), rates)
    decoding.policy = WindowPolicy(4, 1, decoding.costs, checks=True)
    return decoding


def test_real_steps_correct_what_was_measured() -> None:
    machine = Captured()
    costs = CapturedCosts(machine)
    costs.observe(1, CHAIN, 9.0)
    assert not machine.timed, "who never asks for costs does not wait for their measurement"
    single, chain, tree = (costs(1, window) for window in (Window(), CHAIN, Window.of(4, 4)))
    for _ in range(200):
        costs.observe(1, CHAIN, chain + 1.0)
    assert costs(1, CHAIN) == pytest.approx(chain + 1.0)
    assert costs(1, Window()) == pytest.approx(single + 1.0, abs=0.1), "texts are longer for all windows"
    costs.observe(1, Window(), single)
    assert costs(1, Window()) == pytest.approx(single), "of a window not seen for long, the newest step counts"
    assert costs(1, Window.of(4, 4)) == pytest.approx(tree + 1.0, abs=0.1)
    costs.observe(1, CHAIN, 1e9)
    assert costs(1, CHAIN) < 2 * (chain + 1.0), "one slow step says little"


@pytest.mark.parametrize("further", [3.0, 10.0])
def test_windows_that_cost_more_than_was_measured_stop(further: float) -> None:
    machine = Captured(more=0.05)
    machine.further = further
    decoding = decoding_of(machine, [0.5, 0.2, 0.1])
    decoding.steps(2000)
    decoding.tokens, decoding.seconds = 0, 0.0
    decoding.steps(3000)
    best = max(tokens_per_forward(each, decoding.rates) / machine.seconds(1, each) for each in (Window(), *WINDOWS))
    assert decoding.tokens / decoding.seconds > 0.95 * best
    assert decoding.tokens / decoding.seconds > 0.98, "slower than single tokens"


@pytest.mark.parametrize("more", [0.03, 0.05, 0.1])
def test_windows_get_wider_when_text_gets_easier(more: float) -> None:
    """What hard text said of later offsets is forgotten, although narrow windows do not reach them."""
    machine, easy = Captured(more=more), [0.95, 0.9, 0.86]
    decoding = decoding_of(machine, [0.6, 0.2, 0.05])
    decoding.steps(6000)
    decoding.rates = easy
    decoding.steps(8000)
    decoding.tokens, decoding.seconds = 0, 0.0
    decoding.steps(2000)
    best = max(tokens_per_forward(each, easy) / machine.seconds(1, each) for each in (Window(), *WINDOWS))
    assert decoding.tokens / decoding.seconds > 0.97 * best


def test_one_slow_step_of_a_window_is_forgotten() -> None:
    machine = Captured()
    costs = CapturedCosts(machine)
    tree, single = Window.of(4, 4), Window()
    usual = costs(1, tree)
    costs.observe(1, CHAIN, costs(1, CHAIN))
    costs.observe(1, tree, 2 * usual)
    assert costs(1, tree) == pytest.approx(2 * usual)
    for _ in range(2000):
        costs.observe(1, CHAIN, costs(1, CHAIN))
    assert costs(1, tree) == pytest.approx(usual, rel=0.05)
    assert costs(1, single) < costs(1, CHAIN) < costs(1, tree)


@pytest.mark.parametrize("options", [{"dial": Dial("one-token")}, {"window": CHAIN}], ids=["one-token", "a window"])
def test_costs_are_not_measured_for_requests_without_a_choice(options: dict) -> None:
    """That takes a while, and nobody needs them."""
    machine = Captured()
    decoding = decoding_of(machine, GOOD)
    request = Request([1, 2], **{"dial": Dial("exact"), "block_size": 4, **options})
    decoding.sequences = [Sequence.of(request, tiny_checkpoint("llama"))]
    for _ in range(20):
        window = decoding.policy.choose(decoding.sequences)
        decoding.costs.observe(1, window, 1.0)
        decoding.policy.observe_step([window], 1, 1.0)
    assert not machine.timed


def test_longer_texts_than_were_measured_stop_no_windows() -> None:
    machine = Captured()
    machine.later = 20.0
    decoding = decoding_of(machine, GOOD)
    assert sum(not each.groups for each in decoding.steps(200)) < 5


def test_windows_stay_where_they_pay() -> None:
    machine = Captured()
    machine.later = 2.0
    decoding = decoding_of(machine, GOOD)
    windows = decoding.steps(2000)
    assert sum(not window.groups for window in windows) < 20
    assert sum(not window.groups for window in windows[-600:]) == 1, "one step of single tokens shows what they cost"
