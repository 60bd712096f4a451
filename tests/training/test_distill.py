"""The generator against the plain decoder, and what distillation keeps, skips and continues."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mars
from mars.api import Model
from mars.errors import MarsError
from mars.models import Checkpoint
from mars.training.distill import Distillation, Filters, distill, repetition
from mars.training.generator import TextGenerator
from mars.training.rows import read_rows
from tests.conftest import tiny_checkpoint

PROMPTS = [[1, 2, 3], [4], [7, 7, 1, 0, 2, 2, 5], [9, 8], [3, 3, 3], [0, 1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt_oss", "gpt2"])
def test_the_generator_writes_what_the_plain_decoder_writes(family: str) -> None:
    checkpoint = tiny_checkpoint(family, seed=2)
    limits = [5, 20, 12, 1, 30, 9]
    generator = TextGenerator(checkpoint, 2, 64)
    jobs = [(number, generator.request(prompt, 0.0, limits[number])) for number, prompt in enumerate(PROMPTS)]
    generated = {number: (tokens, ended) for number, tokens, ended in generator.generate(jobs)}
    for number, prompt in enumerate(PROMPTS):
        plain = Model(checkpoint).generate(prompt, dial="one-token", max_new_tokens=limits[number])
        ended = plain.finish_reason == "stop"
        assert generated[number] == (plain.token_ids[: plain.num_tokens - ended], ended)


def test_a_generator_can_be_used_again_and_its_texts_do_not_mix() -> None:
    checkpoint = tiny_checkpoint("llama", seed=2)
    generator = TextGenerator(checkpoint, 3, 64)
    jobs = [(number, generator.request(prompt, 0.0, 10)) for number, prompt in enumerate(PROMPTS)]
    first, second = ({key: tokens for key, tokens, _ in generator.generate(some)} for some in (jobs, jobs[::-1]))
    assert first == second


def test_temperature_draws_from_the_model() -> None:
    """The first token of many texts follows the model's distribution at that temperature."""
    from scipy.stats import chisquare

    checkpoint = tiny_checkpoint("llama", seed=2)
    generator = TextGenerator(checkpoint, 500, 16, seed=1)
    jobs = [(number, generator.request([1, 2, 3], 2.0, 2)) for number in range(3000)]
    counts = torch.zeros(checkpoint.vocabulary)
    for _, tokens, _ in generator.generate(jobs):
        counts[tokens[0] if tokens else next(iter(checkpoint.end_tokens))] += 1
    checkpoint.module.set_attn_implementation("eager")
    with torch.no_grad():
        logits = checkpoint.module(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1]
    logits[checkpoint.mask_token_id] = -torch.inf
    expected = (logits / 2.0).softmax(-1) * len(jobs)
    assert counts[checkpoint.mask_token_id] == 0
    seen = expected > 0
    assert (
        chisquare(
            counts[seen].numpy(), expected[seen].numpy() * counts[seen].sum().item() / expected[seen].sum().item()
        ).pvalue
        > 1e-3
    )


def test_a_prompt_without_room_is_refused() -> None:
    with pytest.raises(MarsError, match="no room"):
        TextGenerator(tiny_checkpoint("llama"), 2, 128).request([1] * 128)


@pytest.fixture(scope="module")
def small_model(chat_model: Path) -> Checkpoint:
    return mars.load(chat_model, dtype="float32").checkpoint


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "abc"}, {"prompt": "ABC"}, {"messages": [{"role": "user", "content": "bdf"}]}, {"nothing": 1}]
    path.write_text("\n".join(map(json.dumps, [*rows, {"prompt": "a" * 90}])))
    return path


PLAN = Distillation((0.0, 1.0), max_new_tokens=12, max_num_seqs=4, filters=Filters(1, 60, max_repetition=1.0))


def test_every_prompt_is_answered_at_every_temperature(small_model: Checkpoint, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "chats.jsonl"
    counts = distill(small_model, [str(prompts)], out, PLAN)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted((row["messages"][0]["content"], row["temperature"]) for row in rows) == [
        (prompt, heat) for prompt in ("abc", "bdf") for heat in (0.0, 1.0)
    ]
    assert counts["duplicate prompts"] == counts["unreadable prompts"] == counts["prompts too long"] == 1
    assert counts["answers"] == 4
    greedy = next(row for row in rows if row["temperature"] == 0.0 and row["messages"][0]["content"] == "abc")
    plain = Model(small_model).generate("abc", dial="one-token", max_new_tokens=12)
    assert greedy["messages"][1]["content"] == plain.text
    assert greedy.get("ended", True) == (plain.finish_reason == "stop")


def test_what_was_cut_is_marked_for_training(small_model: Checkpoint, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "chats.jsonl"
    distill(small_model, [str(prompts)], out, PLAN)
    rows = list(read_rows(out, on_bad_row=pytest.fail))
    marked = [json.loads(line).get("ended", True) for line in out.read_text().splitlines()]
    assert [row.ended for row in rows] == marked
    assert False in marked


def test_a_run_that_was_cut_off_is_continued(small_model: Checkpoint, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "chats.jsonl"
    distill(small_model, [str(prompts)], out, PLAN)
    lines = out.read_text().splitlines(keepends=True)
    out.write_text(lines[0] + lines[1] + lines[2][:20])  # killed while writing the third line
    counts = distill(small_model, [str(prompts)], out, PLAN)
    again = out.read_text().splitlines(keepends=True)
    assert again[:2] == lines[:2]
    assert sorted(json.loads(line)["id"] for line in again) == sorted(json.loads(line)["id"] for line in lines)
    assert counts["answers found"] == counts["answers"] == 2
    distill(small_model, [str(prompts)], out, PLAN)
    assert out.read_text().splitlines(keepends=True) == again


def test_a_model_writes_its_own_prompts(smollm: mars.Model, tmp_path: Path) -> None:
    out = tmp_path / "chats.jsonl"
    plan = Distillation((0.0,), max_new_tokens=8, own_prompts=3, max_num_seqs=3, filters=Filters(2, 60))
    distill(smollm.checkpoint, [], out, plan)
    own = [json.loads(line)["messages"] for line in out.with_suffix(".prompts.jsonl").read_text().splitlines()]
    rows = [json.loads(line)["messages"] for line in out.read_text().splitlines()]
    assert all(messages[0]["role"] == "user" and messages[0]["content"].strip() for messages in own)
    assert [row[:1] for row in rows if row[:1] in own] == [row[:1] for row in rows]


def test_own_prompts_need_a_chat_template(small_model: Checkpoint, tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(small_model.tokenizer)
    tokenizer.chat_template = None
    plan = Distillation((0.0,), max_new_tokens=8, own_prompts=3, max_num_seqs=3)
    with pytest.raises(MarsError, match="no chat template"):
        distill(replace(small_model, tokenizer=tokenizer), [], tmp_path / "chats.jsonl", plan)


@pytest.mark.parametrize(
    ("filters", "reason"),
    [
        (Filters(30, 60, 1.0), "too short"),
        (Filters(1, 60, -0.1), "too repetitive"),
        (Filters(1, 60, 1.0, keep_cut=False), "cut at the limit"),
    ],
)
def test_filters_count_what_they_leave_out(
    filters: Filters, reason: str, small_model: Checkpoint, prompts: Path, tmp_path: Path
) -> None:
    plan = Distillation((0.0, 1.0), max_new_tokens=12, max_num_seqs=4, filters=filters)
    counts = distill(small_model, [str(prompts)], tmp_path / "chats.jsonl", plan)
    assert counts[reason] > 0
    assert counts[reason] + counts["answers"] == 4


def test_repetition() -> None:
    assert repetition([1, 2, 3]) == 0.0
    assert repetition(list(range(20))) == 0.0
    assert repetition([1, 2] * 20) > 0.9


def test_a_continued_run_writes_other_prompts(chat_model: Path, tmp_path: Path) -> None:
    checkpoint = mars.load(chat_model, dtype="float32").checkpoint
    checkpoint.tokenizer.chat_template = "j{{ messages[0]['content'] }}<end>"  # a user's turn begins with j
    for wanted in (8, 16):
        filters = Filters(2, 80, max_repetition=1.0)
        plan = Distillation((0.0,), max_new_tokens=4, own_prompts=wanted, max_num_seqs=8, filters=filters)
        distill(checkpoint, [], tmp_path / "chats.jsonl", plan)
    own = (tmp_path / "chats.prompts.jsonl").read_text().splitlines()
    assert len(set(own)) == len(own) > 8


@pytest.mark.parametrize(
    "wrong", [{"max_num_seqs": 0}, {"max_new_tokens": 0}, {"own_prompts": -1}, {"temperatures": (-1.0,)}]
)
def test_a_plan_that_cannot_work_is_refused(wrong: dict[str, Any]) -> None:
    flag = next(iter(wrong)).replace("max_num_seqs", "rows")
    with pytest.raises(MarsError, match=flag):
        Distillation(**wrong)


def test_a_prompt_that_the_template_refuses_is_skipped(chat_model: Path, prompts: Path, tmp_path: Path) -> None:
    checkpoint = mars.load(chat_model, dtype="float32").checkpoint
    checkpoint.tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'abc' %}{{ raise_exception('no abc') }}{% endif %}b"
    )
    counts = distill(checkpoint, [str(prompts)], tmp_path / "chats.jsonl", PLAN)
    assert counts["prompts refused"] == 1
    assert counts["answers"] > 0


def test_nothing_to_answer_is_said(small_model: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(MarsError, match="nothing to answer"):
        distill(small_model, [], tmp_path / "chats.jsonl", PLAN)
