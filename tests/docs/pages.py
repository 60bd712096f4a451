"""What a page holds: blocks of code, the commands of a shell block, and the text around them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^\*(?P<needs>Needs [^*\n]+?)[.:]?\*\n\n)?^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    needs: str | None  # as the page says in the line above the block


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start("code")) + 1, found["language"], found["code"], found["needs"])
        for found in BLOCK.finditer(text)
    ]


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text())


def commands(code: str) -> list[str]:
    """The commands of a shell block, each with all its lines."""
    found, begun = [], ""
    for line in code.splitlines(keepends=True):
        begun += line
        try:
            whole = shlex.split(begun, comments=True)
        except ValueError:  # inside a quotation
            continue
        if not line.endswith("\\\n"):
            found += [begun.strip()] if whole else []
            begun = ""
    assert not begun, f"this does not end: {begun}"
    return found


def words(command: str) -> list[str]:
    """The words of a command, without settings of the environment before it."""
    split = shlex.split(command.replace("\\\n", " "), comments=True)
    return split[next(number for number, word in enumerate(split) if not re.match(r"[A-Z_]+=", word)) :]
