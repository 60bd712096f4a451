"""The archives that are published: what is in them, and that both give the same installation."""

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

import mars

ROOT = Path(__file__).parents[1]
VERSION = mars.__version__


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, the wheel built from it, and in ``direct`` the wheel built from the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    for options in ([], ["--wheel", "--outdir", str(folder / "direct")]):
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), *options, str(ROOT)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    return folder


def wheel(folder: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(folder / f"mars_decoding-{VERSION}-py3-none-any.whl") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def metadata(built: Path) -> Message:
    return message_from_string(wheel(built)[f"mars_decoding-{VERSION}.dist-info/METADATA"].decode())


def test_the_wheel_has_all_files_of_the_package_and_no_others(built: Path) -> None:
    files = [path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    there = {name for name in wheel(built) if ".dist-info/" not in name}
    assert there == {path.relative_to(ROOT / "src").as_posix() for path in files}
    assert there >= {
        "mars/py.typed",
        "mars/engine/cpu/step.c",
        "mars/evaluation/report.html",
        "mars/evaluation/report.md",
        "mars/evaluation/plots.mplstyle",
        "mars/models/adapters/smollm2-135m/adapter.safetensors",
        "mars/serving/page/index.html",
        "mars/training/card.md",
    }


def test_the_sdist_gives_the_same_wheel_as_the_checkout(built: Path) -> None:
    assert wheel(built) == wheel(built / "direct")


def test_the_sdist_has_what_is_needed_to_test_and_nothing_that_tests_leave(built: Path) -> None:
    with tarfile.open(built / f"mars_decoding-{VERSION}.tar.gz") as archive:
        names = [Path(*Path(name).parts[1:]) for name in archive.getnames()]
    parts = {part for name in names for part in name.parts}
    assert {name.parts[0] for name in names} == {
        *(
            "src",
            "tests",
            "benchmarks",
            "results",
            "recipes",
            "docs",
            "mkdocs.yml",
            "docker",
            "Makefile",
            "pyproject.toml",
        ),
        *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "LICENSE", "PKG-INFO", ".gitignore"),
    }
    assert not parts & {"__pycache__", ".pytest_cache", ".hypothesis", ".venv", "dist"}
    assert not any(part.endswith((".pyc", ".so")) for part in parts)


def test_licence_commands_and_plugins_are_declared(built: Path, metadata: Message) -> None:
    files = wheel(built)
    info = f"mars_decoding-{VERSION}.dist-info"
    assert metadata["Version"] == VERSION and metadata["License-Expression"] == "Apache-2.0"
    assert files[f"{info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    points = files[f"{info}/entry_points.txt"].decode()
    assert "mars = mars.cli:main" in points and "mars = mars.integrations.vllm:register" in points


def test_the_description_links_to_no_file_that_an_index_does_not_have(metadata: Message) -> None:
    text = metadata.get_payload()
    links = re.findall(r"\]\(([^)]*)\)|(?:src|srcset|href)=\"([^\"]*)\"", text)
    assert text.startswith("# MARS") and "https://arxiv.org/abs/2604.07023" in text
    assert [link for pair in links for link in pair if link and not link.startswith("https://")] == []
