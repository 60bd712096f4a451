"""From ``--speculative-config '{"method": "mars"}'`` to what vLLM knows, by one of two roads.

On a GPU steps are scheduled ahead, and nothing may wait for the device: vLLM's second model runner with our speculator,
which vLLM takes for the method ``ngram_gpu``. Elsewhere, or where that is switched off, the first one with a proposer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from transformers import AutoConfig, GenerationConfig

from mars.errors import MarsError
from mars.method.acceptance import Dial
from mars.models.settings import Settings

METHOD = "mars"
OLDEST, NEWEST = (0, 24), (0, 32)
PROPOSER = "mars.integrations.vllm.proposer.Proposer"
SCHEDULER = "mars.integrations.vllm.scheduler.MarsScheduler"
ASYNC_SCHEDULER = "mars.integrations.vllm.scheduler.AsyncMarsScheduler"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's own switch: 0 takes the synchronous road"""
FREE_TOKENS = 322
"""Of a step that still takes about as long as reading the weights, on a large GPU"""
FREE_OPERATIONS = 2.4e12
"""Of a step that takes no longer than the host needs for a plain one: small models may feed more tokens"""
MOST_ROWS = 256
"""With windows, unless the setting ``windows`` says otherwise: a graph is taken for each of several counts"""
EXTENSION = "mars.integrations.vllm.worker.Extension"
OPTIONS = ("dial", "masks", "windows")


def install() -> None:
    """Have vLLM's arguments know the method; others stay as they are."""
    from vllm.engine.arg_utils import EngineArgs

    if not hasattr(EngineArgs.create_engine_config, "knows_mars"):
        EngineArgs.create_engine_config = _with_mars(EngineArgs.create_engine_config)
        _allow()


def _with_mars(create: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = self.speculative_config
        if isinstance(asked, dict) and asked.get("method") == METHOD:
            translate(self)
        return create(self, *args, **kwargs)

    create_engine_config.knows_mars = True  # type: ignore[attr-defined]
    return create_engine_config


def translate(arguments: Any) -> None:
    """Put what vLLM needs in the place of our method, or say why it cannot be."""
    _check_version()
    asked = {name: value for name, value in arguments.speculative_config.items() if name != "method"}
    if unknown := asked.keys() - set(OPTIONS):
        raise MarsError(f"--speculative-config has no {min(unknown)!r} for mars: use {', '.join(OPTIONS)}")
    ahead = _runs_ahead(arguments)
    scheduler = ASYNC_SCHEDULER if ahead else SCHEDULER
    for option, mine in (("worker_extension_cls", EXTENSION), ("scheduler_cls", scheduler)):
        if getattr(arguments, option) not in (None, "", mine):
            raise MarsError(f"mars needs --{option.replace('_', '-')} for itself: leave it out")
        setattr(arguments, option, mine)
    if arguments.pipeline_parallel_size > 1:
        raise MarsError("mars needs all layers in one place: use --tensor-parallel-size, not --pipeline-parallel-size")
    settings = _settings(arguments)
    most = settings.block_size - 1
    masks = _whole("masks", asked.get("masks", most), 1, most)
    windows = asked.get("windows", {})
    if not isinstance(windows, dict) or not all(str(rows).isdecimal() for rows in windows):
        raise MarsError('windows must be such as {"32": 2, "128": 0}: masks from so many requests on')
    ours: dict[str, Any] = {
        "mask": settings.mask_token_id,
        "masks": masks,
        "dial": str(parse_dial(asked.get("dial", settings.dial))),
        "windows": {int(rows): _whole("windows", count, 0, masks) for rows, count in windows.items()},
    }
    arguments.speculative_config = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 2 * masks}
    if ahead:
        if "windows" not in asked:
            ours["windows"] = {_rows(arguments, masks) + 1: 0}
        _run_ahead(arguments, masks, ours["windows"])
    arguments.additional_config = {**(arguments.additional_config or {}), METHOD: ours}
    _check_dials()
    from mars.integrations.vllm import endpoints

    endpoints.install()


def _runs_ahead(arguments: Any) -> bool:
    """Whether to take the asynchronous road."""
    from vllm import envs
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    able = current_platform.is_cuda() and envs.VLLM_USE_V2_MODEL_RUNNER is not False
    if not able or arguments.async_scheduling is False:
        return False
    if _frees_too_early(arguments):
        told = "mars schedules no step ahead for a model with sliding windows before vLLM 0.26: install a newer one"
        init_logger("vllm.mars").warning(told)
        arguments.async_scheduling = False
        return False
    return True


def _frees_too_early(arguments: Any) -> bool:
    """Up to 0.25, vLLM gives back what has left a sliding window by a count with tokens that may yet be rejected."""
    if _version() >= (0, 26):
        return False
    config = _text_config(arguments)
    slides = getattr(config, "sliding_window", None) and not arguments.disable_sliding_window
    return bool(slides or getattr(config, "attention_chunk_size", None))


def _run_ahead(arguments: Any, masks: int, windows: dict[int, int]) -> None:
    """vLLM schedules ahead with few methods; one of them is ours in its second runner."""
    from vllm.logger import init_logger

    os.environ[RUNNER] = "1"  # the processes that vLLM starts read it, too
    init_logger("vllm.mars").info("mars schedules ahead, in vLLM's second model runner: set %s=0 not to", RUNNER)
    width = 2 * masks
    arguments.speculative_config = {"method": "ngram_gpu", "model": METHOD, "num_speculative_tokens": width}
    sizes = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    places = (arguments, arguments.compilation_config)
    if all(getattr(place, name, None) is None for place in places for name in sizes):
        from mars.integrations.vllm.graphs import capture_sizes

        alone = min((rows for rows, count in windows.items() if not count), default=MOST_ROWS + 1)
        most = max(1, min(alone - 1, arguments.max_num_seqs or MOST_ROWS))
        arguments.cudagraph_capture_sizes = capture_sizes(most, 1 + width)


def _rows(arguments: Any, masks: int) -> int:
    """How many rows can have windows while these cost little more than single tokens."""
    config = _text_config(arguments)
    hidden = config.hidden_size
    inner = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None) or 4 * hidden
    experts = getattr(config, "num_experts_per_tok", None) or 1
    weights = config.num_hidden_layers * hidden * (4 * hidden + 3 * inner * experts) + hidden * config.vocab_size
    tokens = max(FREE_TOKENS, FREE_OPERATIONS * arguments.tensor_parallel_size / (2 * weights))
    return max(1, min(MOST_ROWS, int(tokens / (1 + 2 * masks))))


def _text_config(arguments: Any) -> Any:
    """Of the model, as its checkpoint has it."""
    return AutoConfig.from_pretrained(
        arguments.hf_config_path or arguments.model,
        revision=arguments.revision,
        trust_remote_code=arguments.trust_remote_code,
    ).get_text_config()


def _allow() -> None:
    """vLLM 0.24 knows no n-grams in its second runner, and keeps nothing that it compiled beside them."""
    from vllm.config import SpeculativeConfig, VllmConfig

    refused, uses = VllmConfig._get_v2_model_runner_unsupported_features, SpeculativeConfig.use_ngram_gpu

    @wraps(refused)
    def _get_v2_model_runner_unsupported_features(self: Any) -> Any:
        names = refused(self)
        return [name for name in names if "ngram" not in name] if METHOD in (self.additional_config or {}) else names

    @wraps(uses)
    def use_ngram_gpu(self: Any) -> bool:
        return uses(self) and self.model != METHOD

    VllmConfig._get_v2_model_runner_unsupported_features = _get_v2_model_runner_unsupported_features
    SpeculativeConfig.use_ngram_gpu = use_ngram_gpu


def _whole(name: str, number: Any, least: int, most: int) -> int:
    if not isinstance(number, int) or not least <= number <= most:
        raise MarsError(f"{name}: masks go from {least} to {most} for this checkpoint, not {number!r}")
    return number


def _check_dials() -> None:
    """Refuse a request's dial where it comes in, not where it would stop the engine."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    verify = SamplingParams.verify
    if hasattr(verify, "knows_mars"):
        return

    @wraps(verify)
    def verify_all(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            parse_dial((self.extra_args or {}).get("dial", "exact"))
        except MarsError as error:
            raise VLLMValidationError(f"dial: {error}", parameter="dial") from None
        return verify(self, *args, **kwargs)

    verify_all.knows_mars = True  # type: ignore[attr-defined]
    SamplingParams.verify = verify_all


def parse_dial(text: Any) -> Dial:
    """A dial that can be followed here."""
    if not isinstance(text, str):
        raise MarsError(f"a dial is text such as relaxed=0.3, not {text!r}")
    return _parse(text)


@cache
def _parse(text: str) -> Dial:
    """Asked for every row of every step, so each is read once."""
    dial = Dial.parse(text)
    if dial.measure != "probability":
        raise MarsError(f"{dial} is not known to the plugin: threshold goes by probability here")
    return dial


def _settings(arguments: Any) -> Settings:
    """Of the checkpoint, from its ``generation_config.json``."""
    try:
        config = GenerationConfig.from_pretrained(
            arguments.hf_config_path or arguments.model, revision=arguments.revision
        )
    except OSError:
        config = None
    settings = Settings.read(config)
    if settings is None:
        raise MarsError(
            f"{arguments.model} has no MARS settings in its generation_config.json: train it with `mars train`, "
            "or leave out the method mars"
        )
    return settings


def _check_version() -> None:
    from vllm import __version__

    if not OLDEST <= _version() <= NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
        raise MarsError(f"MARS works with vLLM {oldest} to {newest}, and this is {__version__}: install one of these")


def _version() -> tuple[int, ...]:
    from vllm import __version__

    try:
        return tuple(int(part) for part in __version__.split(".")[:2])
    except ValueError:
        return OLDEST  # a build of somebody's own
