"""Grammars are compiled once, and whoever follows one has a copy of its own."""

from __future__ import annotations

import pytest

from mars.core import grammar
from mars.core.grammar import GrammarCompiler, lark_grammar
from mars.errors import MarsError
from tests.conftest import tiny_checkpoint


@pytest.fixture
def compiler() -> GrammarCompiler:
    checkpoint = tiny_checkpoint("llama")
    return GrammarCompiler(checkpoint.tokenizer, checkpoint.vocabulary, checkpoint.end_tokens)


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    compiled, original = [], llguidance.LLMatcher
    monkeypatch.setattr(
        llguidance, "LLMatcher", lambda *given, **named: compiled.append(1) or original(*given, **named)
    )
    text = lark_grammar("start: /ab*c/")
    first, second = compiler.matcher(text), compiler.matcher(text)
    before = compiler.masks(second, [])
    first.advance([0, 1, 1])
    assert len(compiled) == 1
    assert compiler.masks(second, []).equal(before) and not compiler.masks(first, []).equal(before)
    with pytest.raises(MarsError, match="cannot be followed"):
        first.advance([5])
    compiler.matcher(text).advance([0, 2])


def test_what_is_kept_is_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "CACHED_GRAMMARS", 3)
    texts = [lark_grammar(f"start: /a{{{n}}}/") for n in range(1, 6)]
    for text in texts:
        compiler.matcher(texts[0])
        compiler.matcher(text)
    assert list(compiler._compiled) == [texts[3], texts[0], texts[4]]
    monkeypatch.setattr(grammar, "CACHED_CHARACTERS", len(texts[0]) + 1)
    compiler.matcher(texts[1])
    assert list(compiler._compiled) == [texts[1]]
    with pytest.raises(MarsError):
        compiler.matcher("nonsense")
    assert "nonsense" not in compiler._compiled


def test_a_panic_ends_one_request() -> None:
    class PanicException(BaseException):
        """Not an `Exception`, as theirs is not"""

    with pytest.raises(MarsError, match="beyond what can be followed"), grammar.contained_panic():
        raise PanicException
    with pytest.raises(KeyboardInterrupt), grammar.contained_panic():
        raise KeyboardInterrupt
