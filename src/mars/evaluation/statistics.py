"""Confidence intervals of scores, and tests of their differences."""

from collections.abc import Sequence
from math import comb, sqrt

Z = 1.959963984540054  # two-sided 95 %


def wilson(successes: float, n: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson). ``successes`` may be a sum of scores from 0 to 1: then it is a bit wide."""
    if n == 0:
        return 0.0, 1.0
    share, spread = successes / n, Z * Z / n
    centre = share + spread / 2
    half = Z * sqrt(max(share * (1 - share), 0.0) / n + spread / (4 * n))
    return max((centre - half) / (1 + spread), 0.0), min((centre + half) / (1 + spread), 1.0)


def paired(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Scores of the same items: on how many mine is better or worse, and the mean difference.

    ``low`` and ``high`` are a 95 % interval (Bonett and Price: as if one more item were won and one lost), ``p`` is the
    exact McNemar test, which for scores between 0 and 1 is the sign test.
    """
    differences = [each - other for each, other in zip(mine, theirs, strict=True)]
    better, worse = sum(each > 0 for each in differences), sum(each < 0 for each in differences)
    decided, n = better + worse, len(differences) + 2
    mean = sum(differences) / n
    half = Z * sqrt((2 + sum(each * each for each in differences)) / n - mean * mean) / sqrt(n)
    return {
        "better": better,
        "worse": worse,
        "difference": sum(differences) / max(len(differences), 1),
        "low": max(mean - half, -1.0),
        "high": min(mean + half, 1.0),
        "p": min(2 * sum(comb(decided, k) for k in range(min(better, worse) + 1)) / 2**decided, 1.0),
    }
