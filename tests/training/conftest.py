"""A tiny chat model and chats it can learn: letters that count up in steps."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from mars.models.saving import save_checkpoint
from mars.training.recipe import Recipe, parse_recipe
from tests.conftest import tiny_checkpoint

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<end>{% endif %}{% endfor %}"


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random model that knows ten letters and was never trained."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    checkpoint = tiny_checkpoint("llama")
    checkpoint.tokenizer.chat_template = TEMPLATE
    checkpoint.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<end>|."), "isolated")
    save_checkpoint(replace(checkpoint, settings=None), folder)
    return folder


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 chats: the user begins to count, the assistant goes on."""
    path, draw = tmp_path_factory.mktemp("data") / "chats.jsonl", random.Random(0)
    with path.open("w") as file:
        for _ in range(200):
            start, step, asked = draw.randrange(10), draw.randrange(1, 4), draw.randrange(3, 12)
            length = asked + draw.randrange(5, 27)
            text = "".join("abcdefghij"[(start + step * place) % 10] for place in range(length))
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
