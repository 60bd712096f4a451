"""A recorded race as a moving picture: an SVG in which both sides write at the pace they had, slowed down.

The server sends text at most 25 times a second, so the forwards of one message are spread evenly over the time since
the message before. Software that does not move pictures shows the finish.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2

Json = dict[str, Any]

MARGIN, PANEL = 10, 420
WIDTH = 2 * (MARGIN + PANEL + 10)
COLUMNS = 50  # characters in a line
WRAPPING: Json = {"drop_whitespace": False, "replace_whitespace": False, "expand_tabs": False}  # all letters stay
DURATION, HOLD = 9.0, 4.0  # seconds of the slower side, and of the finish
THEMES: dict[str, Json] = {
    "light": {
        "paper": "#fcfaf8",
        "line": "#d9d0c9",
        "ink": "#241d19",
        "faint": "#655b54",
        "bars": ["#655b54", "#0072b2"],
        "tints": ["#0072b2", "#b35f00", "#a8478a", "#7a6b00"],
    },
    "dark": {
        "paper": "#171311",
        "line": "#40362f",
        "ink": "#efe8e3",
        "faint": "#b3a79f",
        "bars": ["#b3a79f", "#56b4e9"],
        "tints": ["#56b4e9", "#ff9f2e", "#dd8cc0", "#e6d93c"],
    },
}


def rate(side: Json) -> float:
    """Tokens per second from the first message on, whose tokens do not count."""
    begin = side["pieces"][0][0]
    return (side["tokens"] - sum(tokens for at, _, tokens in side["pieces"] if at == begin)) / side["seconds"]


def ratio(race: Json) -> float:
    """How many times as fast the second side was as the first."""
    first, second = map(rate, race["answers"])
    return second / first


def slowed(race: Json) -> float:
    """How many times slower than in reality the picture is."""
    return DURATION / max(side["seconds"] for side in race["answers"])


def finish(race: Json) -> str:
    one, other = ("".join(text for _, text, _ in side["pieces"]) for side in race["answers"])
    return f"{ratio(race):.1f} times as fast, {'the same text' if one == other else 'another text'}"


def picture(race: Json, theme: str) -> str:
    """The SVG."""
    sides = [
        side
        | {"rate": rate(side), "per_forward": side["tokens"] / side["forwards"]}
        | {"times": list(_times(side["pieces"])), "lines": _lines([text for _, text, _ in side["pieces"]])}
        for side in race["answers"]
    ]
    height = 144 + 18 * max(len(side["lines"]) for side in sides)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    return environment.get_template("race.svg.jinja").render(
        race=race,
        sides=sides,
        finish=finish(race),
        slowed=slowed(race),
        colour=THEMES[theme],
        width=WIDTH,
        panel=PANEL,
        margin=MARGIN,
        height=height,
        duration=DURATION,
        hold=HOLD,
    )


def _times(pieces: Sequence[Sequence[Any]]) -> Iterator[float]:
    """When each forward is shown, from the first message on."""
    begin = before = pieces[0][0]
    for at, group in groupby(pieces, key=lambda piece: piece[0]):
        count = len(list(group))
        yield from (before + (at - before) * number / count - begin for number in range(1, count + 1))
        before = at


def _lines(texts: Sequence[str]) -> list[list[tuple[int, str]]]:
    """Lines of at most `COLUMNS` characters; each is a list of texts with the number of their forward."""
    forwards = iter([number for number, text in enumerate(texts) for _ in text])
    lines = []
    for line in "".join(texts).split("\n"):
        for part in textwrap.wrap(line, COLUMNS, **WRAPPING) or [""]:
            letters = [(next(forwards), letter) for letter in part]
            groups = groupby(letters, key=lambda each: each[0])
            lines.append([(forward, "".join(letter for _, letter in group)) for forward, group in groups])
        next(forwards, None)  # the line break
    return lines
