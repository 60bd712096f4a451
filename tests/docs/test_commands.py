"""Every command and block of code in README.md, CONTRIBUTING.md and docs/ is run, or parsed by what would run it.

``*Needs a GPU:*`` above a block tells readers and tests that it cannot run everywhere. ``pytest -v -k level`` lists all
steps with their levels:

- run: a page's steps run in order in one folder, Python in one namespace, clients against a real server with the
  built-in model; ``YOUR/MODEL`` is a tiny model;
- parsed: the command line, the compiler, the Makefile or the recipe's reader takes it;
- Needs …: nothing here knows it, and the page says what it needs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from mars.cli.app import app
from mars.method.acceptance import Dial
from mars.models.builtin import NAME
from mars.training.recipe import parse_recipe
from tests.docs.pages import PAGES, ROOT, Block, blocks, commands, prose, words
from tests.serving.conftest import serving

NOT_RUN = {
    "serve": "it runs until it is stopped; clients have a server",
    "demo": "it has a test of its own",
    "verify": "it has a test of its own",
    "eval": "it needs benchmarks",
    "bench": "it takes minutes",
    "report": "it needs results",
}
"""Commands of ``mars`` that are parsed alone, and why"""
SMALLER = {
    r"--own-prompts \d+": "--own-prompts 200",
    r"num_train_epochs: \d+": "max_steps: 5",
    r"compile: true": "compile: false",
}
"""What would take too long with a tiny model"""
TEXT = ("", "text", "bibtex")
"""Languages of blocks that are not code"""
COMMANDS = typer.main.get_command(app)


@dataclass(frozen=True)
class Step:
    """A command of a shell block, or a block in another language."""

    block: Block
    code: str

    @property
    def level(self) -> str | None:
        """How far the step is tested; None if nobody knows what to do with it."""
        language, needs = self.block.language, self.block.needs
        if language == "sh":
            return self._level_of_command()
        if language == "python":
            return "parsed" if needs else "run"
        if language == "yaml":
            return "run" if "stages:" in self.code else "parsed"
        if language in TEXT:
            return "text"
        return needs

    def _level_of_command(self) -> str | None:
        name, *rest = words(self.code)
        if name in ("make", "pip"):
            return "parsed"
        if name == "mars":
            why_not = self.block.needs or NOT_RUN.get(rest[0])
            if rest[0] == "train" and f"# {rest[1]}\n" not in self.block.page.read_text():
                why_not = "the page has no recipe"
            return f"parsed, {why_not}" if why_not else "run"
        known = name == "curl" or (name == "python" and rest[0].startswith("benchmarks/"))
        return "run" if known and not self.block.needs else self.block.needs

    def __str__(self) -> str:
        where = f"{self.block.page.relative_to(ROOT)}:{self.block.line}"
        return f"{where}: {' '.join(self.code.split())[:60]}: {self.level}"


def steps(page: Path) -> list[Step]:
    return [
        Step(block, code)
        for block in blocks(page)
        for code in (commands(block.code) if block.language == "sh" else [block.code])
    ]


STEPS = [step for page in PAGES for step in steps(page)]


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_step_has_a_level_and_can_be_parsed(step: Step) -> None:
    assert step.level, f"{step.block.page}, line {step.block.line}: run it here, or say what it needs: {step.code}"
    if step.block.language == "python":
        compile(step.code, str(step), "exec")
    elif step.block.language == "yaml":
        content = yaml.safe_load(step.code)
        if "stages" in content:
            parse_recipe(content)
    elif step.block.language == "sh":
        parse_command(words(step.code))
    elif step.block.language in TEXT:
        assert not re.search(r"(?m)^(\$ |mars|pip|curl|make|python) ", step.code), "commands are in blocks with `sh`"


def parse_command(command: list[str]) -> None:
    """Fail if the command line, the Makefile or the package does not know what is asked."""
    name, *rest = command
    if name == "mars":
        for key, value in parameters(rest).items():
            if key in ("dial", "dials", "floor") and value not in (None, "auto"):
                for each in value.split(","):
                    Dial.parse(each.split()[0])
    elif name == "make":
        subprocess.run(["make", "--dry-run", *rest], cwd=ROOT, check=True, capture_output=True)
    elif name == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert rest[0] == "install" and set(re.findall(r"(?<=[\[,])\w+", " ".join(rest))) <= extras.keys()


def parameters(arguments: list[str]) -> dict[str, object]:
    """What the command line makes of arguments, without running the command."""
    try:
        with COMMANDS.make_context("mars", list(arguments)) as context:
            name, command, rest = COMMANDS.resolve_command(context, arguments)
            return command.make_context(name, rest, parent=context).params
    except typer.Exit:  # --help and the like answer at once
        return {}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving("--rows", 4, model=NAME, name=NAME) as address:
        yield address


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(step.level == "run" for step in steps(page))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_page_does_what_it_says(
    page: Path, your_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc"}\n{"prompt": "face"}\n')
    namespace: dict[str, object] = {"__name__": "__main__"}
    for step in steps(page):
        if step.level != "run":
            continue
        code = step.code.replace("YOUR/MODEL", str(your_model))
        for large, small in SMALLER.items():
            code = re.sub(large, small, code)
        if "http://127.0.0.1:8000" in code:
            code = code.replace("http://127.0.0.1:8000", request.getfixturevalue("server"))
        if step.block.language == "python":
            exec(compile(code, str(step), "exec"), namespace)
        elif step.block.language == "yaml":
            named = re.match(r"# (\S+\.yaml)\n", code)
            assert named, f"{step}: name the recipe's file in a comment above it"
            (tmp_path / named[1]).write_text(code)
        else:
            run_command(words(code), request)


def run_command(command: list[str], request: pytest.FixtureRequest) -> None:
    if command[0] == "mars":
        if command[1] == "dial" and "--url" not in command:
            command += ["--url", request.getfixturevalue("server")]
        done = CliRunner().invoke(app, command[1:], input="")
        assert done.exit_code == 0, (command, done.output, done.exception)
        return
    if command[0] == "curl":
        command.insert(1, "-fsS")
    elif command[0] == "python":
        command[0] = sys.executable
    subprocess.run(command, env=os.environ, check=True, timeout=120)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_files_named_in_the_text_are_there(page: Path) -> None:
    for code in re.findall(r"(?<!`)`([^`]+)`", prose(page)):
        name, *rest = code.split()
        if name == "mars" and rest and rest[0].isalpha():
            command = COMMANDS.commands[rest[0]]
            known = {option for parameter in command.params for option in parameter.opts}
            assert known >= set(re.findall(r"--[a-z-]+", code.partition(" -- ")[0])), code
        elif name == "make" and rest:
            parse_command([name, *rest])
        elif page.name != "lab-log.md" and re.match(r"(benchmarks|docs|recipes|src|tests)/", name):
            assert (ROOT / name).exists(), code
