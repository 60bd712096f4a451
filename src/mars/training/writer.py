"""Many answers, as fast as the engine writes them: as soon as one is done, the next job takes its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from mars.decoding.request import Answer, Request
from mars.engine import Engine, memory_for
from mars.errors import MarsError
from mars.method.acceptance import Dial
from mars.method.sampling import Sampling
from mars.models import Checkpoint


@dataclass(frozen=True, slots=True)
class Job:
    """A text to continue. ``key`` is the caller's own mark."""

    key: Any
    prompt: list[int]
    temperature: float = 0.0
    max_new_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Written:
    job: Job
    tokens: list[int]
    """Without the end token"""
    ended: bool
    """Did the model end it, rather than the limit?"""


class Writer:
    """``write`` turns jobs into texts, in the order in which they get done."""

    def __init__(self, checkpoint: Checkpoint, rows: int, length: int, seed: int = 0) -> None:
        """``length``: most tokens of a text, prompt and answer together."""
        self.length = length
        self._rows = rows
        self._seeds = count(seed << 32)
        self._engine = Engine(checkpoint, rows=rows, memory=memory_for(checkpoint, rows, length))
        self._dial = Dial("exact" if checkpoint.settings else "one-token")  # the same text

    def write(self, jobs: Iterable[Job]) -> Iterator[Written]:
        """As many jobs wait as are written, so that no row of the engine is ever idle."""
        source = iter(jobs)
        open_jobs = self._take(source, 2 * self._rows)
        while open_jobs:
            self._engine.step()
            done = [each for each in open_jobs if each[1].finish_reason is not None]
            if done:
                open_jobs = [each for each in open_jobs if each[1].finish_reason is None]
                open_jobs += self._take(source, len(done))
            for job, answer in done:
                ended = answer.finish_reason == "stop"
                yield Written(job, answer.token_ids[:-1] if ended else answer.token_ids, ended)

    def _take(self, source: Iterator[Job], most: int) -> list[tuple[Job, Answer]]:
        return [(job, self._engine.add(self._request(job))) for job in islice(source, most)]

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
