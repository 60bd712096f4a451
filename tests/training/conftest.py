"""Chats that a tiny model can learn: letters that count up in steps."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from mars.training.recipe import Recipe, parse_recipe


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 chats: the user begins to count, the assistant goes on."""
    path, draw = tmp_path_factory.mktemp("data") / "chats.jsonl", random.Random(0)
    with path.open("w") as file:
        for _ in range(200):
            start, step, asked = draw.randrange(10), draw.randrange(1, 4), draw.randrange(3, 12)
            length = asked + draw.randrange(5, 27)
            text = "".join("abcdefghij"[(start + step * index) % 10] for index in range(length))
            file.write(json.dumps({"prompt": text[:asked], "completion": text[asked:]}) + "\n")
    return path


def small_recipe(model: Path, chats: Path, output: Path, **changes: Any) -> Recipe:
    content: dict[str, Any] = {
        "model": str(model),
        "output": str(output),
        "data": {"train": [str(chats)], "length": 64, "held_out": 16},
        "dtype": "float32",
        "trainer": {
            "per_device_train_batch_size": 4,
            "learning_rate": 5e-3,
            "logging_steps": 5,
            "use_cpu": True,
            "max_steps": 40,
        },
        "stages": [{"stage": "mars"}],
    }
    return parse_recipe(content | changes)
