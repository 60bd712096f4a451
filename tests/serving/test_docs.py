"""The commands of docs/guides/serving.md do what the page says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.serving.conftest import MODEL

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "serving.md"
COMMANDS = [
    command
    for block in re.findall(r"```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for command in re.findall(r"^((?:curl|mars dial)[^\n]*(?:\n(?!curl|mars).+)*)", block, re.MULTILINE)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_docs(server: str, command: str) -> None:
    mine = command.replace("http://127.0.0.1:8000", server).replace("smollm2-135m", MODEL)
    mine = mine.replace("mars dial", f"{sys.executable} -m mars dial --url {server}").replace("curl ", "curl -fsS ")
    mine = mine.replace("Why is the sky blue?", "abc")  # the letters that this model knows
    done = subprocess.run(
        mine,
        shell=True,
        text=True,
        capture_output=True,
        check=False,
        executable="/bin/bash",
        env=os.environ,
        timeout=60,
    )
    if "json_schema" in command:  # this model has no tokens for JSON, which is told
        assert "returned error: 500" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    if "chat/completions" in command:
        assert json.loads(done.stdout)["choices"][0]["message"]["content"]
    else:
        assert re.search(r"exact|relaxed=0.3", done.stdout)


def test_there_are_commands() -> None:
    assert sum("curl" in each for each in COMMANDS) >= 2 and sum("mars dial" in each for each in COMMANDS) >= 2


def test_the_dashboard_shows_what_there_is(server: str) -> None:
    dashboard = json.loads((PAGE.parents[1] / "grafana.json").read_text())
    with urllib.request.urlopen(f"{server}/metrics") as response:
        there = response.read().decode()
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:vllm|mars):\w+", target["expr"])
    }
    assert len(asked) > 10
    for name in asked:
        assert name in there, name
