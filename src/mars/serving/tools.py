"""Functions that a model may call: how it is told of them, and how its calls are read out of what it writes.

Chat templates that know of functions say how calls are written: between `OPENING` and `CLOSING`, as many models do, or
as nothing but JSON. Where a template knows nothing of them, the model is told in its system message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from mars.core.grammar import json_grammar, json_rule, lark_grammar
from mars.core.output import overlap
from mars.core.schema import check_schema
from mars.errors import MarsError
from mars.models.prompts import encode_chat

OPENING, CLOSING = "<tool_call>", "</tool_call>"
INSTRUCTIONS = """You can call these functions:
{functions}

To call one, write nothing but
{opening}
{{"name": "the function", "arguments": {{"parameter": "value"}}}}
{closing}"""

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Style:
    """How a chat template has calls written."""

    is_told: bool = True  # does the template know of functions?
    is_tagged: bool = True
    arguments: Literal["arguments", "parameters"] = "arguments"

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, name: str) -> Style:
        template = tokenizer.chat_template
        known = json.dumps(template) if isinstance(template, dict) else template or ""
        if "tools" not in known:
            return cls(is_told=False)
        if OPENING in known and "<function=" not in known:
            return cls()
        if "[TOOL_CALLS]" in known or "<|tool_call|>" in known:  # special tokens, which are no text
            return cls(is_tagged=False)
        if '"parameters"' in known or "<|python_tag|>" in known:
            return cls(is_tagged=False, arguments="parameters")
        raise MarsError(
            f"{name} writes its calls in a way that this server cannot read: use tool_choice none", param="tools"
        )


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The functions of a request, and which of them it must call."""

    style: Style
    functions: Sequence[Schema]  # name, description, parameters
    forced: frozenset[str] = frozenset()  # one of these is called, and nothing else is written
    parallel: bool = True  # may there be several calls?

    def encode(self, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Schema], name: str) -> list[int]:
        """The chat with its functions, up to where the answer begins; a forced call is begun already."""
        if self.style.is_told:
            tools = [{"type": "function", "function": _told(each)} for each in self.functions]
            prompt = encode_chat(tokenizer, messages, name, tools=tools)
        else:
            prompt = encode_chat(tokenizer, [*self._instructed(messages)], name)
        if self.forced and self.style.is_tagged:
            prompt += tokenizer(f"{OPENING}\n", add_special_tokens=False)["input_ids"]
        return prompt

    def grammar(self, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """What holds forced calls, and all calls of strict functions, to what the functions take."""
        if self.forced:
            return json_grammar(self._calls([each for each in self.functions if each["name"] in self.forced]))
        if not any(each.get("strict") for each in self.functions):
            return None
        call = json_rule(self._calls(self.functions))
        if not self.style.is_tagged:
            return lark_grammar(f"start: {call} | TEXT\nTEXT: /[^\\[{{ \\n](.|\\n)*/")
        is_token = OPENING in tokenizer.get_added_vocab()
        opening, closing = (OPENING, CLOSING) if is_token else (json.dumps(OPENING), json.dumps(CLOSING))
        head = "head" if is_token else "head[lazy]"
        return lark_grammar(
            f'start: call* TEXT\ncall: head "\\n" {call} "\\n" {closing}\n{head}: TEXT {opening}\nTEXT: /(.|\\n)*/'
        )

    def _calls(self, functions: Sequence[Schema]) -> dict[str, Any]:
        """A schema of calls; arguments of functions that are not strict are free, unless the call is forced."""
        calls = []
        for index, function in enumerate(functions):
            held = self.forced or function.get("strict")
            place = f"#/anyOf/{index}/properties/{self.style.arguments}"
            parameters = (held and function.get("parameters")) or {"type": "object"}
            try:
                check_schema(parameters)
            except MarsError as error:
                raise MarsError(f"the parameters of {function['name']}: {error}", param=error.param) from None
            parameters = _moved(parameters, place)
            calls.append(_record({"name": {"const": function["name"]}, self.style.arguments: parameters}))
        return {"anyOf": calls}

    def reader(self) -> CallReader:
        return CallReader(self)

    def calls(self, text: str) -> list[Call] | None:
        """What this JSON calls; None if it is no call of a function that there is."""
        try:
            read = json.loads(text)
        except (ValueError, RecursionError):
            return None
        known = {each["name"] for each in self.functions}
        found = []
        for each in read if isinstance(read, list) else [read]:
            name = each.get("name") if isinstance(each, dict) else None
            if not isinstance(name, str) or name not in known:
                return None
            arguments = each.get("arguments", each.get("parameters", {}))
            found.append(Call(name, arguments if isinstance(arguments, str) else json.dumps(arguments)))
        return found or None

    def _instructed(self, messages: Sequence[Schema]) -> Sequence[Schema]:
        """The chat for a template that knows nothing of functions, calls or their results."""
        functions = "\n".join(json.dumps(_told(each)) for each in self.functions)
        told = INSTRUCTIONS.format(functions=functions, opening=OPENING, closing=CLOSING)
        if messages and messages[0]["role"] == "system":
            told, messages = f"{messages[0]['content']}\n\n{told}", messages[1:]
        return [{"role": "system", "content": told}, *map(_plain, messages)]


class CallReader:
    """Divides a growing text into what is said and what is called."""

    def __init__(self, box: Toolbox) -> None:
        self._box = box
        self._tagged = box.style.is_tagged and not box.forced
        self._held = ""
        self._says = False  # without tags: the text began like no call, so there is none in it
        self.called = 0

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """What is sure by now; the rest is held back."""
        self._held += text
        if not self._tagged:
            self._says |= self._held.lstrip()[:1] not in ("", "{", "[")
            return self._take(len(self._held) if self._says else 0), []
        said, called = "", list[Call]()
        while (start := self._held.find(OPENING)) >= 0:
            said += self._take(start)
            end = self._held.find(CLOSING)
            if end < 0:
                return said, called
            raw = self._take(end + len(CLOSING))
            inner = self._box.calls(raw[len(OPENING) : -len(CLOSING)])
            called += self._count(inner or [])
            said += "" if inner else raw
        return said + self._take(len(self._held) - overlap(self._held, OPENING)), called

    def flush(self) -> tuple[str, list[Call]]:
        """What is left at the end of the text. A last tag may lack its end."""
        rest = self._take(len(self._held))
        calls = None if self._says else self._box.calls(rest.strip().removeprefix(OPENING))
        return ("", self._count(calls)) if calls else (rest, [])

    def _take(self, size: int) -> str:
        """Blanks around calls are not said."""
        taken, self._held = self._held[:size], self._held[size:]
        return taken if taken.strip() or not self.called else ""

    def _count(self, calls: list[Call]) -> list[Call]:
        """Those that are still allowed."""
        calls = calls if self._box.parallel else calls[: max(0, 1 - self.called)]
        self.called += len(calls)
        return calls


def _told(function: Schema) -> dict[str, Any]:
    """What the model learns of a function."""
    return {key: value for key, value in function.items() if key != "strict"}


def _record(fields: Schema) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references as they must be when it stands at this place of another one."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def _plain(message: Schema) -> Schema:
    """Calls and their results as ordinary text."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [f"{OPENING}\n{json.dumps(each['function'])}\n{CLOSING}" for each in message["tool_calls"]]
    return {"role": message["role"], "content": "\n".join([*filter(None, [message["content"]]), *calls])}
