"""Answers in OpenAI's format, whole or in chunks."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from mars.decoding.request import Answer

KINDS = {"chat.completion": "chatcmpl", "text_completion": "cmpl"}


def usage(prompt_tokens: int, answers: Sequence[Answer]) -> dict[str, int]:
    written = sum(len(answer.token_ids) for answer in answers)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": written, "total_tokens": prompt_tokens + written}


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """What our users want to know besides: how fast it went, and at what price."""
    forwards = sum(len(answer.steps) for answer in answers)
    tokens = sum(len(answer.token_ids) for answer in answers)
    checked = sum(answer.checked for answer in answers)
    return {
        "dial": str(answers[0].request.dial),
        "forwards": forwards,
        "tokens_per_forward": round(tokens / max(1, forwards), 4),
        "agreement": round(sum(answer.agreed for answer in answers) / checked, 4) if checked else 1.0,
    }


@dataclass(frozen=True, slots=True)
class Reply:
    """What all parts of one response share."""

    kind: str
    """``chat.completion`` or ``text_completion``"""
    model: str
    id: str = field(init=False)
    created: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{KINDS[self.kind]}-{uuid4().hex}")
        object.__setattr__(self, "created", int(time.time()))

    @property
    def is_chat(self) -> bool:
        return self.kind == "chat.completion"

    def whole(self, prompt_tokens: int, answers: Sequence[Answer], texts: Sequence[str]) -> dict[str, Any]:
        choices = [
            self._choice(index, {"message": {"role": "assistant", "content": text}}, {"text": text}, answer)
            for index, (answer, text) in enumerate(zip(answers, texts, strict=True))
        ]
        return self._head(self.kind, choices) | {"usage": usage(prompt_tokens, answers), "mars": figures(answers)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """A chat's first chunk says who speaks."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, {}) if self.is_chat else None

    def text(self, index: int, pieces: Sequence[str], steps: Sequence[int]) -> dict[str, Any]:
        """What one or more forwards wrote; ``mars.forwards`` has tokens and characters of each."""
        text = "".join(pieces)
        sizes = [[tokens, len(piece)] for tokens, piece in zip(steps, pieces, strict=True)]
        return self._chunk(index, {"delta": {"content": text}}, {"text": text}) | {"mars": {"forwards": sizes}}

    def closing(self, index: int, answer: Answer) -> dict[str, Any]:
        return self._chunk(index, {"delta": {}}, {"text": ""}, answer)

    def account(self, prompt_tokens: int, answers: Sequence[Answer]) -> dict[str, Any]:
        """The last chunk, for those who asked for it."""
        head = self._head(self._chunk_kind, [])
        return head | {"usage": usage(prompt_tokens, answers), "mars": figures(answers)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else self.kind

    def _chunk(
        self, index: int, chat: dict[str, Any], plain: dict[str, Any], answer: Answer | None = None
    ) -> dict[str, Any]:
        return self._head(self._chunk_kind, [self._choice(index, chat, plain, answer)])

    def _choice(self, index: int, chat: dict[str, Any], plain: dict[str, Any], answer: Answer | None) -> dict[str, Any]:
        content = chat if self.is_chat else plain
        return {"index": index, **content, "logprobs": None, "finish_reason": answer and answer.finish_reason}

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def event(data: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


DONE = "data: [DONE]\n\n"
