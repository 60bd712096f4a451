"""docs/results.md shows what the files in results/ say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "results").glob("*.json"))


def render(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks" / "render_results.py", *arguments]
    return subprocess.run([str(each) for each in command], text=True, capture_output=True, timeout=60, check=False)


def test_the_page_is_up_to_date() -> None:
    done = render("--check")
    assert done.returncode == 0, done.stderr


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
