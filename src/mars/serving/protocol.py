"""What clients may ask: OpenAI's parameters, and a few of our own. What is not here is refused by name."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from mars.core.grammar import json_grammar
from mars.errors import MarsError
from mars.method.acceptance import Dial
from mars.method.sampling import SamplingParams
from mars.serving.tools import Style, Toolbox

MAX_STOPS = 16
MAX_PROMPTS = 128
MAX_DEPTH = 100  # of schemas and arguments
NOTHING = {"modalities": ["text"], "echo": False}  # of parameters that are not supported, values that ask for nothing
MOST_BIASED = 1024  # tokens of a logit_bias


class Strict(BaseModel):
    """Takes no text for a number, no number for a flag, and no parameter that it does not know."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_nothing(cls, body: Any) -> Any:
        """As at OpenAI, whose clients send null for what is not given."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # of no effect
    include_forwards: bool = False  # ours: what each forward wrote, and the figures so far


def _token(key: Any) -> int:
    """Of a dictionary in JSON, whose keys are text."""
    if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20):
        raise ValueError('must be the number of a token, such as "42"')
    return int(key)


TokenKey = Annotated[int, BeforeValidator(_token, json_schema_input_type=str)]
TokenBias = Annotated[float, Field(ge=-100, le=100)]


def _as_stops(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise ValueError("must be a text or a list of texts")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} texts are allowed, not {len(stops)}")
    return stops


Stop = str | Annotated[list[str], Field(max_length=MAX_STOPS)]  # for the document


NoEffect = SkipJsonSchema[Any]


class Ignored(Strict):
    """What OpenAI's clients may send and what has no effect on an answer here; the log names it.

    The document of the API leaves it out.
    """

    metadata: NoEffect = None
    prediction: NoEffect = None
    prompt_cache_key: NoEffect = None
    prompt_cache_options: NoEffect = None
    prompt_cache_retention: NoEffect = None
    reasoning_effort: NoEffect = None
    safety_identifier: NoEffect = None
    service_tier: NoEffect = None
    store: NoEffect = None
    user: NoEffect = None
    verbosity: NoEffect = None

    @property
    def ignored(self) -> list[str]:
        return sorted(Ignored.model_fields.keys() & self.model_fields_set)


class BaseCompletionRequest(Ignored):
    """What both kinds of completion have in common."""

    model: str
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Annotated[list[str], BeforeValidator(_as_stops, json_schema_input_type=Stop)] = []
    seed: int | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[TokenKey, TokenBias] | None = None

    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    dial: str | None = None  # for this request alone; by default the server's, also when that is turned

    @model_validator(mode="before")
    @classmethod
    def _asks_for_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if name not in NOTHING or value != NOTHING[name]}

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
            raise MarsError("stream_options needs stream=true", param="stream_options")
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer, if it says so"""
        raise NotImplementedError

    @property
    def alternatives(self) -> int | None:
        """How many alternatives of each token it wants logprobs of; None: no logprobs at all"""
        raise NotImplementedError

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
    """Of a message's content; for the document."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Any = None  # of no effect


def _as_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError('must be a text, or a list of parts like {"type": "text", "text": "…"}')
    return "".join(_part_text(number, part) for number, part in enumerate(content))


def _part_text(number: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        what = f"is of the type {kind!r}" if isinstance(kind, str) else "has no type"
        raise ValueError(f'part {number} {what}, but only {{"type": "text", "text": "…"}} can be read')
    if not isinstance(text := part.get("text"), str):
        raise ValueError(f"part {number} has no text")
    if unknown := part.keys() - Part.model_fields.keys():
        raise ValueError(f"part {number} has an unsupported parameter: {min(unknown)}")
    return text


def _read_json(text: Any) -> Any:
    try:
        return json.loads(text or "{}")
    except (TypeError, ValueError, RecursionError):
        raise ValueError("must be the text of a JSON object") from None


def _shallow(value: dict[str, Any]) -> dict[str, Any]:
    """What is deeper breaks the programs that walk through it."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [each for part in level for each in (part.values() if isinstance(part, dict) else part)]
        level = [part for part in level if isinstance(part, dict | list)]
        if not level:
            return value
    raise ValueError(f"is nested more than {MAX_DEPTH} levels deep")


JsonObject = Annotated[dict[str, Any], AfterValidator(_shallow)]


class CalledFunction(Strict):
    name: str
    arguments: Annotated[JsonObject, BeforeValidator(_read_json, json_schema_input_type=str)] = {}
    """JSON, as the model wrote it"""


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | list[Part])] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    """Part of a message that a client got and sends back"""

    @model_validator(mode="after")
    def _complete(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message without tool_calls needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only the assistant's messages have tool_calls")
        return self

    def as_dict(self) -> dict[str, Any]:
        """As chat templates want it."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content or ""}
        if self.tool_calls:
            message["tool_calls"] = [each.model_dump() for each in self.tool_calls]
        if self.role == "tool":
            message |= {"tool_call_id": self.tool_call_id, "name": self.name}
        return message


class JsonSchema(Strict):
    name: str
    description: str | None = None
    definition: Annotated[JsonObject, Field(alias="schema")]
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
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")] | Annotated[NamedTool, Tag("named")],
    Discriminator(lambda choice: "mode" if isinstance(choice, str) else "named"),
]


class ChatCompletionRequest(BaseCompletionRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _usable_tools(self) -> ChatCompletionRequest:
        names = [tool.function.name for tool in self.tools or []]
        if len(names) > len(set(names)):
            raise MarsError("two tools have the same name", param="tools")
        if not self._forced <= {*names} or (self.tool_choice == "required" and not names):
            raise MarsError("tool_choice asks for a function that is not among the tools", param="tool_choice")
        if self.may_call and self.response_format is not None and self.response_format.type != "text":
            raise MarsError(
                "response_format cannot be combined with tools: use tool_choice none", param="response_format"
            )
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
            raise MarsError("top_logprobs needs logprobs=true", param="top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise MarsError("give max_tokens or max_completion_tokens, not both", param="max_tokens")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def _as_prompts(prompt: Any) -> list[str | list[int]]:
    """One or several, each a text or its tokens."""
    prompts = [prompt] if isinstance(prompt, str) or _are_tokens(prompt) else prompt
    alike = isinstance(prompts, list) and (
        all(isinstance(each, str) for each in prompts) or all(map(_are_tokens, prompts))
    )
    if not alike or not prompts:
        raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists")
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts are allowed, not {len(prompts)}")
    return prompts


def _are_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


Tokens = Annotated[list[int], Field(min_length=1)]
Prompts = str | Tokens | Annotated[list[str] | list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS)]
"""For the document"""


class CompletionRequest(BaseCompletionRequest):
    prompt: Annotated[list[str | list[int]], BeforeValidator(_as_prompts, json_schema_input_type=Prompts)]
    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


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
            raise MarsError("give prompt or messages, one of the two", param="prompt")
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
