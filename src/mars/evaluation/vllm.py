"""vLLM as an engine for our requests: with the plugin for dials, without it as a peer."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mars.decoding.decoder import check_request
from mars.decoding.request import Answer, Generation, Request
from mars.errors import MarsError
from mars.models import Checkpoint, save_checkpoint

PLUGIN = {"method": "mars"}
"""The ``speculative_config`` that selects the plugin"""


def import_vllm() -> Any:
    try:
        import vllm
    except ImportError:
        raise MarsError("vllm is not installed: pip install 'mars-decoding[vllm]'") from None
    return vllm


@contextmanager
def load_vllm(
    checkpoint: Checkpoint, source: str | None, rows: int, length: int | None, **options: Any
) -> Iterator[Any]:
    """vLLM with the model from the folder or hub id ``source``; None: a copy is saved. ``options`` are vLLM's."""
    vllm = import_vllm()
    with tempfile.TemporaryDirectory(prefix="mars-vllm-") as scratch:
        if source is None:
            source = str(Path(scratch) / "model")
            save_checkpoint(checkpoint, Path(source))
        llm = vllm.LLM(
            model=source,
            dtype=str(checkpoint.module.dtype).removeprefix("torch."),
            max_num_seqs=rows,
            max_model_len=length,
            enable_prefix_caching=False,  # repeated measurements must prefill every prompt
            disable_log_stats=False,  # without statistics it does not report when tokens arrived
            **_device_options(checkpoint.device),
            **options,
        )
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


def _device_options(device: torch.device) -> dict[str, Any]:
    """On a GPU most of the free memory; on a CPU eager mode, since compiling takes minutes."""
    if device.type != "cuda":
        return {"enforce_eager": True}
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return {"gpu_memory_utilization": 0.9 * free / total}


def write(
    llm: Any, checkpoint: Checkpoint, requests: Sequence[Request]
) -> Generator[tuple[int, Generation], None, None]:
    """Index and output of every greedy request as it ends. The plugin follows the dials; all windows are chains."""
    vllm = import_vllm()
    engine, running = llm.llm_engine, dict[str, tuple[int, Answer]]()
    try:
        for index, request in enumerate(requests):
            check_request(checkpoint, request)
            if request.shape is not None:
                raise MarsError(f"the window {request.shape} is not known to vLLM: leave it out")
            answer = Answer(request, checkpoint.tokenizer, checkpoint.end_tokens, checkpoint.context)
            sampling = vllm.SamplingParams(
                temperature=0.0,
                max_tokens=answer.limit,
                stop=list(request.stop),
                stop_token_ids=sorted(checkpoint.end_tokens),
                output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
                extra_args={"dial": str(request.dial)},
            )
            engine.add_request(str(index), {"prompt_token_ids": list(request.prompt)}, sampling)
            running[str(index)] = index, answer
        while running:
            for each in engine.step():
                index, answer = running[each.request_id]
                output = each.outputs[0]
                if output.token_ids and answer.finish_reason is None:
                    answer.emit(output.token_ids)
                if each.finished:
                    del running[each.request_id]
                    if answer.finish_reason is None:
                        answer.cancel(output.finish_reason)
                    yield index, answer.generation()
    finally:
        engine.abort_request(list(running))
