"""What clients may ask: OpenAI's parameters, and a few of our own. What is not here is refused by name."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from mars.core.grammar import json_grammar
from mars.method.acceptance import Dial
from mars.method.sampling import SamplingParams
from mars.serving.tools import Style, Toolbox

MOST_BIASED = 1024  # tokens of a logit_bias
TokenBias = Annotated[float, Field(ge=-100, le=100)]
Stop = str | Annotated[list[str], Field(max_length=16)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(Strict):
    include_usage: bool = False
    include_forwards: bool = False  # ours: how many tokens and characters each forward wrote


class BaseCompletionRequest(Strict):
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
    user: str | None = None  # of no effect; OpenAI's clients may send it

    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    dial: str | None = None  # for this request alone; by default the server's, also when that is turned

    @model_validator(mode="before")
    @classmethod
    def _null_is_nothing(cls, body: Any) -> Any:
        """As at OpenAI, whose clients send null for what is not given."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_enough(cls, bias: Any) -> Any:
        if isinstance(bias, dict) and len(bias) > MOST_BIASED:
            raise ValueError(f"names {len(bias)} tokens, but at most {MOST_BIASED} are allowed")
        return bias

    @field_validator("dial")
    @classmethod
    def _known(cls, dial: str | None) -> str | None:
        return None if dial is None else str(Dial.parse(dial))

    @model_validator(mode="after")
    def _fitting(self) -> BaseCompletionRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer, if it says so"""
        raise NotImplementedError

    @property
    def alternatives(self) -> int | None:
        """How many alternatives of each token it wants logprobs of; None: no logprobs at all"""
        raise NotImplementedError

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def sampling(self, choice: int) -> SamplingParams:
        """For one of the ``n`` choices: with a seed, each gets one of its own."""
        return SamplingParams(
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


def _read_json(text: Any) -> Any:
    try:
        return json.loads(text or "{}")
    except (TypeError, ValueError, RecursionError):
        raise ValueError("must be the text of a JSON object") from None


class CalledFunction(Strict):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_read_json, json_schema_input_type=str)]
    """JSON, as the model wrote it"""


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None  # these four are part of a message that a client got and sends back

    @model_validator(mode="after")
    def _complete(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message without tool_calls needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only the assistant's messages have tool_calls")
        return self

    def as_dict(self) -> dict[str, Any]:
        """As chat templates want it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or [])
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [each.model_dump() for each in self.tool_calls]
        if self.role == "tool":
            message |= {"tool_call_id": self.tool_call_id, "name": self.name}
        return message


class JsonSchema(Strict):
    name: str
    description: str | None = None
    definition: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None  # of no effect: answers follow the schema in any case


class TextFormat(Strict):
    type: Literal["text"]

    @property
    def grammar(self) -> str | None:
        return None


class JsonObjectFormat(Strict):
    type: Literal["json_object"]

    @property
    def grammar(self) -> str | None:
        return json_grammar({"type": "object"})


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema

    @property
    def grammar(self) -> str | None:
        return json_grammar(self.json_schema.definition)


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class Function(Strict):
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class ChatCompletionRequest(BaseCompletionRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _usable_tools(self) -> ChatCompletionRequest:
        names = [tool.function.name for tool in self.tools or []]
        if len(names) > len(set(names)):
            raise ValueError("two tools have the same name")
        if not self._forced <= {*names} or (self.tool_choice == "required" and not names):
            raise ValueError("tool_choice asks for a function that is not among the tools")
        if self.may_call and self.response_format is not None and self.response_format.type != "text":
            raise ValueError("response_format cannot be combined with tools: use tool_choice none")
        return self

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def _forced(self) -> frozenset[str]:
        """Functions one of which must be called"""
        if isinstance(self.tool_choice, NamedTool):
            return frozenset({self.tool_choice.function.name})
        return frozenset(each.function.name for each in self.tools or [] if self.tool_choice == "required")

    def toolbox(self, style: Style) -> Toolbox:
        functions = [each.function.model_dump(exclude_none=True) for each in self.tools or []]
        return Toolbox(style, functions, self._forced, self.parallel_tool_calls)

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


class CompletionRequest(BaseCompletionRequest):
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


AUTO = "auto"


class DialRequest(Strict):
    dial: str  # or `AUTO`, for the governor

    @field_validator("dial")
    @classmethod
    def _known(cls, dial: str) -> str:
        return dial if dial == AUTO else str(Dial.parse(dial))


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
