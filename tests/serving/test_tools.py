"""Calls in what a model writes, whole or letter by letter; and how a chat with functions becomes a prompt."""

from __future__ import annotations

import json
import re

import pytest
from transformers import PreTrainedTokenizerBase

from mars import MarsError
from mars.core.grammar import GrammarCompiler
from mars.serving.tools import Style, Toolbox
from tests.conftest import tiny_tokenizer

WEATHER = {
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME = {"name": "time"}
BARE = Style(is_tagged=False, arguments="parameters")


def read(box: Toolbox, text: str, size: int) -> tuple[str, list[tuple[str, dict]]]:
    reader = box.reader()
    parts = [reader.feed(text[start : start + size]) for start in range(0, len(text), size)]
    parts.append(reader.flush())
    calls = [(call.name, json.loads(call.arguments)) for _, called in parts for call in called]
    assert reader.called == len(calls)
    return "".join(said for said, _ in parts), calls


PARIS, NOW = '{"name": "weather", "arguments": {"city": "Paris"}}', '{"name": "time"}'
CALLED = ("weather", {"city": "Paris"})


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "said", "called"),
    [
        ("Hello, a < b.", "Hello, a < b.", []),
        (f"<tool_call>\n{PARIS}\n</tool_call>", "", [CALLED]),
        (f"Hm. <tool_call>{PARIS}</tool_call>\n<tool_call>\n{NOW}</tool_call>\n", "Hm. ", [CALLED, ("time", {})]),
        (f"<tool_call>\n{PARIS}", "", [CALLED]),  # ended without the tag
        ("<tool_call>{oops</tool_call>!", "<tool_call>{oops</tool_call>!", []),
        ('<tool_call>{"name": "other"}</tool_call>', '<tool_call>{"name": "other"}</tool_call>', []),
        ("<tool_call>\n{", "<tool_call>\n{", []),
    ],
)  # fmt: skip
def test_tagged_calls(text: str, said: str, called: list, size: int) -> None:
    assert read(Toolbox(Style(), [WEATHER, TIME]), text, size) == (said, called)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("text", "said", "called"),
    [
        ('{"name": "weather", "parameters": {"city": "Paris"}}', "", [CALLED]),
        (f"[{PARIS}, {NOW}]", "", [CALLED, ("time", {})]),
        ("It is late [or early].", "It is late [or early].", []),
        (f"I call: {PARIS}", f"I call: {PARIS}", []),
        ('{"city": "Paris"}', '{"city": "Paris"}', []),
        ("[]", "[]", []),
    ],
)
def test_bare_calls(text: str, said: str, called: list, size: int) -> None:
    assert read(Toolbox(BARE, [WEATHER, TIME]), text, size) == (said, called)


def test_text_is_not_held_back_at_a_brace() -> None:
    """Once the text has begun like no call."""
    reader = Toolbox(BARE, [WEATHER, TIME]).reader()
    parts = ["Sure. ", NOW, " is JSON.", " [1]"]
    assert [reader.feed(each) for each in parts] == [(each, []) for each in parts] and reader.flush() == ("", [])


@pytest.mark.parametrize("text", ['{"name": {"first": "Ada"}, "age": 36}', "[" * 100_000], ids=["an object", "deep"])
def test_json_that_is_no_call(text: str) -> None:
    assert Toolbox(BARE, [WEATHER]).calls(text) is None


def test_one_call_where_no_more_are_wanted() -> None:
    box = Toolbox(Style(), [WEATHER, TIME], parallel=False)
    assert read(box, f"<tool_call>{PARIS}</tool_call><tool_call>{NOW}</tool_call>", 1) == ("", [CALLED])


def template(text: str) -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = text
    return tokenizer


@pytest.mark.parametrize(
    ("text", "style"),
    [
        ("{{ messages }}", Style(is_told=False)),
        ("{% if tools %}write <tool_call>{% endif %}", Style()),
        ("{% if tools %}write [TOOL_CALLS]{% endif %}", Style(is_tagged=False)),
        ('{% if tools %}write {"name": name, "parameters": …}{% endif %}', BARE),
    ],
)
def test_the_template_says_how_calls_are_written(text: str, style: Style) -> None:
    assert Style.of(template(text), "it") == style


def test_a_way_of_calling_that_is_not_known_is_refused() -> None:
    with pytest.raises(MarsError, match="cannot read"):
        Style.of(template("{% if tools %}<tool_call><function=f>{% endif %}"), "it")


def test_a_template_without_functions_gets_them_in_the_system_message() -> None:
    shown: list[str] = []

    class Recorder:
        chat_template = "{{ messages }}"

        def apply_chat_template(self, messages, **_: object) -> dict:
            shown.extend(f"{each['role']}: {each['content']}" for each in messages)
            return {"input_ids": [1]}

        def __call__(self, text: str, **_: object) -> dict:
            shown.append(text)
            return {"input_ids": [2]}

    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": json.loads(PARIS)}]},
        {"role": "tool", "content": "rain"},
    ]
    box = Toolbox(Style(is_told=False), [WEATHER], forced=frozenset({"weather"}))
    assert box.encode(Recorder(), chat, "it") == [1, 2]
    system, user, assistant, tool, begun = shown
    assert system.startswith("system: Be brief.\n\n") and json.dumps(WEATHER) in system
    assert user == "user: Paris?"
    assert assistant == f"assistant: <tool_call>\n{PARIS}\n</tool_call>"
    assert tool == "user: <tool_response>\nrain\n</tool_response>"
    assert begun == "<tool_call>\n"


CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Paris", "Rome"]}},
}


@pytest.mark.parametrize("style", [Style(), BARE])
def test_strict_functions_are_held_to_their_parameters(style: Style, smollm) -> None:
    """References inside the parameters included; other functions are not, and text is free."""
    checkpoint = smollm.checkpoint
    words = GrammarCompiler(checkpoint.tokenizer, checkpoint.vocabulary, checkpoint.end_tokens)
    functions = [{"name": "f", "parameters": CITY, "strict": True}, {"name": "g", "parameters": CITY}]

    def follows(text: str, forced: str | None = None) -> bool:
        box = Toolbox(style, functions, frozenset([forced] if forced else []))
        matcher = words.matcher(box.grammar(checkpoint.tokenizer) or "").matcher
        if style.is_tagged and not forced:
            text = re.sub(r"\{.*\}", "Well: <tool_call>\n\\g<0>\n</tool_call>", text)
        return matcher.consume_tokens(checkpoint.tokenizer.encode(text)) and matcher.is_accepting()

    def call(name: str, city: str) -> str:
        return json.dumps({"name": name, style.arguments: {"city": city}})

    assert follows(call("f", "Rome")) and follows(call("g", "Rome")) and follows(call("g", "Oslo"))
    assert follows("Oslo [in Norway")
    assert not follows(call("f", "Oslo")) and not follows(call("h", "Rome"))
    assert follows(call("g", "Rome"), "g") and not follows(call("g", "Oslo"), "g")
    assert not follows(call("f", "Rome"), "g") and not follows("Rome", "g")
