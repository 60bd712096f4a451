"""Texts that follow a grammar: which tokens may come next, and which after each of the claims.

llguidance knows grammars and tokenizers. Each position of a trunk gets the tokens that its own past allows; so a claim
against the grammar is never what the AR model chooses there, and is rejected like any other wrong one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mars.decoding.request import Answer
from mars.errors import MarsError

WHITESPACE = r"[ \n\t]{0,20}"
"""Between the parts of a JSON text; without a limit, small models write blanks for ever"""
BITS = 32


def json_grammar(schema: Mapping[str, Any]) -> str:
    """JSON texts that a schema allows."""
    return lark_grammar(f"start: {json_rule(schema)}")


def json_rule(schema: Mapping[str, Any]) -> str:
    """The same as part of a grammar."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': WHITESPACE}})}"


def lark_grammar(rules: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": rules}]})


class Lexicon:
    """A model's tokens, as llguidance wants them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, end_tokens: Collection[int]) -> None:
        try:
            import llguidance
            import llguidance.hf
        except ImportError:
            raise MarsError("grammars need llguidance: pip install 'mars-decoding[serve]'") from None
        try:
            self.tokens = llguidance.hf.from_tokenizer(tokenizer, vocabulary, sorted(end_tokens))
        except ValueError as error:
            raise MarsError(f"grammars cannot be used with this model's tokenizer: {error}") from error
        self.vocabulary = vocabulary
        self.executor = llguidance.LLExecutor()

    def guide(self, grammar: str) -> Guide:
        """Raises if there is no such grammar."""
        import llguidance

        return Guide(llguidance.LLMatcher(self.tokens, grammar, log_level=0))

    def allowed(self, rows: Sequence[tuple[Guide, Sequence[int]]], width: int) -> Tensor:
        """(rows, width, words): the tokens that each row's text allows next, and after each of its claims, as bits.

        Behind a claim that breaks the grammar everything is allowed: nothing that comes there is ever used.
        """
        masks = np.full((len(rows) * width, -(-self.vocabulary // BITS)), -1, dtype=np.int32)
        where = (masks.ctypes.data, masks.shape[1] * 4, len(masks))
        claims = [list(claims[: width - 1]) for _, claims in rows]
        starts = [(guide.matcher, index * width, claims[index]) for index, (guide, _) in enumerate(rows)]
        if drafted := [each for each in starts if each[2]]:
            self.executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        if plain := [each[:2] for each in starts if not each[2]]:
            self.executor.unsafe_compute_mask_ptr(plain, *where)
        return torch.from_numpy(masks).view(len(rows), width, -1)


class Speaker(Protocol):
    """What of a checkpoint a lexicon is made of."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def end_tokens(self) -> frozenset[int]: ...


def lexicon_of(speaker: Speaker) -> Lexicon:
    """Made once for a model: it takes about a second."""
    return _lexicon(speaker.tokenizer, speaker.vocabulary, speaker.end_tokens)


_lexicon = lru_cache(maxsize=4)(Lexicon)


class Guide:
    """One text's way through its grammar."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        if matcher.is_error():
            raise MarsError(f"the grammar cannot be followed: {matcher.get_error().splitlines()[0]}")

    def follow(self, answer: Answer, tokens: Sequence[int]) -> None:
        """The answer goes on with these tokens; it is cut off where the grammar grows beyond llguidance's limits."""
        if answer.finish_reason is None and not self.matcher.consume_tokens(list(tokens)):
            answer.cancel("length")


def unpack(words: Tensor, vocabulary: int) -> Tensor:
    """(…, vocabulary) flags from (…, words) bits."""
    bits = torch.arange(BITS, device=words.device, dtype=words.dtype)
    return (words[..., None] >> bits & 1).flatten(-2)[..., :vocabulary].bool()
