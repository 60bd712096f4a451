"""A model to convert: random, with a chat template that shows where a turn begins, and room for a recipe's rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import save_chat_model

TEMPLATE = "{% for m in messages %}{{ 'j' if m['role'] == 'user' else '' }}{{ m['content'] }}<end>{% endfor %}"


@pytest.fixture(scope="session")
def your_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "yours"
    return save_chat_model(folder, trained=False, template=TEMPLATE, max_position_embeddings=2048)
