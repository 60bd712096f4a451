"""From ``--speculative-config '{"method": "mars"}'`` to options that vLLM knows.

On a GPU the asynchronous path: vLLM's second model runner, to which our speculator is the method ``ngram_gpu``.
Otherwise, or where asynchronous scheduling is switched off, the synchronous one: the first runner with a proposer.
"""

import json
import os
from contextlib import suppress
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from mars.errors import MarsError
from mars.integrations.vllm import endpoints, hooks
from mars.integrations.vllm.cuda_graphs import capture_sizes
from mars.integrations.vllm.hooks import Method
from mars.integrations.vllm.options import METHOD, Options, is_used, log, own_dial, parse_dial
from mars.method.windows import NARROW
from mars.models.adapter_files import AdapterFiles, find_adapter
from mars.models.settings import Settings

OLDEST, NEWEST = (0, 24), (0, 32)
PROPOSER = "mars.integrations.vllm.synchronous.Proposer"
EXTENSION = "mars.integrations.vllm.worker.Extension"
SCHEDULERS = "mars.integrations.vllm.scheduler"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # vLLM's own switch: 0 selects the first model runner, hence the synchronous path
FREE_TOKENS = 322  # tokens of a step that takes about as long as loading the weights, on a large GPU
FREE_OPERATIONS = 2.4e12
"""Operations of a step that takes no longer than the host needs to prepare one: small models may feed more tokens"""
MOST_SEQUENCES = 256
"""Most sequences with windows, unless the option ``windows`` says otherwise: each count needs a CUDA graph"""
OPTIONS = ("dial", "masks", "windows", "adapter")


def install() -> None:
    """Make the method known to vLLM; engines without it stay as they are."""
    from vllm import SamplingParams
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    refused = "_get_v2_model_runner_unsupported_features"
    hooks.install(
        (
            (EngineArgs, "create_engine_config", _create_engine_config, "vLLM does not know the method's name"),
            (SamplingParams, "verify", _verify, "in the engine, a request's bad dial would stop everything"),
            (VllmConfig, refused, _unsupported_features, "vLLM 0.24 refuses ngram_gpu in its second runner"),
            (SpeculativeConfig, "use_ngram_gpu", _use_ngram_gpu, "vLLM does without its compile cache for n-grams"),
        )
    )


def _create_engine_config(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    asked = self.speculative_config
    if isinstance(asked, dict) and asked.get("method") == METHOD:
        translate(self)
    return original(self, *args, **kwargs)


def _verify(original: Method, self: Any, model_config: Any, speculative_config: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm.exceptions import VLLMValidationError

    if getattr(speculative_config, "model", None) in (METHOD, PROPOSER):
        try:
            own_dial(self)
        except MarsError as error:
            raise VLLMValidationError(f"dial: {error}", parameter="dial") from None
    return original(self, model_config, speculative_config, *args, **kwargs)


def _unsupported_features(original: Method, self: Any) -> Any:
    names = original(self)
    return [name for name in names if "ngram" not in name] if is_used(self) else names


def _use_ngram_gpu(original: Method, self: Any) -> bool:
    return original(self) and self.model != METHOD


def translate(arguments: Any) -> None:
    """Replace our method by options that vLLM knows, or say why that is impossible."""
    import vllm

    if not OLDEST <= _version() <= NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
        raise MarsError(
            f"MARS works with vLLM {oldest} to {newest}, and this is {vllm.__version__}: install one of these"
        )
    asked = {name: value for name, value in arguments.speculative_config.items() if name != "method"}
    if unknown := asked.keys() - set(OPTIONS):
        raise MarsError(f"--speculative-config has no {min(unknown)!r} for mars: use {', '.join(OPTIONS)}")
    asynchronous = _is_asynchronous(arguments)
    scheduler = f"{SCHEDULERS}.{'AsyncMarsScheduler' if asynchronous else 'MarsScheduler'}"
    for option, value in (("worker_extension_cls", EXTENSION), ("scheduler_cls", scheduler)):
        if getattr(arguments, option) not in (None, "", value):
            raise MarsError(f"mars needs --{option.replace('_', '-')} for itself: leave it out")
        setattr(arguments, option, value)
    if arguments.pipeline_parallel_size > 1:
        raise MarsError("mars needs all layers in one place: use --tensor-parallel-size, not --pipeline-parallel-size")
    files = _adapter(arguments, asked.get("adapter"))
    settings = _settings(arguments) if files is None else Settings.of(files.config)
    most = settings.block_size - 1
    usual = min(most, NARROW - 1)  # all windows have one length, and many masks pay for few requests alone
    masks = _whole("masks", asked.get("masks", usual), 1, most)
    windows = asked.get("windows", {})
    if not isinstance(windows, dict) or not all(str(fewest).isdecimal() for fewest in windows):
        raise MarsError('windows must be such as {"32": 2, "128": 0}: masks from so many requests on')
    options = Options(
        mask=settings.mask_token_id,
        masks=masks,
        dial=str(parse_dial(asked.get("dial", settings.dial))),
        windows={int(fewest): _whole("windows", count, 0, masks) for fewest, count in windows.items()},
    )
    if files is not None:
        digest = blake2b(json.dumps(files.config, sort_keys=True).encode(), digest_size=8).hexdigest()
        revision = None if asked.get("adapter") else arguments.revision
        options = replace(options, adapter=files.name, adapter_revision=revision, adapter_digest=digest)
    arguments.speculative_config = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 2 * masks}
    if asynchronous:
        if "windows" not in asked:
            narrow, none = (_most_sequences(arguments, each) + 1 for each in (masks, 1))
            options = replace(options, windows={narrow: 1, max(none, narrow + 1): 0}, measures=True)
        _use_second_runner(arguments, options)
    arguments.additional_config = {**(arguments.additional_config or {}), METHOD: asdict(options)}
    endpoints.install()


def _adapter(arguments: Any, name: Any) -> AdapterFiles | None:
    """The gated adapter: the one that is asked for, else the checkpoint's own; or a message why it cannot be used."""
    files = find_adapter(str(name or arguments.model), None if name else arguments.revision)
    if name is not None and files is None:
        raise MarsError(f"adapter: there is no gated adapter in {name!r}")
    if files is None:
        return None
    if name is None and Path(arguments.model).is_dir() and not (Path(arguments.model) / "config.json").is_file():
        base, advice = files.base[0], f'--speculative-config \'{{"method": "mars", "adapter": "{arguments.model}"}}\''
        raise MarsError(f"{arguments.model} is an adapter without its model: use --model {base} {advice}")
    if arguments.enable_lora:
        raise MarsError("mars cannot change layers that have LoRA adapters: leave out --enable-lora, or merge the LoRA")
    if getattr(arguments, "enable_dbo", False):
        raise MarsError("mars needs all tokens of a step together: leave out --enable-dbo")
    return files


def _is_asynchronous(arguments: Any) -> bool:
    """Is it the asynchronous path?"""
    from vllm import envs
    from vllm.platforms import current_platform

    possible = current_platform.is_cuda() and envs.VLLM_USE_V2_MODEL_RUNNER is not False
    if not possible or arguments.async_scheduling is False:
        return False
    config, older = _text_config(arguments), _version() < (0, 26)
    slides = getattr(config, "sliding_window", None) and not arguments.disable_sliding_window
    if older and (slides or getattr(config, "attention_chunk_size", None)):
        # these free what has left a sliding window by a count that includes tokens yet to be rejected
        log("warning", "mars needs vLLM 0.26 for asynchronous scheduling of a model with sliding windows")
        arguments.async_scheduling = False
    return arguments.async_scheduling is not False


def _use_second_runner(arguments: Any, options: Options) -> None:
    """vLLM schedules asynchronously with few methods of speculation: take the name of one of them."""
    os.environ[RUNNER] = "1"  # the processes that vLLM starts read it, too
    log("info", f"mars uses asynchronous scheduling and vLLM's second model runner: {RUNNER}=0 avoids it")
    width = 2 * options.masks
    arguments.speculative_config = {"method": "ngram_gpu", "model": METHOD, "num_speculative_tokens": width}
    sizes = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    if all(getattr(given, name, None) is None for given in (arguments, arguments.compilation_config) for name in sizes):
        fewest = min((fewest for fewest, count in options.windows.items() if not count), default=MOST_SEQUENCES + 1)
        most = max(1, min(fewest - 1, arguments.max_num_seqs or MOST_SEQUENCES))
        arguments.cudagraph_capture_sizes = capture_sizes(most, 1 + width)


def _most_sequences(arguments: Any, masks: int) -> int:
    """How many sequences can have windows while these cost little more than single tokens, by the model's size."""
    config = _text_config(arguments)
    hidden = config.hidden_size
    inner = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None) or 4 * hidden
    experts = getattr(config, "num_experts_per_tok", None) or 1
    weights = config.num_hidden_layers * hidden * (4 * hidden + 3 * inner * experts) + hidden * config.vocab_size
    tokens = max(FREE_TOKENS, FREE_OPERATIONS * arguments.tensor_parallel_size / (2 * weights))
    return max(1, min(MOST_SEQUENCES, int(tokens / (1 + 2 * masks))))


def _text_config(arguments: Any) -> Any:
    """The model's config, from its checkpoint."""
    source, options = arguments.hf_config_path or arguments.model, {"trust_remote_code": arguments.trust_remote_code}
    return AutoConfig.from_pretrained(source, revision=arguments.revision, **options).get_text_config()


def _whole(name: str, number: Any, least: int, most: int) -> int:
    if not isinstance(number, int) or not least <= number <= most:
        raise MarsError(f"{name}: masks go from {least} to {most} for this checkpoint, not {number!r}")
    return number


def _settings(arguments: Any) -> Settings:
    """The checkpoint's settings, from its ``generation_config.json``."""
    source, settings = arguments.hf_config_path or arguments.model, None
    with suppress(OSError):
        settings = Settings.read(GenerationConfig.from_pretrained(source, revision=arguments.revision))
    if settings is None:
        advice = "train it with `mars train`, or leave out the method mars"
        raise MarsError(
            f"{arguments.model} has no MARS settings in mars/config.json or generation_config.json: {advice}"
        )
    return settings


def _version() -> tuple[int, ...]:
    from vllm import __version__

    try:
        return tuple(int(part) for part in __version__.split(".")[:2])
    except ValueError:
        return OLDEST  # a local build
