"""Rendered prompts as tokens, chats as text, and answers cut at stop strings."""

from collections.abc import Mapping, Sequence
from typing import Any

from mars.errors import MarsError
from mars.models import Checkpoint


def encode(checkpoint: Checkpoint, text: str, room: int) -> list[int]:
    """Tokens of a rendered prompt; of a long one the last, so that ``room`` new ones fit.

    The tokenizer adds its special tokens unless the text starts with the beginning-of-text token.
    """
    begin = checkpoint.tokenizer.bos_token
    options = {"add_special_tokens": False} if begin and text.startswith(begin) else {}
    tokens = list(checkpoint.tokenizer.encode(text, **options))
    if checkpoint.context is None:
        return tokens
    if room >= checkpoint.context:
        raise MarsError(
            f"{room} new tokens leave no room for a prompt in the {checkpoint.context} that {checkpoint.name} holds: "
            "ask for fewer"
        )
    return tokens[room - checkpoint.context :]


def render_chat(
    checkpoint: Checkpoint, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True, **options: Any
) -> str:
    """A chat as text, in the way lm-eval asks for it; ``options`` go to the chat template."""
    return checkpoint.tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=not add_generation_prompt,
        **options,
    )


def cut(text: str, stops: Sequence[str]) -> str:
    """The text up to the stop strings."""
    for stop in filter(None, stops):
        text = text.split(stop, maxsplit=1)[0]
    return text
