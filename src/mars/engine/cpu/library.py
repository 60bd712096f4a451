"""Compiles step.c for this machine, once, and loads it."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch  # noqa: F401, brings the OpenMP runtime whose threads the library uses

from mars.errors import MarsError
from mars.models.builtin import cache_home

SOURCE = Path(__file__).with_name("step.c")
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-w"]
"""No contraction: the compiler may not fuse a product and a sum in one copy of a loop and not in another."""
COMPILERS = ("cc", "gcc", "clang")
COMPILE_SECONDS = 120


def machine_flags() -> list[str]:
    """For the processor at hand, or for what ``MARS_CPU_FLAGS`` says, such as ``-march=x86-64-v3``."""
    given = os.environ.get("MARS_CPU_FLAGS")
    return given.split() if given else ["-mcpu=native" if platform.machine() == "arm64" else "-march=native"]


@cache
def load_library(flags: tuple[str, ...]) -> ctypes.CDLL:
    """The library compiled with these flags; raises if it cannot be had. Kept in ``MARS_HOME`` for the next start."""
    compiler = next(
        (path for name in (os.environ.get("CC"), *COMPILERS) if name and (path := shutil.which(name))), None
    )
    if compiler is None:
        raise MarsError("no C compiler was found: install gcc or clang")
    names = ["-undefined", "dynamic_lookup"] if platform.system() == "Darwin" else []
    command = [compiler, *FLAGS, *flags, *names]
    try:
        folder = cache_home() / "compiled"
        target = folder / f"step-{_digest(command)}.so"
        if not target.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / target.name
                _compile([*command, str(SOURCE), "-o", str(made), "-lm"])
                made.replace(target)
        return ctypes.CDLL(str(target))
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        raise MarsError(f"the compiled step could not be stored or loaded: {error}") from error


def _compile(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        raise MarsError(f"{command[0]} took more than {COMPILE_SECONDS} seconds") from None
    if result.returncode:
        said = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip()[:200])
        raise MarsError(f"{command[0]} failed: {said}")


def _digest(command: list[str]) -> str:
    """Of everything that the library depends on: source, command, processor."""
    processor = Path("/proc/cpuinfo")
    lines = processor.read_text().splitlines() if processor.is_file() else []
    about = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    parts = [SOURCE.read_bytes(), " ".join(command).encode(), platform.platform().encode(), about.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
