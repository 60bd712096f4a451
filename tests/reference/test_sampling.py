"""Under sampling, `exact` follows the AR distribution: a chi-square test that a broken rule does not pass."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from scipy.stats import chi2

from mars.core.request import Request
from mars.method import acceptance
from mars.method import sampling as sampling_module
from mars.method.acceptance import Dial
from mars.method.sampling import SamplingParams, SamplingTensors
from mars.method.windows import parse_window
from mars.models import Checkpoint, Settings
from mars.models.attention import own_attention
from mars.reference import Decoder
from tests.conftest import tiny_checkpoint, tiny_tokenizer

VOCABULARY, MASK = 5, 4
PROMPT = [1, 0, 2]
ROWS, LENGTH = 12_000, 4


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    module = tiny_checkpoint("llama", seed=5, vocab_size=VOCABULARY, pad_token_id=None).module
    with torch.no_grad():  # soften the model: a sharp one has too few likely texts to tell distributions apart
        module.lm_head.weight.mul_(0.4)
    return Checkpoint("tiny", module, tiny_tokenizer(), Settings(MASK))


def ar_probabilities(checkpoint: Checkpoint, sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every text, from the plain model."""
    texts = list(product(range(MASK), repeat=LENGTH))
    batch = SamplingTensors.of([sampling] * len(texts), VOCABULARY, MASK)
    with own_attention(checkpoint.module) as model, torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *text] for text in texts])).logits[:, len(PROMPT) - 1 : -1]
    written = torch.nn.functional.one_hot(torch.tensor(texts), VOCABULARY).cumsum(1)
    counts = torch.cat([torch.zeros_like(written[:, :1]), written[:, :-1]], 1)
    policy = batch.scores(batch.adjust(logits, counts > 0, counts)).softmax(2)
    chosen = policy.gather(2, torch.tensor(texts)[:, :, None])[:, :, 0]
    return dict(zip(texts, chosen.double().prod(1).tolist(), strict=True))


def p_value(checkpoint: Checkpoint, sampling: dict, dial: str = "exact", window: str = "chain", seed: int = 0) -> float:
    """How likely texts at least this far from the AR distribution would be, if they did follow it."""
    requests = [
        Request(
            PROMPT,
            Dial.parse(dial),
            SamplingParams(seed=seed + row, **sampling),
            max_new_tokens=LENGTH,
            block_size=4,
            window=parse_window(window, 4),
        )
        for row in range(ROWS)
    ]
    answers = Decoder(checkpoint, requests).finish()
    assert any(max(answer.steps) > 1 for answer in answers)
    counts = Counter(tuple(answer.token_ids) for answer in answers)
    expected = {t: p * ROWS for t, p in ar_probabilities(checkpoint, SamplingParams(**sampling)).items()}
    assert all(expected[text] > 0 for text in counts), "a text that the AR model never writes"
    common = [text for text, count in expected.items() if count >= 5]
    rest = ROWS - sum(expected[text] for text in common)
    statistic = sum((counts[text] - expected[text]) ** 2 / expected[text] for text in common)
    if rest > 5:
        statistic += (ROWS - sum(counts[text] for text in common) - rest) ** 2 / rest
    return float(chi2.sf(statistic, len(common) - (rest <= 5)))


@pytest.mark.parametrize("window", ["chain", "tree"])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 1.0, "frequency_penalty": 1.0},
        {"temperature": 1.5, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 3},
    ],
)
def test_exact_samples_the_ar_distribution(checkpoint: Checkpoint, sampling: dict, window: str) -> None:
    assert p_value(checkpoint, sampling, window=window) > 1e-3


def test_one_broken_rule_is_enough_to_fail(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = sampling_module.gumbel
    with monkeypatch.context() as broken:  # the same noise at every position
        broken.setattr(sampling_module, "gumbel", lambda seeds, at, size: noise(seeds, torch.zeros_like(at), size))
        assert p_value(checkpoint, {"temperature": 1.0}) < 1e-9
    with monkeypatch.context() as broken:  # whatever the masks say
        broken.setattr(acceptance.DialFeatures, "of", classmethod(lambda cls, _rows: cls(relaxes=True)))
        broken.setattr(acceptance, "within_tolerance", lambda adjusted, scores, drafts, tolerance: drafts >= 0)
        assert p_value(checkpoint, {"temperature": 1.0}) < 1e-9


@pytest.mark.parametrize("window", ["chain", "tree=2", "tree"])
@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 1.3, "top_p": 0.8, "presence_penalty": 1}])
def test_with_one_seed_exact_draws_what_one_token_draws(sampling: dict, window: str) -> None:
    tiny = tiny_checkpoint("llama")
    requests = [
        [
            Request(
                [1, 2, 3, row], Dial(kind), SamplingParams(seed=row, **sampling), 60, (), 4, parse_window(window, 4)
            )
            for row in range(8)
        ]
        for kind in ("one-token", "exact")
    ]
    plain, exact = (Decoder(tiny, each).finish() for each in requests)
    assert [each.token_ids for each in plain] == [each.token_ids for each in exact]
    assert sum(each.forwards for each in exact) < sum(each.forwards for each in plain)


def test_threshold_and_relaxed_are_allowed_to_differ(checkpoint: Checkpoint) -> None:
    assert p_value(checkpoint, {"temperature": 1.0}, dial="relaxed=0.1") < 1e-3
    assert p_value(checkpoint, {"temperature": 1.0}, dial="threshold=0.3") < 1e-3
