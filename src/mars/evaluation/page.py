"""The contents of a report, and its two renderings: `report.md` and `report.html` are the templates."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
from markupsafe import Markup

from mars.evaluation import plots
from mars.evaluation.results import Origin


class Cell(NamedTuple):
    text: str = "–"
    interval: str = ""
    notes: Sequence[str] = ()
    is_significant: bool = False


class Line(NamedTuple):
    title: str
    cells: Sequence[Cell]
    tags: Sequence[int]


class Table(NamedTuple):
    title: str
    caption: str
    head: Sequence[Cell]  # without the column of titles
    lines: Sequence[Line]


class Picture(NamedTuple):
    name: str
    title: str
    tags: Sequence[int]
    plot: plots.Plot


class Answers(NamedTuple):
    """Answers of several dials to one prompt, each as the texts of its forwards."""

    title: str
    prompt: str | None
    pieces: dict[str, list[str]]
    tags: Sequence[int]


class Section(NamedTuple):
    title: str
    text: str
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    answers: Sequence[Answers] = ()

    @property
    def contents(self) -> str:
        """What is in it: ``2 charts, 1 table``; nothing if it is empty."""
        parts = {"chart": self.pictures, "table": self.tables, "example": self.answers}
        return ", ".join(count(len(found), name) for name, found in parts.items() if found)


class Page(NamedTuple):
    title: str
    facts: str
    verdict: Sequence[str]
    chart: Picture | None
    findings: Sequence[str]
    sections: Sequence[Section]
    origins: Sequence[Origin]


def count(number: int, name: str) -> str:
    return f"{number:,} {name}" + "s" * (number != 1)


def render(page: Page, plot_folder: Path) -> dict[str, str]:
    """The texts of both files by their names; the plots are drawn into a folder, and stand in the HTML as SVG."""
    pictures = [*filter(None, [page.chart]), *(each for section in page.sections for each in section.pictures)]
    drawn = {each.name: _draw(each, plot_folder) for each in pictures}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"plain": _plain, "count": count}
    names = ("report.md", "report.html")
    return {name: environment.get_template(name).render(page=page, drawn=drawn) for name in names}


def _draw(picture: Picture, folder: Path) -> dict[str, Markup]:
    """Write a plot in every theme; returns the SVGs with ids that are unique in the page."""
    drawn = {}
    for theme in plots.THEMES:
        name = f"{picture.name}-{theme}"
        svg = plots.save(picture.plot, folder / name, theme)[0].read_text(encoding="utf-8")
        drawn[theme] = Markup(re.sub(r'( id="|"#|url\(#)', rf"\g<1>{name}-", svg[svg.index("<svg") :]))
    return drawn


def _plain(text: str) -> str:
    """A text with all that Markdown would interpret escaped."""
    return re.sub(r"([\\`*_\[\]<>|~#$&])", r"\\\1", " ".join(text.split()))
