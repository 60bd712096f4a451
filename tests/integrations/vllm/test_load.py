"""Masks per window, by what steps take on machines that are simulated."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from mars.integrations.vllm.load import PATIENCE, MasksByLoad

RATES = (0.75, 0.55, 0.4)  # of drafts that pass, by offset


class Machine:
    """Steps whose further tokens cost what is said, once there are more than ``free`` in a step."""

    def __init__(self, free: int, more: float, seed: int = 0) -> None:
        self.free, self.more = free, more
        self.draw = random.Random(seed)
        self.drafts = [0]
        self.masks = 0  # of the step before

    def step(self, sequences: int, masks: int) -> tuple[int, float]:
        """Tokens and seconds of a step; after a change of length nobody has drafts."""
        if masks != self.masks or len(self.drafts) != sequences:
            self.drafts, self.masks = [0] * sequences, masks
        written = 0
        for index, count in enumerate(self.drafts):
            passed = next((n for n in range(count) if self.draw.random() > RATES[n]), count)
            self.drafts[index] = masks if passed == count else 0
            written += 1 + passed
        fed = sequences * (1 + 2 * masks)
        return written, (1 + self.more * max(0, fed - self.free)) * self.draw.uniform(0.97, 1.03)


def run(chosen: MasksByLoad, machine: Machine, sequences: int, steps: int) -> tuple[float, Counter[int]]:
    """Tokens per second, and how often windows had how many masks; the next step is scheduled one ahead."""
    tokens, seconds, used, coming = 0, 0.0, Counter[int](), chosen(sequences)
    for _ in range(steps):
        now, coming = coming, chosen(sequences)
        written, taken = machine.step(sequences, now)
        chosen.observe(sequences, now, written, taken)
        tokens, seconds, used[now] = tokens + written, seconds + taken, used[now] + 1
    return tokens / seconds, used


def best_of(machine: Machine, sequences: int) -> float:
    return max(run(MasksByLoad(lambda _, m=masks: m), machine, sequences, 400)[0] for masks in (0, 1, 3))


@pytest.mark.parametrize("guess", [0, 1, 3])
@pytest.mark.parametrize(("free", "more"), [(300, 0.004), (100, 0.01), (10**9, 0.0), (8, 0.1)])
@pytest.mark.parametrize("sequences", [1, 8, 50, 200])
def test_the_fastest_length_is_found(sequences: int, free: int, more: float, guess: int) -> None:
    machine = Machine(free, more)
    chosen = MasksByLoad(lambda _: guess, (0, 1, 3))
    run(chosen, machine, sequences, 6000 if sequences < 8 else 1500)
    speed, _ = run(chosen, machine, sequences, 6000 if sequences < 8 else 2000)
    assert speed > 0.94 * best_of(Machine(free, more), sequences)


def test_trials_become_rare() -> None:
    machine, chosen = Machine(10**9, 0.0), MasksByLoad(lambda _: 3, (0, 1, 3))
    used = [run(chosen, machine, 32, 1000)[1] for _ in range(6)]
    assert used[0][3] < used[-1][3] and used[-1][3] >= 980


def test_what_was_fastest_may_change() -> None:
    chosen = MasksByLoad(lambda _: 3, (0, 1, 3))
    run(chosen, Machine(10**9, 0.0), 32, 1000)
    run(chosen, Machine(32, 0.1), 32, 4000)
    assert run(chosen, Machine(32, 0.1), 32, 500)[1][0] > 450


def test_nothing_is_tried_that_has_no_graph() -> None:
    chosen = MasksByLoad(lambda _: 0, (0, 1, 3), most_tokens=100)
    assert run(chosen, Machine(10**9, 0.0), 32, 2000)[1].keys() == {0, 1}
    assert run(chosen, Machine(10**9, 0.0), 64, 2000)[1].keys() <= {0, 1}
    assert run(chosen, Machine(10**9, 0.0), 64, 2000)[1].keys() == {0}


def test_a_slow_step_says_little() -> None:
    machine, chosen = Machine(10**9, 0.0), MasksByLoad(lambda _: 3, (0, 3))
    run(chosen, machine, 32, 50)
    for _ in range(3):
        chosen.observe(32, 3, 32, 1000.0)
        used = run(chosen, machine, 32, 400)[1]
        assert used[3] > 0.9 * 400


def test_what_a_user_says_is_not_measured() -> None:
    """Fewer at once, more only after a while."""
    chosen = MasksByLoad(lambda sequences: 0 if sequences > 8 else 3)
    assert [chosen(4), chosen(9)] == [3, 0]
    assert [chosen(8) for _ in range(PATIENCE)] == [0] * (PATIENCE - 1) + [3]
    assert run(chosen, Machine(8, 1.0), 8, 500)[1] == {3: 500}
