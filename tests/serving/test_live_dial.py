"""Sixteen streams while the dial is turned back and forth."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import openai

import mars
from tests.serving.conftest import MODEL, serving

PROMPTS = ["abc", "bcd", "cde", "def", "efg", "fgh", "ghi", "hij"] * 2
TURNS = ("one-token", "threshold=0.1", "exact")


def test_streams_go_on_while_the_dial_is_turned(letters: Path) -> None:
    """A threshold of 0.1 believes nearly every mask, so whether it is on shows in every forward."""

    over = asyncio.Event()

    async def read(client: openai.AsyncOpenAI, prompt: str, seen: list[tuple[float, int]]) -> int:
        """One stream after the other; returns how many there were."""
        count = 0
        while not over.is_set():
            count += 1
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": prompt}],
                stream=True,
                temperature=0,
                max_tokens=230,
                extra_body={"ignore_eos": True, "stream_options": {"include_forwards": True}},
            )
            ends = []
            async for chunk in stream:
                for tokens, _ in (chunk.model_extra or {}).get("mars", {}).get("forwards", []):
                    seen.append((time.monotonic(), tokens))
                ends.append(chunk.choices[0].finish_reason)
            assert ends[-1] == "length" and set(ends[:-1]) == {None}, "a stream broke"
        return count

    async def turn(client: openai.AsyncOpenAI) -> list[tuple[float, float]]:
        turned = []
        for dial in TURNS:
            before = time.monotonic()
            await client.put("/dial", body={"dial": dial}, cast_to=object)
            turned.append((before, time.monotonic()))
            await asyncio.sleep(1.6)
        over.set()
        return turned

    async def everything(address: str) -> tuple[list[int], list[tuple[float, int]], list[tuple[float, float]]]:
        seen: list[tuple[float, int]] = []
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            reading = [asyncio.create_task(read(client, prompt, seen)) for prompt in PROMPTS]
            turned = await turn(client)
            return await asyncio.gather(*reading), seen, turned

    with serving("--rows", 16, model=letters) as address:
        counts, seen, turned = asyncio.run(everything(address))
    assert len(counts) == 16 and all(counts)
    (_, strict), (loosening, loose), (exact, _) = turned

    def per_forward(start: float, end: float) -> float:
        emitted = [tokens for at, tokens in seen if start < at < end]
        assert emitted, "nothing was written in between: a weak test"
        return sum(emitted) / len(emitted)

    assert per_forward(strict + 1, loosening) == 1
    assert per_forward(loose + 1, exact) > 1.5


def test_texts_are_the_ar_models_whoever_else_is_there(letters: Path, server: str) -> None:
    model = mars.load(letters, device="cpu", dtype="float32")
    expected = [model.generate(prompt, dial="one-token", max_new_tokens=40).text for prompt in PROMPTS[:8]]

    async def ask(dial: str) -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
            asked = [
                client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": prompt}],
                    temperature=0,
                    max_tokens=40,
                    extra_body={"dial": dial},
                )
                for prompt in PROMPTS[:8]
            ]
            return [each.choices[0].message.content for each in await asyncio.gather(*asked)]

    assert asyncio.run(ask("exact")) == asyncio.run(ask("one-token")) == expected
