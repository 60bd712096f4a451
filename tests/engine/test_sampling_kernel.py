"""The sampling kernel against `LogitsChoices` in plain PyTorch, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from copy import deepcopy

import pytest
import torch

from mars import SamplingParams
from mars.core.grammar import unpack
from mars.core.request import Request
from mars.core.sequence import Sequence
from mars.engine.device_state import DeviceState
from mars.engine.step import GRAMMAR, StepInputs, StepOutputs
from mars.method.acceptance import NO_TOKEN, Decision, Dial, decide, decide_by, logprobs, written_tokens
from mars.method.markov import MarkovHead
from mars.method.sampling import bias_tensor, token_mask
from mars.method.windows import NO_GROUP, Candidates, Window, WindowBatch

pytest.importorskip("triton")
from mars.engine.kernels.markov import PART
from mars.engine.kernels.sampling import KernelChoices

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ENDS = (3, 4)
DRAFTS = 3
TREE, CANDIDATES = Window.of(4, 4), Window.of(4, 4, 5)
KINDS = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.3, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "top_k and top_p": {"temperature": 2.0, "top_k": 40, "top_p": 0.9},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "all of them": {"temperature": 1.0, "top_k": 30, "top_p": 0.8, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "penalties and sampling": {"temperature": 0.9, "frequency_penalty": 1.5, "top_p": 0.95},
    "bias": {"logit_bias": {5: 4.0, 7: -100.0, 11: 2.5}},
    "min_position": {"min_position": 12},
}
DIALS = ["exact", "one-token", "relaxed=0.3", "relaxed=0.05", "threshold=0.02", "threshold:entropy=0.02"]
DIALS += ["threshold:margin=0.005"]


def sequences(vocabulary: int) -> list[Sequence]:
    """Every kind of sampling, each with some dial; every third one with logprobs."""
    made = []
    for index, options in enumerate(KINDS.values()):
        params = SamplingParams(**options, seed=index)  # type: ignore[arg-type]
        dial = Dial.parse(DIALS[index % len(DIALS)])
        prompt = [random.randrange(vocabulary) for _ in range(5)]
        request = Request(prompt, dial, params, block_size=4, logprobs=20 if index % 3 == 0 else None)
        sequence = Sequence(request, dial, params, 99, frozenset(ENDS), None, None, [*prompt, 2, 3, 5])  # type: ignore[arg-type]
        sequence.slot, sequence.cursor = index + 1, 7
        sequence.drafts = [random.randrange(vocabulary) for _ in range(index % (DRAFTS + 1))]
        sequence.drafts_emitted = index % 5 == 4
        guesses = [(random.randrange(vocabulary), random.randrange(len(sequence.drafts) + 1)) for _ in range(5)]
        sequence.candidates = guesses[: index % 6]
        made.append(sequence)
    return made


def step(
    vocabulary: int, dtype: torch.dtype, window: Window = TREE
) -> tuple[WindowBatch, torch.Tensor, StepInputs, DeviceState]:
    """Windows with logits, some of them equal, that make the drafts likely."""
    random.seed(vocabulary)
    torch.manual_seed(vocabulary)
    batch = sequences(vocabulary)
    state = DeviceState(len(batch), DRAFTS, 4, vocabulary, DEVICE, candidates=window.candidates)
    state._reserve()
    state.begin(batch)
    inputs = StepInputs.of(batch, [window] * len(batch), vocabulary)
    inputs = StepInputs(inputs.integers.to(DEVICE), inputs.floats.to(DEVICE), inputs.features, inputs.dial_features)
    windows = state.windows(window, inputs, 1)
    logits = (torch.randn(windows.tokens.numel(), vocabulary, device=DEVICE) * 3).to(dtype)
    rows = windows.verified_rows()[:, :-1]
    likely = logits[rows].amax(2) - torch.rand(rows.shape, device=DEVICE).to(dtype)
    logits[rows[:, :, None], windows.drafts[:, :, None]] = likely[:, :, None]
    return windows, logits, inputs, state


def by_torch(
    windows: WindowBatch,
    logits: torch.Tensor,
    inputs: StepInputs,
    state: DeviceState,
    allowed: torch.Tensor | None = None,
    head: MarkovHead | None = None,
    mask: int | None = 1,
) -> tuple[Decision, torch.Tensor, torch.Tensor]:
    vocabulary = logits.shape[1]
    banned = bias_tensor([SamplingParams()], vocabulary, mask).to(DEVICE)
    sampling = inputs.sampling(banned + state.logit_bias(inputs), token_mask(ENDS, vocabulary).to(DEVICE))
    where = {"positions": state.cursor[inputs.slots], "emitted": state.drafts_emitted[inputs.slots]}
    history = {"seen": state.seen[inputs.slots], "counts": state.counts[inputs.slots]}
    decision = decide(windows, logits, inputs.dials, sampling, **where, **history, allowed=allowed, head=head)
    return decision, *logprobs(windows, logits, decision, banned)


def assert_same_candidates(found: Candidates, expected: Candidates) -> None:
    """In any order, as far as they exist: equally likely ones may change places."""
    for mine, theirs in zip(*(torch.stack(each, 2).tolist() for each in (found, expected)), strict=True):
        exist = [sorted(each for each in some if each[1] != NO_GROUP) for some in (mine, theirs)]
        assert exist[0] == exist[1]


FLOATS = torch.float32, torch.bfloat16
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter's products know no bfloat16
LARGE = [] if DEVICE.type == "cpu" else [(size, each) for size in (5003, 49152, 151936) for each in FLOATS]


@pytest.mark.parametrize("window", [TREE, CANDIDATES], ids=str)
@pytest.mark.parametrize(("vocabulary", "dtype"), [(50, torch.float32), (300, torch.bfloat16), *LARGE])
def test_the_kernel_decides_as_pytorch_does(vocabulary: int, dtype: torch.dtype, window: Window) -> None:
    windows, logits, inputs, state = step(vocabulary, dtype, window)
    state.grammar.random_(-(2**31), 2**31 - 1)
    inputs.options[2:6] |= GRAMMAR
    allowed = unpack(state.grammar[inputs.slots], vocabulary)
    allowed[(inputs.options & GRAMMAR) == 0] = True
    expected, values, ids = by_torch(windows, logits, inputs, state, allowed)
    choices = KernelChoices(logits, windows.drafts, inputs, state, token_mask(ENDS, vocabulary).to(DEVICE), 1)
    found = decide_by(choices, windows, state.cursor[inputs.slots], state.drafts_emitted[inputs.slots])
    for name in ("accepted", "agrees", "token", "draft_count", "trusted"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), msg=lambda text, n=name: f"{n} {text}"
        )
    ahead = torch.arange(found.drafts.shape[1], device=DEVICE) < found.draft_count[:, None]
    assert torch.equal(found.drafts[ahead], expected.drafts[ahead])
    assert_same_candidates(found.candidates, expected.candidates)
    known, found_ids = choices.logprobs(windows.verified_rows(), written_tokens(windows.drafts, found))
    for index in range(0, len(inputs), 3):
        torch.testing.assert_close(known[index], values[index], atol=1e-4, rtol=1e-4)
        scores = logits.float()[windows.verified_rows()[index]]
        assert torch.equal(scores.gather(1, found_ids[index]), scores.gather(1, ids[index]))  # equal ones in any order
    assert StepOutputs.of(found, (known, found_ids)).decisions.shape[0] == len(inputs)


@pytest.mark.parametrize("window", [TREE, CANDIDATES], ids=str)
@pytest.mark.parametrize("mask", [1, None], ids=["in the vocabulary", "outside"])
def test_a_mask_follows_the_token_before_it(mask: int | None, window: Window) -> None:
    windows, logits, inputs, state = step(150, torch.float32, window)
    head = MarkovHead(150, 8).to(DEVICE).requires_grad_(False)
    head.after.normal_()
    expected, _, _ = by_torch(windows, logits, inputs, state, head=head, mask=mask)
    ends = token_mask(ENDS, 150).to(DEVICE)
    choices = KernelChoices(logits, windows.drafts, inputs, state, ends, -1 if mask is None else mask, head)
    found = decide_by(choices, windows, state.cursor[inputs.slots], state.drafts_emitted[inputs.slots])
    ahead = torch.arange(found.drafts.shape[1], device=DEVICE) < found.draft_count[:, None]
    assert ahead.any() and torch.equal(found.drafts[ahead], expected.drafts[ahead])
    assert_same_candidates(found.candidates, expected.candidates)
    without, _, _ = by_torch(windows, logits, inputs, state, mask=mask)
    assert not torch.equal(found.drafts[ahead], without.drafts[ahead])


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(("vocabulary", "dtype"), [(50, torch.float32), (300, HALF), *LARGE])
def test_parts_of_a_row_say_what_the_row_does(vocabulary: int, dtype: torch.dtype, ranks: int) -> None:
    """Many logits are equal: of those the first token counts."""
    windows, _, inputs, state = step(vocabulary, dtype)
    rows = torch.arange(len(inputs), device=DEVICE)[:, None]
    logits = torch.randint(-9, 4, (len(rows), vocabulary), device=DEVICE).to(dtype)
    head = MarkovHead(vocabulary, 8).to(DEVICE, dtype).requires_grad_(False)
    before = torch.full_like(rows.flatten(), NO_TOKEN)
    logits, *known = torch.ops.mars.add_head(logits, rows.flatten(), before, head.before, head.after)
    ends = token_mask(ENDS, vocabulary).to(DEVICE)
    choices = KernelChoices(logits, windows.drafts, inputs, state, ends, -1, head, wants_shares=ranks > 1)
    given = (logits, rows, torch.full_like(rows, 20), torch.zeros_like(rows.flatten()), ranks)
    expected, found = choices._choose(*given), choices._choose(*given, known)
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.confident, expected.confident)
    assert not torch.equal(logits.argmax(1), torch.zeros_like(before))
    if ranks > 1:
        torch.testing.assert_close(found.log_shares, expected.log_shares, atol=1e-5, rtol=1e-5)
        known[0].fill_(-1.0)  # … and they are looked at
        assert not torch.equal(choices._choose(*given, known).log_shares, expected.log_shares)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("vocabulary", "rank", "masks"), [(50, 8, 1), (300, 40, 17), (130, 200, 70)])
def test_what_the_head_adds(vocabulary: int, rank: int, masks: int, dtype: torch.dtype) -> None:
    head = MarkovHead(vocabulary, rank).to(DEVICE, dtype).requires_grad_(False)
    head.after.normal_()
    logits = torch.randn(90, vocabulary, device=DEVICE).to(dtype)
    rows, before = torch.randint(90, (masks,), device=DEVICE), torch.randint(vocabulary, (masks,), device=DEVICE)
    before[::5] = NO_TOKEN
    added = torch.where((before == NO_TOKEN)[:, None], 0.0, deepcopy(head).double()(before.clamp(min=0)))
    expected = (logits[rows].double() + added).to(dtype)
    found, peaks, masses = torch.ops.mars.add_head(logits, rows, before, head.before, head.after)
    torch.testing.assert_close(found, expected)
    parts = [each.float() for each in found.split(PART, 1)]
    assert torch.equal(peaks, torch.stack([each.amax(1) for each in parts], 1))
    sums = [(each - each.amax(1, keepdim=True)).exp().sum(1) for each in parts]
    torch.testing.assert_close(masses, torch.stack(sums, 1))
    if DEVICE.type == "cuda":  # the interpreter multiplies through NumPy
        alone, _, _ = torch.ops.mars.add_head(logits, rows[-1:], before[-1:], head.before, head.after)
        assert torch.equal(alone, found[-1:]), "the bits depend on the number of masks"


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mars.engine.kernels import sampling

long = ("rows", "at", "drafts", "accepted", "slots", "integers", "tokens_out", "chosen", "ids_out")
types = dict.fromkeys(long, "*i64")
types |= dict.fromkeys(("bias", "counts", "values_out", "shares_out", "peaks", "masses"), "*fp32")
types |= dict.fromkeys(("seen", "ends", "passes_out"), "*i1")
types |= {"logits": "*bf16", "floats": "*fp64", "grammar": "*i32", "banned": "i32", "columns": "i32"}
shared = {"VOCABULARY": 49152, "BLOCK": 8192, "COUNT": 4}
rows = sampling.rows_read() | {"MOST_DRAFTS": 3, "POSITIONS": 4, "PARTS": 0, "ALL": 1}
parts = {"PARTS": 768, "ALL": 1024}
for kernel, constants in (
    (sampling._choose, {**shared, **rows, "VERIFIES": True, "RANKS": 1, "SHARES": False}),
    (sampling._choose, {**shared, **rows, "VERIFIES": False, "RANKS": 1, "SHARES": True}),
    (sampling._choose, {**shared, **rows, "VERIFIES": False, "RANKS": 4, "SHARES": True}),
    (sampling._choose, {**shared, **rows, **parts, "VERIFIES": False, "RANKS": 1, "SHARES": False}),
    (sampling._choose, {**shared, **rows, **parts, "VERIFIES": False, "RANKS": 4, "SHARES": True}),
    (sampling._logprobs, {**shared, "TOP": 20, "OPTIONS": rows["OPTIONS"]}),
):
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16}).asm["cubin"]
"""


def test_the_kernels_compile_for_a_gpu() -> None:
    """Without one: interpreted, a kernel may do what it cannot do when compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True, timeout=300)
