"""Tokens of a chat and a mask of the assistant's tokens, for any chat template.

Templates do not mark the assistant's text. So the chat is rendered once as it is and once with a probe word in place of
an answer: what comes before and after the probe is the template's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from transformers import PreTrainedTokenizerBase

from mars.errors import MarsError
from mars.models.prompts import Messages
from mars.training.rows import Chat

PROBE = "mars0probe"  # a plain word, which no template trims or reacts to


@dataclass(frozen=True, slots=True)
class Document:
    tokens: Sequence[int]
    assistant: Sequence[bool | int]
    """True on tokens the assistant must generate: its text and the token that ends its turn"""


@dataclass(frozen=True, slots=True)
class _Answer:
    """The position of one answer in the rendered chat, in characters."""

    start: int
    end: int
    limit: int  # up to here the text is as if the chat ended with this answer: it has an end token, but no next header


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, ended: bool = True) -> Document:
    """The whole chat as its template renders it, every assistant turn marked.

    ``ended=False``: the last answer was cut off, so the document stops with its last word.
    """
    chat = [dict(message) for message in messages]
    turns = [turn for turn, message in enumerate(chat) if message.get("role") == "assistant"]
    _refuse(tokenizer, turns)
    text = render(tokenizer, chat)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens, spans = list(encoding["input_ids"]), [_word(text, *span) for span in encoding["offset_mapping"]]
    assistant = [False] * len(tokens)
    for turn in turns:
        answer = _find(tokenizer, chat, turn, text)
        for index in _generated(tokenizer, tokens, spans, answer):
            assistant[index] = True
    if not ended:
        size = sum(end <= answer.end for _, end in spans)
        tokens, assistant = tokens[:size], assistant[:size]
    return Document(tokens, assistant)


def _refuse(tokenizer: PreTrainedTokenizerBase, turns: list[int]) -> None:
    if not tokenizer.is_fast:
        raise MarsError("the tokenizer does not tell where its tokens lie in a text: use a model with a tokenizer.json")
    if not turns:
        raise MarsError("the chat has no assistant turn, so there is nothing to learn from it")
    if turns[0] == 0:
        raise MarsError("the chat starts with the assistant: put a user turn before it")


def render(tokenizer: PreTrainedTokenizerBase, chat: Chat, add_generation_prompt: bool = False) -> str:
    if tokenizer.chat_template is None:
        raise MarsError("the model has no chat template, so it cannot learn from chats: use an instruct model")
    try:
        return tokenizer.apply_chat_template(chat, add_generation_prompt=add_generation_prompt, tokenize=False)
    except Exception as error:  # templates are programs of the model's authors and raise what they like
        raise MarsError(f"the chat template refuses these messages: {error}") from error


def _find(tokenizer: PreTrainedTokenizerBase, chat: Chat, turn: int, text: str) -> _Answer:
    word = PROBE
    while word in text:
        word += "e"
    before, probe, behind = chat[:turn], chat[turn] | {"content": word}, chat[turn + 1 :]
    head, _, rest = render(tokenizer, [*before, probe, *behind]).partition(word)
    _, _, tail = render(tokenizer, [*before, probe]).partition(word)
    prompt = render(tokenizer, before, add_generation_prompt=True)
    # Without a generation prompt, the role header follows the prompt; the assistant does not generate it.
    opened = not render(tokenizer, before).startswith(prompt) or prompt.strip() == head.strip()
    opening = prompt if opened and text.startswith(prompt) else head
    start, end = len(opening), len(text) - len(rest)
    framed = text.startswith(opening) and text.endswith(rest)
    # Templates may trim an answer, drop the thinking before it or add an empty one, but nothing else.
    shown, content = ("".join(each.split()) for each in (text[start:end], chat[turn]["content"]))
    agree = shown and content and (shown.endswith(content) or content.endswith(shown))
    if not framed or not agree:
        raise MarsError(f"the chat template does not keep message {turn + 1} as it is, so it cannot be learned")
    same = takewhile(lambda pair: pair[0] == pair[1], zip(text[end:], tail, strict=False))
    return _Answer(start, end, end + len(list(same)))


def _word(text: str, start: int, end: int) -> tuple[int, int]:
    """A token's span without white space around its word: tokenizers differ in whether they include it."""
    token = text[start:end]
    if not token.strip():
        return min(start, end - 1), end  # some tokenizers give a blank token no width, at its end
    return end - len(token.lstrip()), start + len(token.rstrip())


def _generated(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], spans: list[tuple[int, int]], answer: _Answer
) -> list[int]:
    """The answer's tokens up to its end token: nothing after that one is ever generated."""
    behind = [index for index, span in enumerate(spans) if answer.end <= span[0] and span[1] <= answer.limit]
    closing = next((index for index in behind if _is_special(tokenizer, tokens[index])), None)
    end = answer.end if closing is None else spans[closing][1]
    found = [index for index, span in enumerate(spans) if answer.start <= span[0] and span[1] <= end]
    if closing is not None and tokens[closing] in (tokens[index] for index in found if index != closing):
        raise MarsError("an answer contains the token that ends it: remove that token from the text")
    if not found:
        raise MarsError("an answer shares its only token with the chat template, so it cannot be learned")
    return found


def _is_special(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    return tokenizer.decode([token], skip_special_tokens=True) != tokenizer.decode([token])
