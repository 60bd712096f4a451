"""Print what the wheel in a folder needs, without what only sounds and pictures need, and what the tests need."""

from __future__ import annotations

import sys
import zipfile
from email.parser import Parser
from pathlib import Path

LEFT_OUT = ("torch==", "torchaudio", "torchvision", "torchcodec")
TESTS = (
    "torch==2.13.0",
    "gguf",
    "peft",
    "accelerate",
    "typer",
    "rich",
    "pytest",
    "pytest-xdist",
    "scipy",
    "hypothesis",
    "triton",
    "lm-eval[ifeval]>=0.4.13,<0.5",
)


def main(folder: Path) -> None:
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        needed = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    plain = [each for each in needed if "extra ==" not in each and not each.startswith(LEFT_OUT)]
    print(*plain, *TESTS, sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
