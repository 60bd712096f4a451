"""What clients may ask: OpenAI's parameters, and a few of our own. What is not here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mars.method.dials import Dial
from mars.method.sampling import Sampling

TokenBias = Annotated[float, Field(ge=-100, le=100)]
Stop = str | Annotated[list[str], Field(max_length=16)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(Strict):
    include_usage: bool = False


class Completing(Strict):
    """What both kinds of completion have in common."""

    model: str
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stop | None = None
    seed: int | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[int, TokenBias] | None = None
    user: str | None = None
    """Of no effect; OpenAI's clients may send it"""

    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    dial: str | None = None
    """For this request alone; by default the server's, also when that is turned"""

    @field_validator("dial")
    @classmethod
    def _known(cls, dial: str | None) -> str | None:
        return None if dial is None else str(Dial.parse(dial))

    @model_validator(mode="after")
    def _fitting(self) -> Completing:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer, if it says so"""
        raise NotImplementedError

    @property
    def alternatives(self) -> int | None:
        """Of each token, how many it wants the likelihood of besides; None: none, nor its own"""
        raise NotImplementedError

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def sampling(self, choice: int) -> Sampling:
        """For one of the ``n`` choices: with a seed, each gets one of its own."""
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias or {},
            seed=None if self.seed is None else self.seed + choice,
        )


class Part(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """As chat templates want it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content}


class ChatCompletionRequest(Completing):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("give max_tokens or max_completion_tokens, not both")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


Tokens = Annotated[list[int], Field(min_length=1)]


class CompletionRequest(Completing):
    prompt: str | Tokens | Annotated[list[str] | list[Tokens], Field(min_length=1, max_length=128)]
    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several."""
        if isinstance(self.prompt, list) and not isinstance(self.prompt[0], int):
            return list(self.prompt)
        return [self.prompt]


class DialRequest(Strict):
    dial: str

    @field_validator("dial")
    @classmethod
    def _known(cls, dial: str) -> str:
        return str(Dial.parse(dial))


class TokenizeRequest(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of the two")
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
