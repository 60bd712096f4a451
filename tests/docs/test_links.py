"""Links of the site and of README.md lead somewhere, and pages fetch nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown.extensions.toc import slugify

from tests.docs.pages import PAGES, ROOT, prose


class Page(HTMLParser):
    """A page's anchors, its links, and what a browser fetches to show it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.anchors, self.links, self.fetched = set[str](), set[str](), set[str]()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attributes}
        self.anchors |= {named[name] for name in ("id", "name") if name in named}
        self.fetched |= {named["src"]} if "src" in named else set()
        if "href" in named:
            (self.fetched if tag == "link" else self.links).add(named["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return {path: Page(path) for path in folder.rglob("*.html") if path.name != "404.html"}


def test_the_site_has_every_page(site: dict[Path, Page]) -> None:
    home = {path.name for path in site}
    assert {page.with_suffix(".html").name for page in PAGES if page.parent != ROOT} == home


def test_links_within_the_site_lead_somewhere(site: dict[Path, Page]) -> None:
    for page in site.values():
        for link in page.links | page.fetched:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            assert target.is_file(), f"{page.path.name}: {link}"
            if parts.fragment and target in site and target != page.path:
                assert unquote(parts.fragment) in site[target].anchors, f"{page.path.name}: {link}"


def test_the_site_shows_itself_without_other_servers(site: dict[Path, Page]) -> None:
    for page in site.values():
        assert not {each for each in page.fetched if urlsplit(each).netloc}
        for sheet in page.path.parent.rglob("*.css"):
            assert not re.search(r"url\(\W*(https?:)?//", sheet.read_text())


def test_a_picture_follows_the_palette(site: dict[Path, Page]) -> None:
    [results] = [page for page in site.values() if page.path.name == "results.html"]
    shown = [each for each in results.fetched if "frontier" in each]
    assert sorted(each.rpartition("#")[2] for each in shown) == ["only-dark"] * 2 + ["only-light"] * 2


@pytest.mark.parametrize("page", sorted({*PAGES, *ROOT.glob("*.md")}), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_as_a_code_host_shows_them(page: Path) -> None:
    """Relative links lead to files and headings; the others use https, as nothing here can follow them."""
    text = prose(page)
    for link in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"|<(https?:[^>]+)>", text):
        [url] = filter(None, link)
        parts = urlsplit(url)
        if parts.scheme:
            local = parts.hostname == "127.0.0.1"
            assert local or (parts.scheme == "https" and re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc)), url
            continue
        target = page.parent / parts.path if parts.path else page
        assert target.exists(), url
        if parts.fragment and target.suffix == ".md":
            headings = re.findall(r"(?m)^#+ (.+)$", target.read_text())
            assert parts.fragment in {slugify(heading.replace("`", ""), "-") for heading in headings}, url
