import numpy as np
import pytest
from scipy import stats

from mars.evaluation.statistics import paired, wilson


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (0, 20), (7, 20), (20, 20), (1319, 1319), (431, 1319)])
def test_wilson_is_scipys(successes: int, n: int) -> None:
    interval = stats.binomtest(successes, n).proportion_ci(method="wilson")
    assert wilson(successes, n) == pytest.approx((interval.low, interval.high), abs=1e-12)


def test_wilson_takes_fractions_and_nothing_at_all() -> None:
    low, high = wilson(7.5, 20)
    assert wilson(7, 20)[0] < low < 7.5 / 20 < high < wilson(8, 20)[1]
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("better", "worse", "same"), [(0, 0, 5), (1, 0, 0), (12, 3, 85), (3, 12, 0), (600, 650, 69)])
def test_paired_is_the_exact_mcnemar_test(better: int, worse: int, same: int) -> None:
    outcome = paired([1] * better + [0] * worse + [1] * same, [0] * better + [1] * worse + [1] * same)
    p = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert (outcome["better"], outcome["worse"]) == (better, worse)
    assert outcome["p"] == pytest.approx(p)
    assert outcome["difference"] == pytest.approx((better - worse) / (better + worse + same))
    assert -1 <= outcome["low"] <= outcome["difference"] <= outcome["high"] <= 1


def test_interval_is_bonett_and_prices() -> None:
    n, wins, losses = 100, 13 / 102, 4 / 102
    outcome = paired([1] * 12 + [0] * 88, [0] * 12 + [1] * 3 + [0] * 85)
    half = stats.norm.ppf(0.975) * np.sqrt((wins + losses - (wins - losses) ** 2) / (n + 2))
    assert (outcome["low"], outcome["high"]) == pytest.approx((wins - losses - half, wins - losses + half))


def test_interval_of_fractions_is_close_to_students() -> None:
    generator = np.random.default_rng(0)
    mine, theirs = generator.integers(0, 4, (2, 500)) / 3
    outcome = paired(mine.tolist(), theirs.tolist())
    students = stats.ttest_rel(mine, theirs).confidence_interval()
    assert (outcome["low"], outcome["high"]) == pytest.approx((students.low, students.high), abs=2e-3)
    signs = stats.binomtest(int((mine > theirs).sum()), int((mine != theirs).sum()))
    assert outcome["p"] == pytest.approx(signs.pvalue)


def test_intervals_cover_the_truth() -> None:
    generator = np.random.default_rng(1)
    covered = [wilson(int(hits), 50) for hits in generator.binomial(50, 0.1, 2000)]
    assert 0.92 < np.mean([low <= 0.1 <= high for low, high in covered]) < 0.98
    draws = [generator.choice([1, 0, -1], 60, p=[0.15, 0.8, 0.05]) for _ in range(2000)]
    pairs = [paired((draw > 0).tolist(), (draw < 0).tolist()) for draw in draws]
    assert 0.92 < np.mean([pair["low"] <= 0.1 <= pair["high"] for pair in pairs]) < 0.98


def test_paired_needs_the_same_items() -> None:
    assert paired([], [])["p"] == 1.0
    with pytest.raises(ValueError):
        paired([1.0], [])
