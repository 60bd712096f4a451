"""Other decoders of the same model: transformers, vLLM, llama.cpp, and the paper's."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from mars.api import Model
from mars.core.output import RequestOutput
from mars.core.request import Request, require_masks
from mars.errors import MarsError
from mars.evaluation.speed import Decode, Decoder, Round
from mars.evaluation.vllm import import_vllm, load_vllm
from mars.method.acceptance import Dial
from mars.models import Checkpoint, builtin
from mars.models.attention import own_attention
from mars.reference import block_cache, paper_block_cache, sliding_window

BLOCK_CACHES = {"block-cache": block_cache, "block-cache:paper": paper_block_cache}
KNOWN = "transformers, vllm, llama.cpp, block-cache=16, block-cache:paper=16 (any block size) or sliding-window"
PAPER_DIAL = "threshold=0.95"


def check_peer(name: str) -> None:
    """Raise if the peer is unknown or not installed."""
    kind, _, size = name.partition("=")
    if name not in ("transformers", "vllm", "llama.cpp", "sliding-window") and not (
        kind in BLOCK_CACHES and size.isdecimal() and int(size) > 0
    ):
        raise MarsError(f"unknown peer {name!r}: use {KNOWN}")
    if name == "vllm":
        import_vllm()
    if name == "llama.cpp" and find_spec("llama_cpp") is None:
        raise MarsError("the peer llama.cpp needs the package llama-cpp-python, which is not installed")


def check_model(name: str, checkpoint: Checkpoint) -> None:
    """Raise if the peer needs a MARS model or a GGUF file and this is none."""
    if name == "llama.cpp" and not _has_gguf(checkpoint):
        raise MarsError(
            f"the peer llama.cpp reads GGUF files: load one, or {builtin.NAME}, instead of {checkpoint.name}"
        )
    if name.startswith(("block-cache", "sliding-window")):
        require_masks(checkpoint, Dial.parse(PAPER_DIAL))


@contextmanager
def open_peer(
    name: str, checkpoint: Checkpoint, source: str | None, max_num_seqs: int, length: int
) -> Iterator[Decoder]:
    """A peer that can answer ``max_num_seqs`` prompts at once, with texts of at most ``length`` tokens.

    ``source`` is a folder or hub id with the very same weights; None: there is none.
    """
    label = {"peer": name, "window": None}
    if name == "vllm":
        with open_vllm(checkpoint, source, max_num_seqs, length) as decode:
            yield Decoder(label, decode, device=None)
        return
    if name == "llama.cpp":
        yield Decoder(label, partial(_llama_cpp, _open_llama_cpp(checkpoint, length), checkpoint), checkpoint.device)
        return
    kind, _, size = name.partition("=")
    if kind in BLOCK_CACHES:
        decode = partial(_block_cache, BLOCK_CACHES[kind], checkpoint, int(size))
    else:
        decode = partial(_transformers if kind == "transformers" else _sliding_window, checkpoint)
    yield Decoder(label, decode, checkpoint.device)


def _has_gguf(checkpoint: Checkpoint) -> bool:
    return checkpoint.name in (builtin.NAME, builtin.BASE) or checkpoint.name.endswith(".gguf")


def _open_llama_cpp(checkpoint: Checkpoint, length: int) -> Any:
    from llama_cpp import Llama

    path = checkpoint.name if checkpoint.name.endswith(".gguf") else builtin.gguf_file()
    threads = torch.get_num_threads()
    return Llama(str(path), n_ctx=length, n_threads=threads, n_threads_batch=threads, verbose=False)


def _llama_cpp(llama: Any, checkpoint: Checkpoint, prompts: Sequence[list[int]], max_new_tokens: int) -> Round:
    """llama-cpp-python's own loop, greedy, one request after another; the time a request waits counts."""
    answers, started = list[RequestOutput](), time.perf_counter()
    for prompt in prompts:
        tokens, times = list[int](), list[float]()
        llama.reset()
        for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
            tokens.append(token)
            times.append(time.perf_counter() - started)
            if token in checkpoint.end_tokens or len(tokens) == max_new_tokens:
                break
        answers.append(_answer(checkpoint, tokens, times))
    return Round(answers, sum(answer.forwards for answer in answers))


class _Clock:
    """A streamer that keeps the times at which tokens come."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.times: list[float] = []

    def put(self, _tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter() - self._started)

    def end(self) -> None:
        pass


def _transformers(checkpoint: Checkpoint, prompts: Sequence[list[int]], max_new_tokens: int) -> Round:
    """The model's own ``generate``, prompts padded at the left."""
    ends = sorted(checkpoint.end_tokens)
    padding = ends[0] if ends else 0
    options: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.0, "pad_token_id": padding}
    options |= {"eos_token_id": ends or None, "max_new_tokens": max_new_tokens}
    if checkpoint.banned_token is not None:
        options["suppress_tokens"] = [checkpoint.banned_token]
    clock = _Clock()
    texts = [torch.tensor(prompt, device=checkpoint.device) for prompt in prompts]
    layout: dict[str, Any] = {"batch_first": True, "padding_side": "left"}
    ids = pad_sequence(texts, padding_value=padding, **layout)
    mask = pad_sequence([torch.ones_like(text) for text in texts], **layout)
    with own_attention(checkpoint.module) as model:
        out = model.generate(ids, attention_mask=mask, streamer=clock, **options)
    times = clock.times[1:]  # the first is the prompt's
    answers = []
    for row in out[:, ids.shape[1] :].tolist():
        tokens = row[: next((index for index, token in enumerate(row, 1) if token in ends), len(row))]
        answers.append(_answer(checkpoint, tokens, times[: len(tokens)], checked=len(tokens)))
    return Round(answers, len(times))


def _answer(checkpoint: Checkpoint, tokens: list[int], times: list[float], checked: int = 0) -> RequestOutput:
    """An answer of one token per forward; ``checked`` tokens are known to be the model's own greedy ones."""
    output = RequestOutput(dial="one-token")
    for index, token in enumerate(tokens):
        output.add([token], [True] * (index < checked))
    output.finish("stop" if tokens[-1] in checkpoint.end_tokens else "length")
    output.times, output.seconds = times, times[-1] if times else 0.0
    return output


@contextmanager
def open_vllm(
    checkpoint: Checkpoint, source: str | None, max_num_seqs: int, length: int, **options: Any
) -> Iterator[Decode]:
    """One token at a time through vLLM's own ``generate``. ``options`` are vLLM's."""
    vllm = import_vllm()
    with load_vllm(checkpoint, source, max_num_seqs, length, **options) as llm:

        def decode(prompts: Sequence[list[int]], max_new_tokens: int) -> Round:
            sampling = vllm.SamplingParams(
                temperature=0.0, max_tokens=max_new_tokens, stop_token_ids=sorted(checkpoint.end_tokens)
            )
            answers = []
            for each in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False):
                times, metrics = [], each.metrics
                if metrics is not None:  # of the first and the last token
                    first = metrics.first_token_latency
                    times = [first, first + metrics.last_token_ts - metrics.first_token_ts]
                answers.append(_answer(checkpoint, list(each.outputs[0].token_ids), times))
            return Round(answers)

        yield decode


def _paper_requests(checkpoint: Checkpoint, prompts: Sequence[list[int]], max_new_tokens: int) -> list[Request]:
    model = Model(checkpoint)
    return [model.request(prompt, dial=PAPER_DIAL, max_new_tokens=max_new_tokens) for prompt in prompts]


def _block_cache(
    run: Callable[[Checkpoint, Sequence[Request], int], list[RequestOutput]],
    checkpoint: Checkpoint,
    size: int,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
) -> Round:
    answers = run(checkpoint, _paper_requests(checkpoint, prompts, max_new_tokens), size)
    return Round(answers, max(answer.forwards for answer in answers))


def _sliding_window(checkpoint: Checkpoint, prompts: Sequence[list[int]], max_new_tokens: int) -> Round:
    """One request after another; the time a request waits for the others counts."""
    answers: list[RequestOutput] = []
    started = time.perf_counter()
    for request in _paper_requests(checkpoint, prompts, max_new_tokens):
        waited = time.perf_counter() - started
        answer = sliding_window(checkpoint, request)
        answers.append(replace(answer, times=[waited + each for each in answer.times]))
    return Round(answers, sum(answer.forwards for answer in answers))
