"""Continues many texts with the engine, for training data."""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import TypeVar

from mars.core.request import Request
from mars.engine import Engine, memory_for, run
from mars.errors import MarsError
from mars.method.acceptance import Dial
from mars.method.sampling import SamplingParams
from mars.models import Checkpoint

Key = TypeVar("Key")


class TextGenerator:
    """Continues texts with the engine: greedily, or at a temperature."""

    def __init__(self, checkpoint: Checkpoint, max_num_seqs: int, length: int, seed: int = 0) -> None:
        """``length``: most tokens of a text, prompt and answer together."""
        self.length = length
        self._max_num_seqs = max_num_seqs
        self._seeds = count(seed << 32)
        self._engine = Engine(
            checkpoint, max_num_seqs=max_num_seqs, memory=memory_for(checkpoint, max_num_seqs, length)
        )
        self._dial = Dial("exact" if checkpoint.settings else "one-token")  # both give the same text

    def request(self, prompt: list[int], temperature: float = 0.0, max_new_tokens: int = 256) -> Request:
        room = self.length - len(prompt)
        if room < 1:
            raise MarsError(f"a prompt of {len(prompt)} tokens leaves no room for an answer in {self.length}")
        return Request(
            prompt,
            self._dial,
            SamplingParams(temperature, seed=next(self._seeds)),
            max_new_tokens=min(max_new_tokens, room),
            block_size=self._engine.block_size,
        )

    def generate(self, jobs: Iterable[tuple[Key, Request]]) -> Iterator[tuple[Key, list[int], bool]]:
        """The key of every request as it ends, its text without the end token, and whether it has one."""
        keys: dict[int, Key] = {}

        def requests() -> Iterator[Request]:
            for index, (key, request) in enumerate(jobs):
                keys[index] = key
                yield request

        for index, answer in run(self._engine, requests(), self._max_num_seqs):
            ended = answer.finish_reason == "stop"
            yield keys.pop(index), answer.token_ids[:-1] if ended else answer.token_ids, ended
