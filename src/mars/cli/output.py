"""What the commands print: text that is marked by forward, and remarks beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.text import Text

if TYPE_CHECKING:
    from mars.core.output import RequestOutput

COLOURS = ("color(32)", "color(166)", "color(28)", "color(163)")
"""Of forwards, in turns: readable on black and on white"""
BAR = "│"
"""Between forwards, where there are no colours"""


def stdout() -> Console:
    return Console(highlight=False)


def has_colours(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def colour(forward: int) -> str:
    return COLOURS[forward % len(COLOURS)]


def by_forward(console: Console, pieces: Sequence[str]) -> Text:
    """A text, given as the piece of each forward, with these marked."""
    if has_colours(console):
        return Text.assemble(*((piece, colour(forward)) for forward, piece in enumerate(pieces)))
    return Text(BAR.join(filter(None, pieces)))


def print_pieces(console: Console, pieces: Iterable[str], *, marked: bool) -> None:
    """Print a text as it comes, unwrapped, marked by forward or not."""
    has_bars, begun = marked and not has_colours(console), False
    for forward, piece in enumerate(pieces):
        if piece and has_bars and begun:
            console.out(BAR, end="")
        begun = begun or bool(piece)
        console.out(piece, style=colour(forward) if marked else None, end="", highlight=False)
    console.out()


def remark(console: Console, what: RenderableType, style: str = "dim") -> None:
    """Print something that is not the model's: wrapped at words on a terminal, not at all in a file."""
    console.print(what, style=style, markup=False, soft_wrap=not console.is_terminal)


def summary(answer: RequestOutput) -> str:
    return (
        f"{answer.num_tokens} tokens in {answer.forwards} forwards: {answer.tokens_per_forward:.2f} per forward, "
        f"{answer.tokens_per_second:.1f} per second, agreement {answer.agreement:.2f}, dial {answer.dial}"
    )
