"""A page of tables, pictures and answers, in Markdown and in HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import jinja2
from markupsafe import Markup

from mars.evaluation import plots
from mars.evaluation.results import Origin


@dataclass(frozen=True, slots=True)
class Cell:
    text: str = "–"
    error: str = ""
    notes: Sequence[str] = ()
    is_sure: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    title: str
    cells: Sequence[Cell]
    tags: Sequence[int]


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    caption: str
    head: Sequence[Cell]
    """Over the cells; nothing is over the titles"""
    lines: Sequence[Line]


@dataclass(frozen=True, slots=True)
class Picture:
    name: str
    title: str
    tags: Sequence[int]
    plot: plots.Plot


@dataclass(frozen=True, slots=True)
class Answers:
    """Of several dials to one prompt, each in the pieces that its forwards wrote."""

    title: str
    prompt: str | None
    pieces: dict[str, list[str]]
    tags: Sequence[int]


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    text: str
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    answers: Sequence[Answers] = ()

    def __bool__(self) -> bool:
        return bool(self.tables or self.pictures or self.answers)


@dataclass(frozen=True, slots=True)
class Page:
    facts: str
    summary: Sequence[str]
    sections: Sequence[Section]
    origins: Sequence[Origin]


def count(number: int, name: str) -> str:
    return f"{number:,} {name}" + "s" * (number != 1)


def slug(text: str) -> str:
    return re.sub(r"[^\w-]+", "-", text)


def draw(picture: Picture, folder: Path) -> dict[str, Markup]:
    """Write the files; returns the SVGs by theme, their ids made unique, to stand in one page."""
    drawn = {}
    for theme in plots.THEMES:
        name = f"{picture.name}-{theme}"
        svg = plots.save(picture.plot, folder / name, theme)[0].read_text(encoding="utf-8")
        drawn[theme] = Markup(re.sub(r'( id="|"#|url\(#)', rf"\g<1>{name}-", svg[svg.index("<svg") :]))
    return drawn


def html(page: Page, drawn: dict[str, dict[str, Markup]]) -> str:
    source = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source).render(page=page, drawn=drawn)


def markdown(page: Page) -> str:
    parts = ["# Accuracy and speed", _text(page.facts), "\n".join(f"- {_text(each)}" for each in page.summary)]
    for section in page.sections:
        parts += [f"## {section.title}", _text(section.text)]
        for picture in section.pictures:
            parts += [_picture(picture), f"{_text(picture.title)} {_tags(picture.tags)}"]
        for table in section.tables:
            head = [" ", *map(_cell, table.head), " "]
            lines = [[_text(line.title), *map(_cell, line.cells), _tags(line.tags)] for line in table.lines]
            parts += [f"**{_text(table.title)}.** {_text(table.caption)}", _grid(head, lines)]
        for answers in section.answers:
            parts.append(f"### {_text(answers.title)} {_tags(answers.tags)}")
            if answers.prompt is not None:
                parts += ["<details><summary>prompt</summary>", _verbatim(answers.prompt), "</details>"]
            for dial, pieces in answers.pieces.items():
                parts += [
                    f"{_text(dial)}, {count(len(pieces), 'forward')}, with │ between them:",
                    _verbatim("│".join(pieces)),
                ]
    parts.append("## Where the numbers come from")
    if page.origins:
        lines = [
            [f'<a id="source-{each.number}"></a>{each.number}', *map(_text, each.facts.values())]
            for each in page.origins
        ]
        parts.append(_grid([" ", *page.origins[0].facts], lines, "---"))
    return "\n\n".join(parts) + "\n"


def _text(text: str) -> str:
    """What others wrote, so that it means nothing to Markdown."""
    return re.sub(r"([\\`*_\[\]<>|~#$&])", r"\\\1", " ".join(text.split()))


def _verbatim(text: str) -> str:
    return "\n".join(f"    {line}" for line in re.split(r"\r\n?|\n", text))


def _tags(tags: Sequence[int]) -> str:
    return " ".join(f"[\\[{tag}\\]](#source-{tag})" for tag in tags)


def _cell(cell: Cell) -> str:
    text = _text(f"{cell.text} {cell.error}")
    return "<br>".join([f"**{text}**" if cell.is_sure else text, *map(_text, cell.notes)])


def _grid(head: Sequence[str], lines: Sequence[Sequence[str]], rule: str = "---:") -> str:
    rules = ["---", *[rule] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rules, *lines))


def _picture(picture: Picture) -> str:
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="plots/{picture.name}-dark.svg">'
        f'<img alt="{escape(picture.title)}" src="plots/{picture.name}-light.svg"></picture>'
    )
