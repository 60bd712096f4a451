"""Loading of GGUF files: weights are dequantised, the tokenizer is read from the same file."""

import io
from contextlib import redirect_stderr
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from mars.errors import MarsError
from mars.models.support import refuse_gaps


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer, without the marks of quantised weights."""
    try:
        with redirect_stderr(io.StringIO()):  # it shows a progress bar that cannot be turned off
            model, report = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=dtype, output_loading_info=True
            )
        refuse_gaps(report)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # damaged files raise anything from KeyError to numpy's own errors
        raise MarsError(f"{path} could not be read as a GGUF model: {error}") from error
    for token in ("bos_token", "eos_token", "pad_token"):  # some versions of transformers guess these wrong
        if isinstance(number := getattr(model.config, f"{token}_id", None), int):
            setattr(tokenizer, token, tokenizer.convert_ids_to_tokens(number))
    for mark in ("hf_quantizer", "is_quantized"):  # a trainer would refuse the model
        vars(model).pop(mark, None)
    vars(model.config).pop("quantization_config", None)
    return model, tokenizer
