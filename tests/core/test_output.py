"""Detokenising a few tokens at a time gives the same text as decoding them all at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mars.core.output import Detokenizer, OutputProcessor, RequestOutput, StopStrings

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_like() -> PreTrainedTokenizerBase:
    """Words that begin with a visible space, and single bytes for everything else, as Llama 2 has them."""
    words = ["▁hello", "▁world", "▁", "h", "é", "lo", "▁grüß", "!"]
    vocabulary = {token: index for index, token in enumerate(["<unk>", "</s>", *BYTES, *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece-like"])
def tokenizer(request: pytest.FixtureRequest, smollm) -> PreTrainedTokenizerBase:
    return smollm.checkpoint.tokenizer if request.param == "byte-level" else sentencepiece_like()


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.feed, tokens), detokenizer.flush()]


@settings(deadline=None, max_examples=150)
@given(st.text(max_size=40))
def test_text_survives(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=40), st.data())
def test_text_made_at_once_is_the_same(tokenizer: PreTrainedTokenizerBase, text: str, data: st.DataObject) -> None:
    """However many forwards it is made of at a time, only which of them it counts for changes."""
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    output = RequestOutput()
    processor = OutputProcessor(output, tokenizer, frozenset())
    while left := tokens[output.num_tokens :]:
        output.add(left[: data.draw(st.integers(1, 4))], [])
        if data.draw(st.booleans()):
            processor.read_at_once()
    output.add([], [])
    output.finish("stop")
    assert "".join(output.pieces) == output.text == tokenizer.decode(tokens, skip_special_tokens=True)
    assert len(output.pieces) == len(output.steps)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_tokens_survive(tokenizer: PreTrainedTokenizerBase, data: st.DataObject) -> None:
    """Also nonsense: stray bytes, special tokens in the middle, half a character at the end.

    One difference is meant: where a stray byte makes a byte-fallback decoder give up on good characters before it,
    those were shown already and stay good.
    """
    tokens = data.draw(st.lists(st.integers(0, min(len(tokenizer), 400) - 1), max_size=20))
    whole, streamed = tokenizer.decode(tokens, skip_special_tokens=True), "".join(pieces(tokenizer, tokens))
    if "<0x00>" in tokenizer.get_vocab() and "\ufffd" in whole:
        assert streamed.startswith(whole[: whole.index("\ufffd")])
    else:
        assert streamed == whole


def test_no_piece_shows_half_a_character(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "naïve 🙂🙃 漢字"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    parts = pieces(tokenizer, tokens)
    assert all("\ufffd" not in part for part in parts)
    assert "".join(parts).strip() == text
    assert sum(bool(part) for part in parts) > 5, "nothing was streamed"


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings(text: str, stops: list[str], data: st.DataObject) -> None:
    """However the text is cut into pieces, what comes out ends right before the first stop string."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    filtered, shown, hit = StopStrings(stops), "", None
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        shown += filtered.feed(text[start:end])
        hit = min((text[:end].find(stop) for stop in stops if stop in text[:end]), default=None)
        assert filtered.hit == (hit is not None)
        if filtered.hit:
            break
    else:
        shown += filtered.flush()
    assert shown == (text if hit is None else text[:hit])


def test_an_empty_stop_string_stops_nothing() -> None:
    assert StopStrings([""]).feed("abc") == "abc"
