"""``mars serve --engine vllm``: vLLM's own server, told to use the plugin."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from mars.errors import MarsError, how_to_install
from mars.models import load_checkpoint, save_checkpoint
from mars.models.adapter_files import find_adapter
from mars.models.builtin import BASE, NAME
from mars.models.loading import is_put_together

SERVER = "vllm.entrypoints.openai.api_server"


def serve(
    model: str,
    *,
    adapter: str | None,
    dial: str | None,
    host: str,
    port: int,
    max_num_seqs: int,
    memory: float | None,
    api_key: str | None,
    name: str | None,
    others: Sequence[str],
) -> int:
    """Run the server until it ends; ``others`` are options of vLLM's own. Returns its exit status."""
    if find_spec("vllm") is None:
        raise MarsError(f"vllm is not installed: {how_to_install('vllm')}")
    asked = {"method": "mars"} | ({} if dial is None else {"dial": dial})
    with tempfile.TemporaryDirectory(prefix="mars-vllm-") as scratch:
        options, apart = _checkpoint(model, adapter, Path(scratch))
        asked |= apart
        command = [sys.executable, "-m", SERVER, *options]
        command += ["--served-model-name", name or model, "--host", host, "--port", str(port)]
        command += [
            "--max-num-seqs",
            str(max_num_seqs),
            "--speculative-config",
            json.dumps(asked),
            *_memory(memory),
            *others,
        ]
        process = subprocess.Popen(command, env=os.environ | ({"VLLM_API_KEY": api_key} if api_key else {}))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the child as well
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        return process.wait()


def _checkpoint(model: str, adapter: str | None, scratch: Path) -> tuple[list[str], dict[str, str]]:
    """Options that name a model which vLLM can load, and those of the plugin that name a gated adapter beside it.

    What exists in no folder or hub repository is merged or converted, and saved first.
    """
    if not is_put_together(model, adapter):
        return ["--model", model], {}
    files = None if model in (NAME, BASE) else find_adapter(adapter or model)
    if files is not None and not model.endswith(".gguf"):
        base, revision = (model, None) if adapter else files.base
        return ["--model", base, *(["--revision", revision] if revision else [])], {"adapter": files.name}
    save_checkpoint(load_checkpoint(model, adapter=adapter, device="cpu", dtype="float32"), scratch / "model")
    return ["--model", str(scratch / "model")], {}


def _memory(share: float | None) -> list[str]:
    if share is None:
        return []
    return ["--gpu-memory-utilization", str(share)] if share <= 1 else ["--kv-cache-memory-bytes", str(int(share))]
