"""The step of all sequences: the kernel does what `decide` does, and the plain version hands it the right things."""

from __future__ import annotations

import os
import subprocess
import sys
from copy import deepcopy
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mars.integrations.vllm import step as module
from mars.integrations.vllm.step import (
    COUNTED,
    KINDS,
    GreedyChoices,
    StepInputs,
    StepOutputs,
    select,
    step,
)
from mars.method.acceptance import MEASURES, Dial, DialTensors, decide
from mars.method.markov import MarkovHead
from mars.method.sampling import SamplingParams, SamplingTensors
from mars.method.windows import Window, build_windows

VOCABULARY, MASK, WIDTH = 5, 4, 8
"""Few enough words that drafts are right now and then"""
MASKS = WIDTH // 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
dials = st.one_of(
    st.sampled_from([Dial("one-token"), Dial("exact")]),
    st.sampled_from([0.1, 0.4, 1.0]).map(lambda value: Dial("relaxed", value)),
    st.builds(Dial, st.just("threshold"), st.sampled_from([0.0, 0.3, 0.6]), st.sampled_from(MEASURES)),
)


def some_head() -> MarkovHead:
    """Of whole numbers, so that all ways to compute it give the same."""
    head = MarkovHead(VOCABULARY, 3).requires_grad_(False)
    for weight in (head.before, head.after):
        weight.copy_(torch.arange(weight.numel()).view_as(weight) * 7 % 5 - 2)
    return head.to(DEVICE)


HEAD = some_head()


class Case:
    """Sequences with any window that vLLM may feed, with any dial, and logits for them."""

    def __init__(self, draw: Any, kinds: Any = dials) -> None:
        word = st.integers(0, VOCABULARY - 2)
        self.mask: int = draw(st.sampled_from([MASK, VOCABULARY]))  # in the vocabulary, or a gated adapter's
        self.head = draw(st.sampled_from([None, HEAD]))
        self.fed: list[list[int]] = []
        for _ in range(draw(st.integers(1, 5))):
            behind = draw(st.sampled_from([[], [self.mask] * 2, [self.mask] * 4, [-1, -1], [self.mask, -1]]))
            self.fed.append(draw(st.lists(word, max_size=MASKS)) + behind)
        self.dials = [draw(kinds) for _ in self.fed]
        self.masks: int = draw(st.integers(0, MASKS))
        rows = sum(len(each) + 1 for each in self.fed)
        values = st.lists(st.integers(-2, 2), min_size=VOCABULARY, max_size=VOCABULARY)  # equal logits among them
        self.logits = torch.tensor([draw(values) for _ in range(rows)], dtype=torch.float32, device=DEVICE)
        self.logits[:, MASK] = -torch.inf
        self.prefilling = draw(st.sampled_from([None, [draw(st.booleans()) for _ in self.fed]]))
        self.exact = all(dial.kind == "exact" for dial in self.dials)

    def inputs(self) -> StepInputs:
        """Dials lie in slots in the opposite order."""
        kinds = torch.tensor([KINDS.index(dial.kind) for dial in reversed(self.dials)], dtype=torch.int32)
        prefilling = None if self.prefilling is None else torch.tensor(self.prefilling).view(torch.uint8)
        return StepInputs(
            tokens=torch.tensor([token for each in self.fed for token in (0, *each)], dtype=torch.int32).to(DEVICE),
            starts=torch.tensor([0, *accumulate(len(each) + 1 for each in self.fed)], dtype=torch.int32).to(DEVICE),
            slots=torch.arange(len(self.fed) - 1, -1, -1, dtype=torch.int32).to(DEVICE),
            kinds=None if self.exact else kinds.to(DEVICE),
            prefilling=None if prefilling is None else prefilling.to(DEVICE),
            counts=torch.zeros(len(COUNTED), dtype=torch.int64).to(DEVICE),
            mask_token=self.mask,
            masks=self.masks,
            width=WIDTH,
        )

    def tensors(self) -> DialTensors:
        return DialTensors.of(self.dials, DEVICE)

    def positions(self) -> torch.Tensor:
        return torch.arange(len(self.fed), device=DEVICE) * 3


def sampling_of(params: list[SamplingParams]) -> SamplingTensors:
    return SamplingTensors.of(params, VOCABULARY, device=DEVICE)


cases = st.composite(Case)


def same(left: StepOutputs, right: StepOutputs) -> None:
    for name in StepOutputs._fields:
        assert getattr(left, name).tolist() == getattr(right, name).tolist(), name


def test_the_kernel_does_what_decide_does() -> None:
    """On the device where there is one; elsewhere the kernel is interpreted."""
    pytest.importorskip("triton")
    from mars.integrations.vllm.kernel import add_head, greedy_step

    @settings(max_examples=150, deadline=None)
    @given(cases())
    def holds(case: Case) -> None:
        expected, found = case.inputs(), case.inputs()
        sampling = sampling_of([SamplingParams()] * len(case.fed))
        outputs = step(expected, case.logits, case.tensors(), sampling, case.positions(), head=case.head)
        sequence = [number for number, each in enumerate(case.fed) for _ in range(len(each) + 1)]
        per_token = None if case.exact else select(case.tensors(), torch.tensor(sequence, device=DEVICE))
        choices = GreedyChoices.of(found.tokens, case.logits, per_token)
        if case.head is not None:
            choices = add_head(choices, found, case.logits, case.head, None if case.exact else case.tensors())
        same(greedy_step(found, choices), outputs)
        assert found.counts.tolist() == expected.counts.tolist()

    holds()


@st.composite
def sampled_cases(draw: Any) -> tuple[Case, list[SamplingParams]]:
    case = Case(draw)
    some = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.7, 1.5]),
        top_k=st.sampled_from([0, 2]),
        top_p=st.sampled_from([1.0, 0.6]),
        seed=st.integers(0, 99),
    )
    return case, [draw(some) for _ in case.fed]


@settings(max_examples=150, deadline=None)
@given(sampled_cases())
def test_a_window_of_vllm_is_decided_as_our_own(drawn: tuple[Case, list[SamplingParams]]) -> None:
    """Our windows keep room for drafts that a sequence does not have; apart from that they are the same."""
    case, params = drawn
    outputs = step(case.inputs(), case.logits, case.tensors(), sampling_of(params), case.positions(), head=case.head)
    start = 0
    for number, (fed, dial) in enumerate(zip(case.fed, case.dials, strict=True)):
        rows, start = case.logits[start : start + len(fed) + 1], start + len(fed) + 1
        drafts = [token for token in fed if token not in (case.mask, -1)]
        masks = 0 if -1 in fed else min(len(fed) - len(drafts), case.masks)
        window = Window(MASKS, 1, MASKS)
        ours = build_windows(
            window,
            case.mask,
            last=torch.zeros(1, dtype=torch.long),
            drafts=torch.tensor([drafts + [0] * (MASKS - len(drafts))]),
            draft_count=torch.tensor([len(drafts)]),
            emitted=torch.tensor([dial.kind == "threshold"]),
            groups=torch.ones(1, dtype=torch.long),
            masks=torch.tensor([masks]),
        )
        logits = torch.zeros(window.width, VOCABULARY)
        logits[: len(drafts) + 1] = rows[: len(drafts) + 1].cpu()
        logits[window.verified : window.verified + masks] = rows[len(drafts) + 1 :][:masks].cpu()
        decision = decide(
            ours,
            logits,
            DialTensors.of([dial]),
            SamplingTensors.of([params[number]], VOCABULARY, MASK),
            positions=torch.tensor([3 * number]),
            emitted=torch.tensor([dial.kind == "threshold"]),
            head=None if case.head is None else deepcopy(case.head).cpu(),
        )
        if case.prefilling is not None and case.prefilling[number]:
            assert outputs.emitted[number] == outputs.rejected[number] == 0
            continue
        text = [*drafts[: decision.accepted], int(decision.token)]
        assert outputs.sampled[number].tolist() == text + [-1] * (WIDTH + 1 - len(text))
        assert outputs.rejected[number] == len(fed) + 1 - len(text)
        count = {"threshold": decision.trusted, "one-token": torch.zeros(1)}.get(dial.kind, decision.draft_count)
        following = decision.drafts[0, : int(count)].tolist() if masks else []
        assert outputs.windows[number].tolist() == following + [case.mask] * (WIDTH - len(following))


@settings(max_examples=30, deadline=None)
@given(sampled_cases())
def test_large_steps_are_decided_in_parts(drawn: tuple[Case, list[SamplingParams]]) -> None:
    case, params = drawn
    parts = (case.logits, case.tensors(), sampling_of(params), case.positions(), None, case.head)
    whole = step(case.inputs(), *parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_LOGITS", 2 * (WIDTH + 1) * VOCABULARY)
        same(step(case.inputs(), *parts), whole)


@pytest.mark.parametrize("dial", ["threshold=0", "relaxed=0.01", "exact"])
def test_no_dial_accepts_what_is_banned(dial: str) -> None:
    """Neither by a grammar, whose bans are in the logits, nor by one that has not validated the draft."""
    case = Case.__new__(Case)
    case.mask, case.head = MASK, None
    case.fed, case.dials, case.masks, case.prefilling, case.exact = (
        [[1, 2, MASK, MASK]],
        [Dial.parse(dial)],
        2,
        None,
        False,
    )
    case.logits = torch.zeros(5, VOCABULARY, device=DEVICE)
    case.logits[:2, 3] = torch.tensor([-1.0, 1.0])
    case.logits[0, 1] = 1.0
    case.logits[:, MASK] = -torch.inf
    sampling = sampling_of([SamplingParams()])

    def text(barred: torch.Tensor | None = None) -> list[int]:
        outputs = step(case.inputs(), case.logits, case.tensors(), sampling, case.positions(), barred)
        return [token for token in outputs.sampled[0].tolist() if token >= 0]

    assert len(text()) == (2 if dial == "exact" else 3)
    assert text(torch.tensor([False, False, True, True, True], device=DEVICE)) == [1, 3]
    case.logits[1, 2] = -torch.inf
    assert text() == [1, 3]


def test_greedy_choices_leave_out_what_no_dial_needs() -> None:
    tokens, logits = torch.zeros(3, dtype=torch.int32), torch.zeros(3, VOCABULARY)
    exact, relaxed, threshold = (
        DialTensors.of([Dial.parse(each)] * 3) for each in ("exact", "relaxed=0.5", "threshold=0.5")
    )
    assert GreedyChoices.of(tokens, logits, exact)[1:] == (None, None, None)
    assert GreedyChoices.of(tokens, logits, relaxed).confident is None
    assert GreedyChoices.of(tokens, logits, threshold).tolerated is None


COMPILE = """
import itertools, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mars.integrations.vllm.kernel import _add_change, _add_head, _step

def build(kernel, pointers, numbers, constants, warps):
    signature = pointers | dict.fromkeys(numbers, "i32") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["cubin"]

pointers = {"tokens": "*i32", "starts": "*i32", "slots": None, "kinds": "*i32", "prefilling": "*u8", "argmax": "*i64"}
pointers |= {"tolerated": "*u8", "confident": "*u8", "drafted": "*i64", "sampled": "*i64", "emitted": "*i32"}
pointers |= {"rejected": "*i32", "windows": "*i64", "counts": "*i64"}
for slots, *there in itertools.product(["*i32", "*i64"], *[[True, False]] * 5):
    given = dict(zip(["kinds", "prefilling", "tolerated", "confident", "drafted"], there))
    if (given["tolerated"] or given["confident"]) and not given["kinds"]:
        continue
    constants = {"WIDTH": 6, "BLOCK": 16, "ONE_TOKEN": 0, "THRESHOLD": 3}
    constants |= {name: None for name, there in given.items() if not there}
    signature = {name: kind for name, kind in (pointers | {"slots": slots}).items() if given.get(name, True)}
    build(_step, signature, ["mask_token", "masks"], constants, 1)
for kind, first in itertools.product(["*bf16", "*fp32"], [True, False]):
    pointers = {"tokens": "*i32", "starts": "*i32", "logits": kind, "previous": "*i64", "before_weight": kind}
    pointers |= {"after_weight": kind, "output": "*fp32"}
    constants = {"FIRST": first, "RANK": 128, "BLOCK": 16, "SEQUENCES": 16, "WORDS": 64, "RANKS": 64}
    build(_add_head, pointers, ["stride", "mask_token", "sequences", "vocabulary", "index"], constants, 4)
for kind, rows in itertools.product(["*bf16", "*fp32"], [16, 64]):
    pointers = {"y": kind, "low": kind, "b": kind, "gate": "*u8", "tiles": "*i32"}
    constants = {"RANK": 96, "ROWS": rows, "COLUMNS": 32, "RANKS": 64}
    build(_add_change, pointers, ["rows", "y_stride", "low_stride"], constants, 4)
"""


def test_the_kernel_compiles_for_a_gpu() -> None:
    """Without one: interpreted, a kernel may do what it cannot do when compiled."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True, timeout=300)
