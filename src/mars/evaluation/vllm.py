"""vLLM as an engine for our requests: with the plugin it knows dials, without it it is a peer."""

import gc
import tempfile
from collections.abc import Generator, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mars.core.output import OutputProcessor, RequestOutput
from mars.core.request import Request
from mars.core.sequence import Sequence
from mars.errors import MarsError, how_to_install
from mars.models import Checkpoint, save_checkpoint

PLUGIN = {"method": "mars"}  # vLLM's ``speculative_config`` for our dials


def import_vllm() -> Any:
    try:
        import vllm
    except ImportError:
        raise MarsError(f"vllm is not installed: {how_to_install('vllm')}") from None
    return vllm


@contextmanager
def load_vllm(
    checkpoint: Checkpoint, source: str | None, max_num_seqs: int, length: int | None, **options: Any
) -> Iterator[Any]:
    """vLLM with the model from the folder or hub id ``source``; None: it is saved first. ``options`` are vLLM's."""
    vllm, device = import_vllm(), checkpoint.device
    device_options: dict[str, Any] = {"enforce_eager": True}  # on a CPU, compilation takes minutes
    if device.type == "cuda":  # most of the memory that this process leaves
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        device_options = {"gpu_memory_utilization": 0.9 * free / total}
    with tempfile.TemporaryDirectory(prefix="mars-vllm-") as scratch:
        if source is None:
            source = str(Path(scratch) / "model")
            save_checkpoint(checkpoint, Path(source))
        llm = vllm.LLM(
            model=source,
            dtype=str(checkpoint.module.dtype).removeprefix("torch."),
            max_num_seqs=max_num_seqs,
            max_model_len=length,
            enable_prefix_caching=False,  # prompts of an earlier round must not be cached
            disable_log_stats=False,  # needed for the times of the tokens
            **device_options | options,
        )
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


def generate(
    llm: Any, checkpoint: Checkpoint, requests: SequenceOf[Request]
) -> Generator[tuple[int, RequestOutput], None, None]:
    """The index and answer of every request as it ends, greedily. The plugin applies their dials, with a chain."""
    vllm = import_vllm()
    engine, running = llm.llm_engine, dict[str, tuple[int, Sequence]]()
    try:
        for index, request in enumerate(requests):
            if request.window is not None:
                raise MarsError("windows are not known to vLLM: leave them out")
            sequence = Sequence.of(request, checkpoint)
            OutputProcessor(sequence.output, checkpoint.tokenizer, sequence.end_tokens, request.stop)
            sampling = vllm.SamplingParams(
                temperature=0.0,
                max_tokens=sequence.max_tokens,
                stop=list(request.stop),
                stop_token_ids=sorted(checkpoint.end_tokens),
                output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
                extra_args={"dial": str(request.dial)},
            )
            engine.add_request(str(index), {"prompt_token_ids": list(request.prompt)}, sampling)
            running[str(index)] = index, sequence
        while running:
            for each in engine.step():
                index, sequence = running[each.request_id]
                new, output = each.outputs[0], sequence.output
                if new.token_ids and not sequence.is_finished:
                    sequence.emit(list(new.token_ids), [])
                if output.processor is not None:
                    output.processor.update()
                if each.finished:
                    del running[each.request_id]
                    if not sequence.is_finished:
                        output.finish(new.finish_reason)
                    yield index, output
    finally:
        engine.abort_request(list(running))
