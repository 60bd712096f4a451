"""Files that a killed run leaves in order, so that it can be continued."""

import json
import os
from pathlib import Path
from typing import Any, TextIO


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once: a reader sees the old content or the new one."""
    scratch = path.with_name(f"{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file, if there is one; a kill may have cut off the last line."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.is_file() else []


def open_lines(path: Path) -> TextIO:
    """Open a JSONL file to append to it. A last line that was cut off is removed."""
    if path.is_file():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")
