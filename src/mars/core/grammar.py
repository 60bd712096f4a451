"""Grammars: which tokens may come next in a text, and which after each of its drafts.

llguidance knows grammars and tokenizers. Each verified position gets the tokens that the text before it allows, so a
draft against the grammar is never what the AR model chooses there, and is rejected like any other wrong one.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mars.core.request import ModelInfo
from mars.core.schema import check_schema, explain
from mars.errors import MarsError, how_to_install

WHITESPACE = r"[ \n\t]{0,20}"
"""Between the parts of a JSON text; without a limit, small models write blanks without end"""
BITS = 32
CACHED_GRAMMARS = 64
CACHED_CHARACTERS = 8 * 2**20  # of their texts; what is compiled takes some ten times as much memory


def json_grammar(schema: Mapping[str, Any]) -> str:
    """JSON texts that a schema allows; raises if there can be none."""
    check_schema(schema)
    return lark_grammar(f"start: {json_rule(schema)}")


def json_rule(schema: Mapping[str, Any]) -> str:
    """The same as part of a grammar."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': WHITESPACE}})}"


def lark_grammar(rules: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": rules}]})


@contextmanager
def contained_panic() -> Iterator[None]:
    """A panic of llguidance is no `Exception`: make it one, so that it ends one request and not the engine."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise MarsError("the grammar is beyond what can be followed", param="grammar") from error


class GrammarCompiler:
    """Compiles grammars for the tokens of a model, each text once. Several threads may use it at once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, end_tokens: Collection[int]) -> None:
        try:
            import llguidance
            import llguidance.hf
        except ImportError:
            raise MarsError(f"grammars need llguidance: {how_to_install('serve')}", param="grammar") from None
        try:
            self.tokens = llguidance.hf.from_tokenizer(tokenizer, vocabulary, sorted(end_tokens))
        except ValueError as error:
            raise MarsError(f"grammars cannot be used with this model's tokenizer: {error}", param="grammar") from error
        self.vocabulary = vocabulary
        self.executor = llguidance.LLExecutor()
        self._compiled: OrderedDict[str, Any] = OrderedDict()  # the least recently used first
        self._lock = Lock()

    def matcher(self, grammar: str) -> GrammarMatcher:
        """Raises if the grammar cannot be compiled."""
        import llguidance

        with self._lock:
            compiled = self._compiled.get(grammar)
        if compiled is None:
            with contained_panic():
                compiled = llguidance.LLMatcher(self.tokens, grammar, log_level=0)
            GrammarMatcher(compiled)  # raises if it is none
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > CACHED_GRAMMARS or sum(map(len, self._compiled)) > CACHED_CHARACTERS:
                self._compiled.popitem(last=False)
            return GrammarMatcher(compiled.deep_copy())

    def masks(self, matcher: GrammarMatcher, drafts: Sequence[int]) -> Tensor:
        """(1 + drafts, words): what `allowed` says of one text. Raises where llguidance gives up."""
        with contained_panic():
            masks = self.allowed([(matcher, drafts)], 1 + len(drafts))[0]
        matcher.check()
        return masks

    def allowed(self, texts: Sequence[tuple[GrammarMatcher, Sequence[int]]], width: int) -> Tensor:
        """(texts, width, words): the tokens that each text allows next, and after each of its drafts, as bits.

        Behind a draft that breaks the grammar everything is allowed: nothing that comes there is ever used.
        """
        masks = np.full((len(texts) * width, -(-self.vocabulary // BITS)), -1, dtype=np.int32)
        where = (masks.ctypes.data, masks.shape[1] * 4, len(masks))
        starts = [
            (each.matcher, index * width, list(drafts[: width - 1])) for index, (each, drafts) in enumerate(texts)
        ]
        if ahead := [each for each in starts if each[2]]:
            self.executor.unsafe_compute_mask_ptr_with_draft_token(ahead, *where)
        if plain := [each[:2] for each in starts if not each[2]]:
            self.executor.unsafe_compute_mask_ptr(plain, *where)
        return torch.from_numpy(masks).view(len(texts), width, -1)


def grammar_compiler(model: ModelInfo) -> GrammarCompiler:
    """Made once for a model: it takes about a second."""
    return _compiler(model.tokenizer, model.vocabulary, model.end_tokens)


_compiler = lru_cache(maxsize=4)(GrammarCompiler)


class GrammarMatcher:
    """Follows one text through its grammar."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.check()

    def check(self) -> None:
        """Raise if llguidance has given up, as it does when a grammar grows beyond its limits."""
        if self.matcher.is_error():
            raise MarsError(f"the grammar cannot be followed: {explain(self.matcher.get_error())}", param="grammar")

    def advance(self, tokens: Sequence[int]) -> None:
        """The text goes on with these tokens."""
        with contained_panic():
            self.matcher.consume_tokens(list(tokens))
        self.check()


def unpack(words: Tensor, vocabulary: int) -> Tensor:
    """(…, vocabulary) flags from (…, words) bits."""
    bits = torch.arange(BITS, device=words.device, dtype=words.dtype)
    return (words[..., None] >> bits & 1).flatten(-2)[..., :vocabulary].bool()
