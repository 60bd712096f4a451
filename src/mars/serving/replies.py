"""Answers in OpenAI's format, whole or in chunks."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from mars.core.output import Logprob, RequestOutput
from mars.serving.engine_client import RequestStream
from mars.serving.tools import Call, CallReader, Toolbox

LEAST = -9999.0  # stands for minus infinity, which JSON does not have
KINDS = {"chat.completion": "chatcmpl", "text_completion": "cmpl"}


def usage(prompt_tokens: int, outputs: Sequence[RequestOutput]) -> dict[str, int]:
    written = sum(output.num_tokens for output in outputs)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": written, "total_tokens": prompt_tokens + written}


def figures(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """What OpenAI's format has no place for: the dial, and what it brought."""
    forwards = sum(output.forwards for output in outputs)
    tokens = sum(output.num_tokens for output in outputs)
    verified = sum(output.num_verified for output in outputs)
    return {
        "dial": outputs[0].dial,
        "forwards": forwards,
        "tokens_per_forward": round(tokens / max(1, forwards), 4),
        "agreement": round(sum(output.num_agreed for output in outputs) / verified, 4) if verified else 1.0,
    }


@dataclass(frozen=True, slots=True)
class Reply:
    """What all parts of one response share."""

    kind: str  # ``chat.completion`` or ``text_completion``
    model: str
    tokenizer: PreTrainedTokenizerBase
    tools: Toolbox | None = None  # what may be called
    id: str = field(init=False)
    created: int = field(init=False)
    _readers: dict[int, CallReader] = field(default_factory=dict)  # of each choice, where there are tools

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{KINDS[self.kind]}-{uuid4().hex}")
        object.__setattr__(self, "created", int(time.time()))

    @property
    def is_chat(self) -> bool:
        return self.kind == "chat.completion"

    def whole(self, prompt_tokens: int, streams: Sequence[RequestStream]) -> dict[str, Any]:
        choices, outputs = [], [stream.output for stream in streams]
        for index, stream in enumerate(streams):
            text = stream.output.text
            said, calls = self._read(index, text, last=True)
            message: dict[str, Any] = {"role": "assistant", "content": None if calls and not said else said}
            if calls:
                message["tool_calls"] = [each.as_dict() for each in calls]
            choice = self._choice(index, {"message": message}, {"text": text}, stream.output)
            choices.append(choice | {"logprobs": self._logprobs(stream, 0)})
        return self._head(self.kind, choices) | {"usage": usage(prompt_tokens, outputs), "mars": figures(outputs)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """A chat's first chunk says who speaks; with tools, it may be that nothing is said."""
        delta = {"role": "assistant", "content": None if self.tools else ""}
        return self._chunk(index, {"delta": delta}, {}) if self.is_chat else None

    def text(self, index: int, sent: int, stream: RequestStream, *, by_forward: bool) -> dict[str, Any] | None:
        """What came after the first ``sent`` forwards; ``mars`` has tokens and characters of each, and figures so far.

        None while all of it is held back, since it may become a call.
        """
        pieces, steps = stream.output.pieces[sent:], stream.output.steps[sent:]
        text = "".join(pieces)
        chunk = self._chunk(index, {"delta": self._delta(index, text)}, {"text": text})
        chunk["choices"][0]["logprobs"] = self._logprobs(stream, stream.output.num_tokens - sum(steps))
        if by_forward:
            sizes = [[tokens, len(piece)] for tokens, piece in zip(steps, pieces, strict=True)]
            chunk["mars"] = figures([stream.output]) | {"forwards": sizes}
        choice = chunk["choices"][0]
        is_empty = choice.get("delta") == {} and choice["logprobs"] is None and not by_forward
        return None if is_empty else chunk

    def closing(self, index: int, output: RequestOutput) -> dict[str, Any]:
        return self._chunk(index, {"delta": self._delta(index, "", last=True)}, {"text": ""}, output)

    def account(self, prompt_tokens: int, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The last chunk, for those who asked for it."""
        head = self._head(self._chunk_kind, [])
        return head | {"usage": usage(prompt_tokens, outputs), "mars": figures(outputs)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else self.kind

    def _chunk(
        self, index: int, chat: dict[str, Any], plain: dict[str, Any], output: RequestOutput | None = None
    ) -> dict[str, Any]:
        return self._head(self._chunk_kind, [self._choice(index, chat, plain, output)])

    def _choice(
        self, index: int, chat: dict[str, Any], plain: dict[str, Any], output: RequestOutput | None
    ) -> dict[str, Any]:
        content = chat if self.is_chat else plain
        reason: str | None = output.finish_reason if output else None
        if reason == "stop" and index in self._readers and self._readers[index].called:
            reason = "tool_calls"
        return {"index": index, **content, "logprobs": None, "finish_reason": reason}

    def _delta(self, index: int, text: str, *, last: bool = False) -> dict[str, Any]:
        said, calls = self._read(index, text, last)
        delta: dict[str, Any] = {"content": said} if said else {}
        if calls:
            first = self._readers[index].called - len(calls)
            delta["tool_calls"] = [{"index": number, **each.as_dict()} for number, each in enumerate(calls, first)]
        return delta

    def _read(self, index: int, text: str, last: bool) -> tuple[str, list[Call]]:
        """What a choice says and calls, as far as this text makes it sure; ``last``: no more will come."""
        if self.tools is None:
            return text, []
        reader = self._readers.setdefault(index, self.tools.reader())
        said, calls = reader.feed(text)
        rest, more = reader.flush() if last else ("", [])
        return said + rest, calls + more

    def _logprobs(self, stream: RequestStream, start: int) -> dict[str, Any] | None:
        """Of the tokens from ``start`` on, without the one that ends the text."""
        if stream.request.logprobs is None:
            return None
        tokens, logprobs = stream.output.token_ids, stream.output.logprobs
        known = zip(tokens[start:], logprobs[start:], strict=True)
        shown = [(token, logprob) for token, logprob in known if token not in stream.end_tokens]
        if self.is_chat:
            return {"content": [self._entry(token, logprob) for token, logprob in shown], "refusal": None}
        words = [self._word(token) for token, _ in shown]
        before = sum(len(self._word(token)) for token in tokens[:start])
        return {
            "tokens": words,
            "token_logprobs": [_finite(logprob.logprob) for _, logprob in shown],
            "top_logprobs": [{self._word(each): _finite(value) for each, value in logprob.top} for _, logprob in shown],
            "text_offset": list(accumulate(map(len, words), initial=before))[:-1],
        }

    def _entry(self, token: int, logprob: Logprob) -> dict[str, Any]:
        top = [self._scored(each, value) for each, value in logprob.top]
        return self._scored(token, logprob.logprob) | {"top_logprobs": top}

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        word = self._word(token)
        return {"token": word, "logprob": _finite(logprob), "bytes": list(word.encode())}

    def _word(self, token: int) -> str:
        return self.tokenizer.decode([token])

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)


def event(data: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


DONE = "data: [DONE]\n\n"
