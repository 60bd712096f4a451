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
        return [int(token) for token in cast(Sequence[int], prompt)]
    opening = [] if system is None else [{"role": "system", "content": system}]
    return encode_chat(tokenizer, [*opening, *cast(Messages, prompt)], name)


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
