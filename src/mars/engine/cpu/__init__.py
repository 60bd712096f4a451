"""Steps on a CPU without PyTorch: Llama-like models in one compiled C file, with weights of 32, 16, 8 or 4 bits."""

import logging

from torch import nn

from mars.engine.cpu.model import PAGE, VECTOR, CpuModel
from mars.engine.cpu.policy import RaggedPolicy, StepSeconds
from mars.engine.cpu.runner import CpuRunner
from mars.engine.cpu.weights import FORMS
from mars.errors import MarsError
from mars.models.checkpoint import Checkpoint
from mars.models.support import has_compiled_step

__all__ = ["VECTOR", "CpuModel", "CpuRunner", "RaggedPolicy", "StepSeconds", "cpu_model"]

log = logging.getLogger("mars.engine")


def cpu_model(checkpoint: Checkpoint, page_size: int) -> CpuModel | None:
    """The model for compiled steps; None if it has to run through PyTorch."""
    form = next((each for each in FORMS if each == checkpoint.form), None)
    if checkpoint.device.type != "cpu" or form is None or page_size != PAGE:
        return None
    reason = f"the compiled step does not know models like {checkpoint.name}" if checkpoint.is_int8 else None
    if has_compiled_step(checkpoint.module.config) and _is_plain(checkpoint):
        try:
            return CpuModel(checkpoint, form)
        except MarsError as error:
            reason = str(error)
    if reason is not None:
        precision = str(checkpoint.module.dtype).removeprefix("torch.")
        exact = "" if precision == "float32" else ", where near ties may fall either way"
        log.warning("%s; decoding through PyTorch instead, in %s: slower%s", reason, precision, exact)
    return None


def _is_plain(checkpoint: Checkpoint) -> bool:
    """Are the layers what they seem? Something may have been put in their place."""
    linears = [each for name, each in checkpoint.module.named_modules() if name.endswith("_proj")]
    decoder = checkpoint.module.get_decoder()
    head_size = decoder.layers[0].self_attn.head_dim
    rotates_whole_heads = 2 * len(decoder.rotary_emb.inv_freq) == head_size
    return all(type(each) is nn.Linear for each in linears) and rotates_whole_heads and head_size % 4 == 0
