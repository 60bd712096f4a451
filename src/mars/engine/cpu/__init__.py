"""Steps on a CPU without PyTorch: Llama-like models in one compiled C file, with weights of 32, 16, 8 or 4 bits."""

import logging

from mars.engine.cpu.model import PAGE, VECTOR, CpuModel
from mars.engine.cpu.policy import RaggedPolicy, StepSeconds
from mars.engine.cpu.runner import CpuRunner
from mars.engine.cpu.weights import FORMS
from mars.errors import MarsError
from mars.models.checkpoint import Checkpoint
from mars.models.support import has_plain_layers, head_size, is_llama_like

__all__ = ["VECTOR", "CpuModel", "CpuRunner", "RaggedPolicy", "StepSeconds", "cpu_model"]

log = logging.getLogger("mars.engine")


def cpu_model(checkpoint: Checkpoint, page_size: int) -> CpuModel | None:
    """The model for compiled steps; None if it has to run through PyTorch."""
    form = next((each for each in FORMS if each == checkpoint.form), None)
    if checkpoint.device.type != "cpu" or form is None or page_size != PAGE:
        return None
    reason = f"the compiled step does not know models like {checkpoint.name}" if checkpoint.is_int8 else None
    module = checkpoint.module
    if is_llama_like(module.config) and has_plain_layers(module) and head_size(module) % 4 == 0:
        try:
            return CpuModel(checkpoint, form)
        except MarsError as error:
            reason = str(error)
    if reason is not None:
        precision = str(checkpoint.module.dtype).removeprefix("torch.")
        exact = "" if precision == "float32" else ", where near ties may fall either way"
        log.warning("%s; decoding through PyTorch instead, in %s: slower%s", reason, precision, exact)
    return None
