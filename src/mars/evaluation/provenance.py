"""Provenance of a measurement: command, commit, machine, versions, date."""

import hashlib
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

import mars
from mars.models import Checkpoint


def fingerprint(checkpoint: Checkpoint) -> str:
    """The first 16 digits of a SHA-256 over all weights, in their loaded precision."""
    digest = hashlib.sha256()
    for name, weight in sorted(checkpoint.module.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def collect() -> dict[str, object]:
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "mars": mars.__version__,
        },
    }


def machine() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()


def _commit() -> str:
    """The commit of this source, if it is a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:  # noqa: PTH123
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()
