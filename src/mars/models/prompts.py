"""Tokens of a prompt: of a question, of a chat, or given as they are."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from mars.errors import MarsError

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages | Sequence[int]  # a question, a chat, or tokens to continue as they are


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, system: str | None = None, name: str = "the model"
) -> list[int]:
    """Tokens of a prompt. A text becomes a user's message if the model has a chat template."""
    _check(prompt, system)
    if isinstance(prompt, str):
        if not prompt.strip():
            raise MarsError("the prompt is empty: write a question or some text to continue", param="prompt")
        if tokenizer.chat_template is None and system is None:
            return list(tokenizer(prompt)["input_ids"])
        prompt = [{"role": "user", "content": prompt}]
    elif not prompt:
        raise MarsError("the prompt is empty: give at least one message or token", param="prompt")
    elif isinstance(prompt[0], Integral):
        if system is not None:
            raise MarsError("a system prompt needs text or messages, not tokens", param="prompt")
        return [_token(token) for token in prompt]
    else:
        for message in prompt:
            _check_message(message)
    opening = [] if system is None else [{"role": "system", "content": system}]
    return encode_chat(tokenizer, [*opening, *cast(Messages, prompt)], name)


def _check(prompt: object, system: object) -> None:
    """Raise if a prompt is neither text nor a list, or the system prompt is no text."""
    if isinstance(prompt, bytes | bytearray):
        raise MarsError("the prompt is bytes: give text, such as prompt.decode()")
    if isinstance(prompt, Mapping):
        raise MarsError("the prompt is a single message: put it in a list, [{...}]")
    if not isinstance(prompt, Sequence):
        kind = type(prompt).__name__
        raise MarsError(f"a prompt is text, a list of messages or a list of token ids, not {kind}")
    if system is not None and not isinstance(system, str):
        raise MarsError(f"the system prompt must be text, not {system!r}")


def _token(token: object) -> int:
    if not isinstance(token, Integral) or isinstance(token, bool):
        raise MarsError(f"a prompt of token ids holds whole numbers alone, not {token!r}")
    return int(token)


def _check_message(message: object) -> None:
    example = '{"role": "user", "content": "Hello"}'
    if not isinstance(message, Mapping):
        raise MarsError(f"a message is a dictionary such as {example}, not {message!r}")
    if not isinstance(message.get("role"), str):
        raise MarsError(f"a message needs a role, as in {example}, but this one is {dict(message)}")
    if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
        raise MarsError(f"a message needs its content as text, as in {example}, but this one is {dict(message)}")


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, name: str = "the model", **options: Any
) -> list[int]:
    """Tokens of a chat up to the beginning of the model's answer; ``options`` go to its template."""
    if tokenizer.chat_template is None:
        rule = f"{name} has no chat template, so it cannot chat"
        raise MarsError(f"{rule}: give plain text, no system prompt", param="prompt")
    try:
        tokens = tokenizer.apply_chat_template(
            [dict(each) for each in messages], add_generation_prompt=True, tokenize=True, return_dict=True, **options
        )
    except Exception as error:  # templates are programs of the model's authors and raise what they like
        raise MarsError(f"the chat template of {name} refuses these messages: {error}", param="prompt") from error
    return list(tokens["input_ids"])
