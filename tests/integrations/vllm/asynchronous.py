"""The asynchronous path: vLLM's second model runner, on a GPU, or on a CPU with all kernels interpreted.

``python -m tests.integrations.vllm.asynchronous FOLDER GATED`` generates without the plugin, with it and a gated
adapter, and with it and a trained model, all with the same base weights, and prints the results. It is a process of its
own, since environment variables must be set before triton and vLLM are imported.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()
os.environ |= {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
if not ON_GPU:
    os.environ |= {
        "TRITON_INTERPRET": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }

ROWS = 6
CROWD = 500 if ON_GPU else 30
WORDS, ALL = list(range(11)), list(range(12))
"""All but the trained model's mask, and all: a request with a list of allowed tokens does not take the argmax"""
Answers = list[list[int]]


class Driver:
    """As much of a driver as vLLM looks for."""

    is_active = staticmethod(lambda: True)


def interpret() -> None:
    """Make vLLM use triton, asynchronous scheduling and its second model runner on a CPU."""
    from triton import backends

    backends.backends["cpu"] = type("Backend", (), {"driver": Driver, "compiler": None})()
    from vllm.platforms.cpu import CpuPlatform

    from mars.integrations.vllm import config as translation

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        asynchronous = config.scheduler_config.async_scheduling
        check(cls, config)
        config.scheduler_config.async_scheduling = asynchronous

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    translation._is_asynchronous = lambda _: True  # type: ignore[assignment]


def engine(folder: str, mars: dict[str, Any] | None = None, **options: Any) -> Any:
    from vllm import LLM

    shared: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 96,
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": 48,
        "enforce_eager": not ON_GPU,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    if ON_GPU:
        shared |= {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 2**28}
    speculation = {} if mars is None else {"speculative_config": {"method": "mars", **mars}}
    return LLM(folder, **shared | speculation | options)


def write(llm: Any, count: int = ROWS, *, dial: str | None = None, **options: Any) -> Answers:
    from vllm import SamplingParams

    asked: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **options}
    extra = None if dial is None else {"dial": dial}
    params = [SamplingParams(max_tokens=8 + 7 * (n % 4), extra_args=extra, **asked) for n in range(count)]
    prompts = [{"prompt_token_ids": [(7 * n + 3 * k) % 10 for k in range(3 + 11 * n % 70)]} for n in range(count)]
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]


def everything(llm: Any, *, plain: bool) -> dict[str, Any]:
    """What must be the same with the plugin and without; all are kept from generating the trained model's mask."""
    kinds: dict[str, Callable[[], Any]] = {
        "one": lambda: write(llm, 1, allowed_token_ids=WORDS),
        "many": lambda: write(llm, 2 * ROWS, allowed_token_ids=WORDS),
        "penalties": lambda: write(llm, 4, repetition_penalty=1.3, presence_penalty=0.4, allowed_token_ids=WORDS),
        "short": lambda: write(llm, 4, min_tokens=3, stop_token_ids=[4], ignore_eos=False, allowed_token_ids=WORDS),
        "long": lambda: longest(llm),
        "logprobs": lambda: logprobs(llm),
        "seeded": lambda: write(llm, 4, temperature=0.0, seed=3, allowed_token_ids=WORDS),
    }
    kinds["greedy"] = lambda: write(llm, 2 * ROWS)
    if not plain:
        kinds["one-token"] = lambda: write(llm, 4, dial="one-token")
    return {kind: timed(kind, made) for kind, made in kinds.items()}


def timed(kind: str, made: Callable[[], Any]) -> Any:
    begun = time.monotonic()
    found = made()
    print(f"{kind}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    return found


def longest(llm: Any) -> Answers:
    """Up to the end of the context."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, detokenize=False, allowed_token_ids=WORDS)
    prompts = [{"prompt_token_ids": [1 + n, 2, 3] * 20} for n in range(3)]
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]


def cached(llm: Any) -> list[int]:
    """A prompt of which all but the last token is in the prefix cache, the second time."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False, extra_args={"dial": "threshold=0.1"}
    )
    prompt = {"prompt_token_ids": [1 + n % 9 for n in range(33)]}
    return list(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)


def logprobs(llm: Any) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=12,
        ignore_eos=True,
        detokenize=False,
        logprobs=1,
        prompt_logprobs=1,
        allowed_token_ids=WORDS,
    )
    answers = llm.generate([{"prompt_token_ids": [3, 1, 4, 1, 5]}] * 2, params, use_tqdm=False)
    assert all(step[token].logprob <= 0 for each in answers for token, step in _written(each))
    return [[token for token, _ in _written(each)] for each in answers]


def _written(answer: Any) -> list[tuple[int, Any]]:
    return list(zip(answer.outputs[0].token_ids, answer.outputs[0].logprobs, strict=True))


RANDOM = ("exact", "one-token")
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.5}


def random_texts(llm: Any) -> dict[str, Answers]:
    """What requests with seeds sample, by their dial; some with truncation and penalties."""
    allowed: dict[str, Any] = {"allowed_token_ids": WORDS}
    more = {"top_k": 5, "top_p": 0.9, **PENALTIES, **allowed}
    return {dial: write(llm, 4, dial=dial, temperature=0.8, seed=5, **more) for dial in RANDOM} | {
        f"plain {dial}": write(llm, 4, dial=dial, temperature=1.0, seed=7, **allowed) for dial in RANDOM
    }


def lossy_texts(llm: Any) -> dict[str, Answers]:
    """Dials that accept everything which truncation and penalties leave: with one token left, the AR model's text."""
    return {
        dial: write(llm, 4, dial=dial, temperature=0.8, seed=5, top_k=1, **PENALTIES)
        for dial in ("relaxed=0.000001", "exact", "one-token")
    }


def sampled(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.7, max_tokens=4, ignore_eos=True, detokenize=False, allowed_token_ids=WORDS)
    answers = llm.generate([{"prompt_token_ids": [3, 1, 4, 1, 5]}] * 150, params, use_tqdm=False)
    counted = Counter(tuple(each.outputs[0].token_ids[2:4]) for each in answers)
    return [[*text, count] for text, count in counted.items()]


def state(llm: Any) -> dict[str, Any]:
    return next(each for each in llm.collective_rpc("mars_state") if each)


def measured(llm: Any) -> list[tuple[int, float]]:
    """Steps that were measured, and their tokens per sequence and step, for each load and length."""
    loads = llm.llm_engine.engine_core.engine_core.scheduler._masks_by_load._loads
    return [(speed.count, speed.tokens) for load in loads.values() for speed in load.speeds.values()]


def metrics(llm: Any) -> dict[str, int]:
    return {
        each.name.removeprefix("vllm:spec_decode_num_"): each.value
        for each in llm.get_metrics()
        if each.name.startswith("vllm:spec_decode") and hasattr(each, "value")
    }


def crowd(llm: Any, requests: int) -> dict[str, Any]:
    """Requests of all kinds that come and go."""
    from vllm import SamplingParams

    draw, dials = random.Random(0), ["exact", "relaxed=0.3", "threshold=0.3", "one-token", None]
    inner, left, finished = llm.llm_engine, list(range(requests)), set[str]()
    aborted = {str(number) for number in left if draw.random() < 0.2}
    while left or inner.has_unfinished_requests():
        for number in [left.pop() for _ in range(min(len(left), draw.randrange(4)))]:
            dial = draw.choice(dials)
            params = SamplingParams(
                temperature=draw.choice([0.0, 1.0]),
                max_tokens=draw.randint(1, 25),
                logprobs=draw.choice([None, None, 1]),
                ignore_eos=True,
                detokenize=False,
                extra_args=None if dial is None else {"dial": dial},
            )
            prompt = [draw.randrange(10) for _ in range(draw.randint(1, 40))]
            inner.add_request(str(number), {"prompt_token_ids": prompt}, params)
        for each in inner.step():
            if each.finished:
                finished.add(each.request_id)
            elif each.request_id in aborted and draw.random() < 0.3:
                inner.abort_request([each.request_id])
                finished.add(each.request_id)
    write(llm, 1)
    busy = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    gauges = {each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")}
    return {
        "asked": requests,
        "finished": len(finished),
        "busy": [gauges[name] for name in busy],
        "preempted": gauges["vllm:num_preemptions"],
    }


def main(folder: str, gated: str) -> dict[str, Any]:
    from mars.integrations.vllm import register

    if not ON_GPU:
        interpret()
    register()
    plain = engine(folder)
    told: dict[str, Any] = {
        "plain": everything(plain, plain=True),
        "plain sampled": timed("sampled", lambda: sampled(plain)),
    }
    plain.llm_engine.engine_core.shutdown()
    mars = engine(gated, {})
    told["mars"] = everything(mars, plain=False)
    told["metrics"], told["state"] = metrics(mars), state(mars)
    told["mars sampled"] = timed("sampled", lambda: sampled(mars))
    told["random"] = timed("random", lambda: random_texts(mars))
    told["lossy"] = timed("lossy", lambda: lossy_texts(mars))
    for dial in ("relaxed=0.1", "threshold=0.1"):
        before, start = state(mars), metrics(mars)
        told[dial] = {"text": write(mars, ROWS, dial=dial), "before": before, "after": state(mars)}
        told[dial]["metrics"] = {name: count - start[name] for name, count in metrics(mars).items()}
        told[dial]["decided"] = write(mars, ROWS, dial=dial, allowed_token_ids=ALL)
    told["measured"] = measured(mars)
    mars.collective_rpc("mars_turn", args=("one-token",))
    before, start = state(mars), metrics(mars)
    told["turned"] = {"text": write(mars, ROWS), "before": before, "after": state(mars)}
    told["turned"]["metrics"] = {name: count - start[name] for name, count in metrics(mars).items()}
    mars.llm_engine.engine_core.shutdown()
    mars = engine(folder, {"windows": {"3": 1, "5": 0}}, block_size=32, num_gpu_blocks_override=10)
    told["windows"] = everything(mars, plain=False)
    told["windows metrics"], told["windows state"] = metrics(mars), state(mars)
    told["cached"] = [cached(mars) for _ in range(2)]
    told["windows random"] = timed("random", lambda: random_texts(mars))
    told["crowd"] = timed("crowd", lambda: crowd(mars, CROWD))
    mars.llm_engine.engine_core.shutdown()
    return told


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
