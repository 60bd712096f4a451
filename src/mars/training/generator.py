"""Many requests through the engine: as soon as one ends, the next one starts."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from mars.decoding.request import Answer, Request
from mars.engine import Engine, memory_for
from mars.errors import MarsError
from mars.method.dials import Dial
from mars.method.sampling import Sampling
from mars.models import Checkpoint


def run(engine: Engine, requests: Iterable[Request], ahead: int = 64) -> Generator[tuple[int, Answer], None, None]:
    """The index and answer of every request as it ends; if the caller stops early, the others are aborted.

    ``ahead`` requests wait in the engine, so that it always has one to start.
    """
    source = enumerate(requests)
    running: list[tuple[int, Answer]] = []
    try:
        while True:
            for index, request in islice(source, max(0, ahead - engine.waiting)):
                running.append((index, engine.add(request)))
            if not running:
                return
            engine.step()
            done = [each for each in running if each[1].finish_reason is not None]
            if done:
                running = [each for each in running if each[1].finish_reason is None]
            yield from done
    finally:
        for _, answer in running:
            engine.cancel(answer)


@dataclass(frozen=True, slots=True)
class Job:
    """A text to continue. ``key`` is the caller's own name for it."""

    key: Any
    prompt: list[int]
    temperature: float = 0.0
    max_new_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Generated:
    job: Job
    tokens: list[int]
    """Without the end token"""
    ended: bool
    """False: it was cut off at the limit"""


class TextGenerator:
    """Continues texts with the engine: greedily, or at each job's temperature."""

    def __init__(self, checkpoint: Checkpoint, max_num_seqs: int, length: int, seed: int = 0) -> None:
        """``length``: most tokens of a text, prompt and answer together."""
        self.length = length
        self._max_num_seqs = max_num_seqs
        self._seeds = count(seed << 32)
        self._engine = Engine(checkpoint, rows=max_num_seqs, memory=memory_for(checkpoint, max_num_seqs, length))
        self._dial = Dial("exact" if checkpoint.settings else "one-token")  # both give the same text

    def generate(self, jobs: Iterable[Job]) -> Iterator[Generated]:
        """The texts in the order in which they end."""
        started: dict[int, Job] = {}

        def requests() -> Iterator[Request]:
            for number, job in enumerate(jobs):
                started[number] = job
                yield self._request(job)

        for number, answer in run(self._engine, requests(), self._max_num_seqs):
            ended = answer.finish_reason == "stop"
            yield Generated(started.pop(number), answer.token_ids[:-1] if ended else answer.token_ids, ended)

    def _request(self, job: Job) -> Request:
        room = self.length - len(job.prompt)
        if room < 1:
            raise MarsError(f"a prompt of {len(job.prompt)} tokens leaves no room for an answer in {self.length}")
        return Request(
            job.prompt,
            self._dial,
            Sampling(job.temperature, seed=next(self._seeds)),
            max_new_tokens=min(job.max_new_tokens, room),
            block_size=self._engine.block_size,
        )
