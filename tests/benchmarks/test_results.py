"""README.md, its figures, docs/results.md and the page's welcome show what the files in results/ say."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "results").glob("*.json"))


def render(*arguments: object, script: str = "render_results.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks" / script, *arguments]
    return subprocess.run([str(each) for each in command], text=True, capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize("script", ["render_results.py", "render_readme.py", "render_paper.py"])
def test_the_page_is_up_to_date(script: str) -> None:
    done = render("--check", script=script)
    assert done.returncode == 0, done.stderr


def test_a_stale_readme_is_reported(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text((ROOT / "README.md").read_text().replace("times as fast", "times as slow"))
    done = render("--check", "--page", page, script="render_readme.py")
    assert done.returncode == 1 and "times as fast" in done.stderr


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_moving_picture_is_the_recorded_race(theme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from race_picture import picture

    race = json.loads((ROOT / "results" / "race-cpu.json").read_text())
    drawn = (ROOT / "docs" / "figures" / f"race-{theme}.svg").read_text()
    assert drawn == picture(race, theme) and len(drawn) < 2e6
    for answer, side in zip(race["answers"], drawn.split("<g ")[1:], strict=True):
        shown = "".join(re.findall(r'<tspan class="t\d">(.*?)<set', side))
        assert html.unescape(shown) == "".join(text for _, text, _ in answer["pieces"]).replace("\n", "")


def test_the_welcome_shows_the_recorded_race() -> None:
    shown = ROOT / "src" / "mars" / "serving" / "page" / "race.json"
    assert shown.read_bytes() == (ROOT / "results" / "race-cpu.json").read_bytes()


def test_every_table_has_a_marker() -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    tables = re.findall(r"^\| --- ", page, re.MULTILINE)
    assert len(tables) == page.count("<!-- table: ") > 5


def test_a_changed_figure_is_reported_and_rendered(tmp_path: Path) -> None:
    results, page = tmp_path / "results", tmp_path / "results.md"
    shutil.copytree(ROOT / "results", results)
    shutil.copy(ROOT / "docs" / "results.md", page)
    options = ("--results", results, "--page", page)
    file = results / "engine-h200.json"
    found = json.loads(file.read_text())
    next(row for row in found["rows"] if row.get("dial") == "exact")["tokens_per_second"] = 1999.4
    file.write_text(json.dumps(found))
    done = render(*options, "--check")
    assert done.returncode == 1 and "**1,999**" in done.stderr
    assert "1,999" not in page.read_text()  # a check writes nothing
    assert render(*options).returncode == 0
    assert "**1,999**" in page.read_text()
    assert render(*options, "--check").returncode == 0


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_says_where_its_figures_come_from(file: Path) -> None:
    found = json.loads(file.read_text())
    for run in [found["provenance"]] if "provenance" in found else found["runs"]:
        assert {"command", "commit", "date", "machine", "versions"} <= run.keys()
