"""From tokens to text, a few tokens at a time: no broken characters, and nothing past a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

BROKEN = "\ufffd"
"""What a tokenizer writes for bytes that are not a whole character (yet)."""


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Text without special tokens. Asked for every few tokens of every answer, so by the shortest way there is."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer.decode(tokens, skip_special_tokens=True)
    return backend.decode(tokens, skip_special_tokens=True)


class Detokenizer:
    """Turns a growing list of tokens into pieces whose concatenation is the whole text.

    A token is decoded together with its predecessors, since many tokenizers write it differently at the start of a
    text; a piece that ends inside a character waits for the rest of it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0
        self._done = 0

    def feed(self, *tokens: int) -> str:
        """Text that these tokens complete; may be empty."""
        self._tokens += tokens
        piece = self._pending()
        return "" if piece.endswith(BROKEN) else self._release(piece)

    def flush(self) -> str:
        """What is left at the end of the text, broken or not."""
        return self._release(self._pending())

    def _pending(self) -> str:
        known = self._decode(self._tokens[self._context : self._done])
        return self._decode(self._tokens[self._context :])[len(known) :]

    def _release(self, piece: str) -> str:
        if piece:
            self._context, self._done = self._done, len(self._tokens)
        return piece

    def _decode(self, tokens: Sequence[int]) -> str:
        return decode(self._tokenizer, tokens)


class StopStrings:
    """Passes text through until one of the stop strings appears, holding back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.hit = False

    def __bool__(self) -> bool:
        """Is there anything to stop at?"""
        return bool(self._stops)

    def feed(self, piece: str) -> str:
        """Text that is safe to show. Once `hit` is set, nothing more follows."""
        text = self._held + piece
        found = [index for index in (text.find(stop) for stop in self._stops) if index >= 0]
        if found:
            self.hit = True
            self._held = ""
            return text[: min(found)]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text are the beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
