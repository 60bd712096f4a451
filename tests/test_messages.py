"""What messages and generated files tell people to install."""

from __future__ import annotations

import re
from pathlib import Path

import mars

SOURCE = Path(mars.__file__).parent


def test_nobody_is_told_to_install_a_name_that_is_not_ours() -> None:
    """MARS is on no index: whoever takes its name there could have their code run."""
    told = [
        (path.name, advice)
        for path in SOURCE.rglob("*")
        if path.suffix in (".py", ".md", ".html")
        for advice in re.findall(r"pip install (\S+)", path.read_text(encoding="utf-8"))
    ]
    assert told and all(advice.strip("'").startswith(".") for _, advice in told), told
