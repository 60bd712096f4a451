"""What a request may rely on: exact cuts, its own dial and seed, statistics that add up, memory that stays flat."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import mars
from mars import Dial, MarsError, SamplingParams
from mars.core.request import Request
from mars.method.windows import Window, parse_window
from mars.models import Checkpoint
from mars.models.attention import own_attention
from mars.reference import Decoder, cache
from tests.conftest import END, MASK, tiny_checkpoint
from tests.reference.test_exactness import prompts, transformers_greedy

DIALS = ["one-token", "exact", "relaxed=0.2", "threshold=0.3"]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return tiny_checkpoint("llama")


def answers(checkpoint: Checkpoint, requests: list[Request]):
    return Decoder(checkpoint, requests).finish()


def request(prompt: list[int], dial: str = "exact", **options) -> Request:
    options = {"max_new_tokens": 24, "block_size": 4} | options
    return Request(prompt, Dial.parse(dial), **options)


def test_rows_do_not_disturb_each_other(checkpoint: Checkpoint) -> None:
    """Any mixture of dials, windows, samplings and lengths in one batch gives what each row gives alone."""
    rng = random.Random(0)
    requests = [
        request(
            prompt,
            rng.choice(DIALS),
            block_size=(block_size := rng.choice([2, 4, 8])),
            window=parse_window(rng.choice(["chain", "tree=2", "tree", "tree=2+3", "tree+9"]), block_size),
            max_new_tokens=rng.randint(1, 40),
            sampling=SamplingParams(
                temperature=rng.choice([0, 1.0]),
                top_k=rng.choice([0, 4]),
                frequency_penalty=rng.choice([0, 0.5]),
                seed=rng.randrange(1000),
            ),
        )
        for prompt in prompts(24)
    ]
    together = answers(checkpoint, requests)
    alone = [answers(checkpoint, [each])[0] for each in requests]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    assert [a.steps for a in together] == [a.steps for a in alone]
    assert [(a.num_verified, a.num_agreed) for a in together] == [(a.num_verified, a.num_agreed) for a in alone]


@pytest.mark.parametrize("dial", DIALS)
def test_statistics_add_up(checkpoint: Checkpoint, dial: str) -> None:
    for answer in answers(checkpoint, [request(prompt, dial) for prompt in prompts(7)]):
        assert sum(answer.steps) == answer.num_tokens == len(answer.token_ids)
        assert sum(n * count for n, count in answer.histogram.items()) == answer.num_tokens
        assert answer.forwards == len(answer.pieces) == sum(answer.histogram.values())
        assert "".join(answer.pieces) == answer.text
        assert answer.num_agreed <= answer.num_verified <= answer.num_tokens
        assert answer.seconds > 0 and answer.tokens_per_second > 0
        if dial != "threshold=0.3":
            assert answer.num_verified == answer.num_tokens


def test_relaxed_and_threshold_report_their_disagreement(checkpoint: Checkpoint) -> None:
    """Agreement, recounted from scratch with the plain model on the finished text."""
    for dial in ("relaxed=0.05", "threshold=0.2"):
        for answer, prompt in zip(answers(checkpoint, [request(p, dial) for p in prompts(5)]), prompts(5), strict=True):
            with own_attention(checkpoint.module) as model:
                logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0, len(prompt) - 1 : -1]
            logits[:, MASK] = -torch.inf
            same = (logits.argmax(1) == torch.tensor(answer.token_ids)).tolist()
            assert sum(same[: answer.num_verified]) == answer.num_agreed
            assert answer.num_tokens - answer.num_verified < 4


@pytest.mark.parametrize("dial", ["exact", "threshold=0"])
@pytest.mark.parametrize("limit", range(1, 10))
def test_length_cuts_inside_a_run(checkpoint: Checkpoint, dial: str, limit: int) -> None:
    rows = prompts(5)
    long = answers(checkpoint, [request(row, dial) for row in rows])
    short = answers(checkpoint, [request(row, dial, max_new_tokens=limit) for row in rows])
    for whole, cut in zip(long, short, strict=True):
        assert cut.token_ids == whole.token_ids[:limit]
        if whole.num_tokens > limit:
            assert cut.finish_reason == "length"


def test_end_token_cuts_inside_a_run(checkpoint: Checkpoint) -> None:
    finished = answers(checkpoint, [request(p, "threshold=0", max_new_tokens=60) for p in prompts(40)])
    stopped = [a for a in finished if a.finish_reason == "stop"]
    assert stopped, "no row ended by itself: a weak test"
    assert any(a.steps[-1] < 4 for a in stopped), "no run was cut: a weak test"
    for answer in stopped:
        assert answer.token_ids[-1] == END and END not in answer.token_ids[:-1]
        assert answer.text == "".join("abcdefghij"[t] for t in answer.token_ids[:-1])


@pytest.mark.parametrize("dial", DIALS)
def test_stop_strings_cut_inside_a_run(checkpoint: Checkpoint, dial: str) -> None:
    rows = prompts(7)
    for prompt, whole in zip(rows, answers(checkpoint, [request(row, dial) for row in rows]), strict=True):
        for start in range(0, len(whole.text) - 2, 3):
            stop = whole.text[start : start + 2]
            cut = answers(checkpoint, [request(prompt, dial, stop=("zz", stop))])[0]
            assert cut.text == whole.text[: whole.text.index(stop)]
            assert cut.finish_reason == "stop"
            assert cut.token_ids == whole.token_ids[: whole.text.index(stop) + 2]
            assert cut.num_verified <= cut.num_tokens


def test_the_dial_turns_between_two_steps(checkpoint: Checkpoint) -> None:
    """Among lossless dials, turning changes nothing but speed; after threshold, the rest is AR again."""
    prompt = prompts(9)[8]
    expected = answers(checkpoint, [request(prompt, "one-token", max_new_tokens=40)])[0].token_ids
    rng = random.Random(3)
    for _ in range(10):
        decoder = Decoder(checkpoint, [request(prompt, max_new_tokens=40)])
        while decoder.running:
            sequence = decoder.sequences[0]
            sequence.set_dial(Dial.parse(rng.choice(["one-token", "exact"])))
            sequence.request = replace(sequence.request, window=Window.of(rng.choice([1, 2, 4]), 4))
            decoder.step()
        assert decoder.sequences[0].output.token_ids == expected


def test_turning_through_threshold_keeps_the_books_straight(checkpoint: Checkpoint) -> None:
    rng = random.Random(4)
    for prompt in prompts(6):
        decoder = Decoder(checkpoint, [request(prompt, max_new_tokens=40)])
        dials: list[str] = []
        while decoder.running:
            dial = rng.choice(DIALS)
            decoder.sequences[0].set_dial(Dial.parse(dial))
            decoder.step()
            dials += [dial] * decoder.sequences[0].output.steps[-1]
        answer = decoder.sequences[0].output
        with own_attention(checkpoint.module) as model:
            logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0, len(prompt) - 1 : -1]
        logits[:, MASK] = -torch.inf
        for token, dial, row in zip(answer.token_ids, dials, logits.softmax(1), strict=True):
            if dial in ("one-token", "exact"):
                assert token == row.argmax()
            elif dial == "relaxed=0.2":
                assert row[token] >= 0.2 * row.max()
        assert answer.num_verified <= answer.num_tokens


def test_any_drafts_leave_the_text_unchanged(checkpoint: Checkpoint) -> None:
    """Drafts are only ever proposals: replace them with right, wrong or half right ones."""
    _scramble_drafts(checkpoint, prompts(7), MASK, END, 24)


def test_any_drafts_leave_the_text_of_a_real_model_unchanged(smollm) -> None:
    checkpoint = smollm.checkpoint
    rows = [checkpoint.encode(text) for text in ("What is the capital of France?", "Count to ten.", "Say hello.")]
    _scramble_drafts(checkpoint, rows, checkpoint.mask_token_id, checkpoint.tokenizer.eos_token_id, 40)


def _scramble_drafts(checkpoint: Checkpoint, rows: list[list[int]], mask: int, end: int, length: int) -> None:
    rng = random.Random(5)
    expected = [transformers_greedy(checkpoint, row, length, mask, end) for row in rows]
    decoder = Decoder(checkpoint, [request(row, max_new_tokens=length, window=Window.of(2, 4)) for row in rows])
    while decoder.running:
        decoder.step()
        for sequence, text in zip(decoder.sequences, expected, strict=True):
            known = text[sequence.output.num_tokens :]
            right = rng.randint(0, 3)
            drafts = known[:right] + [rng.randrange(10) for _ in range(3)]
            sequence.drafts = drafts[: max(0, min(3, sequence.room - 1))]
    found = [sequence.output for sequence in decoder.sequences]
    assert [answer.token_ids for answer in found] == expected
    assert {1, 2, 3, 4} <= {step for answer in found for step in answer.steps}


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_long_prompts_are_fed_in_chunks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny_checkpoint(family)
    rows = [*prompts(5, longest=90), [1]]
    expected = [a.token_ids for a in answers(checkpoint, [request(row) for row in rows])]
    monkeypatch.setattr(cache, "PREFILL_CHUNK", 16)
    chunked = answers(checkpoint, [request(row) for row in rows])
    assert [a.token_ids for a in chunked] == expected
    assert all(a.forwards <= a.num_tokens for a in chunked)


def test_penalties_equal_transformers(checkpoint: Checkpoint) -> None:
    rows = prompts(7)
    sampling = SamplingParams(repetition_penalty=1.7)
    with own_attention(checkpoint.module) as model:
        expected = [
            model.generate(
                torch.tensor([row]),
                attention_mask=torch.ones(1, len(row)),
                max_new_tokens=24,
                do_sample=False,
                repetition_penalty=1.7,
                suppress_tokens=[MASK],
                eos_token_id=END,
                pad_token_id=END,
            )[0, len(row) :].tolist()
            for row in rows
        ]
    for dial in ("one-token", "exact"):
        found = answers(checkpoint, [request(row, dial, sampling=sampling) for row in rows])
        assert [answer.token_ids for answer in found] == expected


def test_exact_with_frequency_penalty_equals_one_token(checkpoint: Checkpoint) -> None:
    sampling = SamplingParams(frequency_penalty=0.4, presence_penalty=0.3, logit_bias={2: 1.0})
    rows = prompts(7)
    one = answers(checkpoint, [request(row, "one-token", sampling=sampling) for row in rows])
    for window in (Window.of(1, 4), Window.of(4, 4), Window.of(4, 4, 4)):
        exact = answers(checkpoint, [request(row, sampling=sampling, window=window) for row in rows])
        assert [a.token_ids for a in exact] == [a.token_ids for a in one]


def test_seeds_repeat_and_differ(checkpoint: Checkpoint) -> None:
    def text(seed: int | None) -> list[int]:
        sampling = SamplingParams(temperature=1.5, seed=seed, logit_bias={END: -100.0})
        return answers(checkpoint, [request([1, 2, 3], sampling=sampling)])[0].token_ids

    assert text(7) == text(7)
    assert text(7) != text(8)
    assert text(None) != text(None)


def test_the_mask_is_never_emitted(checkpoint: Checkpoint) -> None:
    """Even if the model and the caller want it."""
    sampling = [SamplingParams(logit_bias={MASK: 1e4}), SamplingParams(temperature=5.0, logit_bias={MASK: 1e4}, seed=1)]
    for dial in DIALS:
        for answer in answers(checkpoint, [request([1, 2], dial, sampling=each) for each in sampling]):
            assert MASK not in answer.token_ids


def test_a_model_that_goes_its_own_way_is_noticed() -> None:
    """DiffLlama has its own attention, Nemotron hands nothing down, Phimoe keeps its sliding window to itself."""
    for family, options in [
        ("diffllama", {}),
        ("nemotron", {}),
        ("phimoe", {"sliding_window": 8, "num_local_experts": 4}),
    ]:
        with pytest.raises(MarsError, match="attention"):
            answers(tiny_checkpoint(family, **options), [request([1, 2, 3])])


def test_memory_does_not_grow_with_steps(checkpoint: Checkpoint) -> None:
    decoder = Decoder(
        checkpoint, [request([1, 2, 3], sampling=SamplingParams(logit_bias={END: -100.0}), max_new_tokens=200)]
    )

    def allocated() -> int:
        tensors = [t for pair in decoder._cache._layers.values() for t in pair]
        return sum(t.untyped_storage().nbytes() for t in tensors)

    decoder.step()
    before = allocated()
    pointers = [t.data_ptr() for pair in decoder._cache._layers.values() for t in pair]
    while decoder.running:
        decoder.step()
    assert allocated() == before
    assert [t.data_ptr() for pair in decoder._cache._layers.values() for t in pair] == pointers


def test_the_context_limits_the_answer(checkpoint: Checkpoint) -> None:
    long = [1] * 250
    answer = answers(
        checkpoint, [request(long, max_new_tokens=100, sampling=SamplingParams(logit_bias={END: -100.0}))]
    )[0]
    assert (answer.num_tokens, answer.finish_reason) == (6, "length")
    with pytest.raises(MarsError, match="256 tokens, but llama holds 256"):
        Decoder(checkpoint, [request([1] * 256)])


@pytest.mark.parametrize("window", ["chain", "tree", "tree+5"])
def test_no_mask_stands_past_the_context(window: str) -> None:
    """A model with a table of positions has no row for one."""
    checkpoint = tiny_checkpoint("gpt2")
    for length in range(249, 256):
        answer = answers(checkpoint, [request([1] * length, max_new_tokens=99, window=parse_window(window, 4))])[0]
        assert answer.num_tokens <= 256 - length


def test_bad_requests(checkpoint: Checkpoint) -> None:
    for bad, says in [
        ({"prompt": []}, "empty"),
        ({"prompt": [1], "max_new_tokens": 0}, "max_new_tokens"),
        ({"prompt": [1], "block_size": 1}, "block_size"),
        ({"prompt": [1], "block_size": -2, "dial": "one-token"}, "block_size"),
        ({"prompt": [1, 12]}, "outside the vocabulary"),
        ({"prompt": [-1]}, "outside the vocabulary"),
    ]:
        with pytest.raises(MarsError, match=says):
            Decoder(checkpoint, [request(**bad)])


def test_an_untrained_checkpoint_decodes_one_token_and_says_how_to_get_more(checkpoint: Checkpoint) -> None:
    plain = Checkpoint("plain", checkpoint.module, checkpoint.tokenizer, None)
    assert answers(plain, [request([1, 2], "one-token")])[0].tokens_per_forward == 1
    for dial in ("exact", "relaxed=0.5", "threshold=0.9"):
        with pytest.raises(MarsError, match="mars train"):
            Decoder(plain, [request([1, 2], dial)])


@pytest.mark.parametrize("dial", DIALS)
def test_an_answer_ends_no_sooner_than_asked(checkpoint: Checkpoint, dial: str) -> None:
    asked = [request(prompt, dial, min_new_tokens=15, max_new_tokens=40) for prompt in prompts(12)]
    found = answers(checkpoint, asked)
    assert all(END not in answer.token_ids[:15] for answer in found)
    assert any(answer.token_ids[-1] == END for answer in found), "none ends: a weak test"
    endless = answers(checkpoint, [request(prompt, dial, ignore_end=True) for prompt in prompts(12)])
    assert all(answer.num_tokens == 24 and answer.finish_reason == "length" for answer in endless)
    assert any(END in answer.token_ids for answer in endless)
    with pytest.raises(MarsError, match="min_new_tokens"):
        answers(checkpoint, [request([1], min_new_tokens=25)])


def test_stop_strings_leave_every_forward_its_piece(smollm: mars.Model) -> None:
    options = {"max_new_tokens": 24, "window": "chain"}
    plain, watched = (smollm.generate("Count to ten.", stop=stop, **options) for stop in ((), ("\N{SNOWMAN}",)))
    assert plain.forwards < plain.num_tokens and all(watched.pieces[:-1])
    assert [len(piece) for piece in watched.pieces] == [len(piece) for piece in plain.pieces]
    assert watched.text == plain.text
