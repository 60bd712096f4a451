"""Gauges for Prometheus, under vLLM's names where they mean the same."""

import time
from collections import Counter as Counts
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mars.serving.engine_client import EngineClient, RequestStream
from mars.serving.messages import EngineOutputs, FromEngine

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """Everything that is counted, in a registry of its own."""

    def __init__(self, client: EngineClient, model: str) -> None:
        self.registry = CollectorRegistry()
        self._client = client
        self._model = model
        self.running = self._make(Gauge, "vllm:num_requests_running", "Requests that are being decoded")
        self.waiting = self._make(Gauge, "vllm:num_requests_waiting", "Requests that wait to be admitted")
        self.cache_use = self._make(Gauge, "vllm:kv_cache_usage_perc", "Share of the cache in use, 1 is all")
        self.prompt_tokens = self._make(Counter, "vllm:prompt_tokens", "Prompt tokens of finished requests")
        self.generation_tokens = self._make(Counter, "vllm:generation_tokens", "Tokens written")
        self.finished = Counter(
            "vllm:request_success",
            "Requests by how they ended",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.first_token = self._make(Histogram, "vllm:time_to_first_token_seconds", "From request to first token")
        self.per_token = self._make(Histogram, "vllm:inter_token_latency_seconds", "Between tokens, after the first")
        self.whole = self._make(Histogram, "vllm:e2e_request_latency_seconds", "From request to last token")
        self.forwards = self._make(Counter, "mars:row_forwards", "Forwards, counted once for every sequence in them")
        self.checked = self._make(Counter, "mars:tokens_checked", "Tokens whose AR choice is known")
        self.agreed = self._make(Counter, "mars:tokens_agreed", "Of those, how many are that choice")
        self.accepted = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Tokens that a forward emitted beyond its first, by how far behind it they stand",
            ["model_name", "position"],
            registry=self.registry,
        )
        self.moves = Counter(
            "mars:governor_moves", "Turns of the dial by load", ["model_name", "direction"], registry=self.registry
        )
        self.restarts = self._make(Gauge, "mars:engine_restarts", "How often the engine's process was started again")
        self.open = self._make(Gauge, "mars:open_requests", "Requests that the engine may still have")
        self.dial = Gauge("mars:dial", "1 for the server's dial", ["model_name", "dial"], registry=self.registry)
        client.listeners.append(self._receive)

    def _make(self, kind: Any, name: str, text: str) -> Any:
        options = {"buckets": SECONDS} if kind is Histogram else {}
        return kind(name, text, ["model_name"], registry=self.registry, **options).labels(self._model)

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, EngineOutputs):
            self.forwards.inc(sum(each.forwards for each in message.outputs))
            sizes = Counts(size for each in message.outputs for size in each.steps)
            self.generation_tokens.inc(sum(size * count for size, count in sizes.items()))
            for position in range(max(sizes, default=1) - 1):
                further = sum(count for size, count in sizes.items() if size > position + 1)
                self.accepted.labels(self._model, position).inc(further)

    def finish(self, stream: RequestStream) -> None:
        """A request has ended, one way or another."""
        output = stream.output
        self.finished.labels(self._model, output.finish_reason or "abort").inc()
        self.prompt_tokens.inc(len(stream.request.prompt))
        self.checked.inc(output.num_verified)
        self.agreed.inc(output.num_agreed)
        if output.times:
            first, last = output.times[0], output.times[-1]
            self.first_token.observe(first)
            later = output.num_tokens - output.steps[0]
            if later:
                self.per_token.observe((last - first) / later)
            self.whole.observe(time.perf_counter() - output.started)

    def text(self, dial: str) -> bytes:
        load = self._client.load
        self.running.set(load.running)
        self.waiting.set(load.waiting)
        self.cache_use.set(load.cache_usage)
        self.open.set(self._client.num_open)
        self.restarts.set(self._client.restarts)
        self.dial.clear()
        self.dial.labels(self._model, dial).set(1)
        return generate_latest(self.registry)
