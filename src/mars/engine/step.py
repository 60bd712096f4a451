"""What crosses between host and device in a step: `StepInputs` down, `StepOutputs` up."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mars.core.output import Logprob
from mars.core.sequence import Sequence, StepResult
from mars.method.acceptance import MEASURES, Decision, Dial, DialFeatures, DialTensors
from mars.method.sampling import Features, SamplingParams, SamplingTensors
from mars.method.windows import Window

PADDING_SLOT = 0  # batches are filled up with this slot of the device state; nothing reads what it holds.
INTEGERS = ("slot", "verifies", "groups", "masks", "candidates", "measure", "options", *SamplingTensors.INTEGERS)
FLOATS = ("tolerance", "trust", *SamplingTensors.FLOATS)


BIASED, GRAMMAR, LOGPROBS, LOOKUP = (
    1,
    2,
    4,
    8,
)  # what a sequence needs that no other value tells: bits of its ``options``


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step is told of its sequences: two matrices, so that they are sent in two copies, read by name."""

    integers: Tensor  # (`INTEGERS`, sequences)
    floats: Tensor  # (`FLOATS`, sequences)
    features: Features
    dial_features: DialFeatures

    @classmethod
    def of(cls, sequences: SequenceOf[Sequence], windows: SequenceOf[Window], vocabulary: int) -> StepInputs:
        """On the host. ``windows``: the largest that each sequence may have."""
        features = replace(
            Features.of([each.sampling for each in sequences]),
            logprobs=any(each.request.logprobs is not None for each in sequences),
            grammar=any(each.matcher is not None for each in sequences),
        )
        columns = [
            _column(
                *(each.slot or PADDING_SLOT, each.dial, each.sampling, window, vocabulary),
                BIASED * bool(each.sampling.logit_bias)
                + GRAMMAR * (each.matcher is not None)
                + LOGPROBS * (each.request.logprobs is not None)
                + LOOKUP * each.looks_up,
            )
            for each, window in zip(sequences, windows, strict=True)
        ]
        return cls(*_matrices(columns), features, DialFeatures.of([each.dial for each in sequences]))

    @classmethod
    def padding(cls, count: int, block_size: int, vocabulary: int) -> StepInputs:
        window = Window.of(block_size, block_size)
        column = _column(PADDING_SLOT, Dial("exact"), SamplingParams(seed=0), window, vocabulary)
        return cls(*_matrices([column] * count), Features(), DialFeatures())

    def __len__(self) -> int:
        return self.integers.shape[1]

    def feeding(self, windows: SequenceOf[Window]) -> StepInputs:
        """The same with a window for each sequence."""
        integers = self.integers.clone()
        integers[2:5] = torch.tensor([(each.groups, each.masks, each.candidates) for each in windows]).T
        return replace(self, integers=integers)

    @property
    def slots(self) -> Tensor:
        return self.integers[0]

    @property
    def verifies(self) -> Tensor:
        """Do the dials verify drafts before they are emitted?"""
        return self.integers[1].bool()

    @property
    def groups(self) -> Tensor:
        return self.integers[2]

    @property
    def masks(self) -> Tensor:
        return self.integers[3]

    @property
    def candidates(self) -> Tensor:
        return self.integers[4]

    @property
    def options(self) -> Tensor:
        return self.integers[6]

    @property
    def dials(self) -> DialTensors:
        return DialTensors(self.floats[0], self.floats[1], self.integers[5], self.dial_features)

    def sampling(self, bias: Tensor, ends: Tensor) -> SamplingTensors:
        named = dict(zip(SamplingTensors.INTEGERS, self.integers[7:].unbind(), strict=True))
        named |= dict(zip(SamplingTensors.FLOATS, self.floats[2:].unbind(), strict=True))
        return SamplingTensors(**named, bias=bias, features=self.features, ends=ends)


Column = tuple[list[int], list[float]]


def _column(
    slot: int, dial: Dial, sampling: SamplingParams, window: Window, vocabulary: int, options: int = 0
) -> Column:
    masks = window.masks if dial.uses_masks else 0
    fed = [max(1, window.groups), masks, window.candidates]
    integers = [slot, int(dial.verifies), *fed, MEASURES.index(dial.measure), options]
    return [*integers, *sampling.integers(vocabulary)], [dial.tolerance, dial.trust, *sampling.floats()]


def _matrices(columns: SequenceOf[Column]) -> tuple[Tensor, Tensor]:
    integers, floats = zip(*columns, strict=True)
    return torch.tensor(integers).T.contiguous(), torch.tensor(floats, dtype=torch.float64).T.contiguous()


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a step decided, a row per sequence."""

    decisions: Tensor
    """(sequences, 4 + drafts + masks + 2 candidates): accepted, trusted, draft count and token, then `agrees`, then
    drafts, then the candidates' tokens and points"""
    drafts: int  # columns of `agrees`
    candidates: int = 0
    logprobs: Tensor | None = None  # (sequences, verified positions, 1 + top): of the token there, and of the top ones
    top_ids: Tensor | None = None  # (sequences, verified positions, top)
    probabilities: Tensor | None = None  # (sequences, masks): of the drafts, where they are known
    fed: Tensor | None = None  # (sequences,): how many drafts were verified, where windows may be ragged
    arrived: torch.cuda.Event | None = None  # when the tensors are on the host, if they are on their way
    begun: torch.cuda.Event | None = None  # when the device began with the step, if that is known

    @classmethod
    def of(
        cls,
        decision: Decision,
        logprobs: tuple[Tensor, Tensor] | None,
        fed: Tensor | None = None,
    ) -> StepOutputs:
        """``logprobs``: what `mars.method.acceptance.logprobs` found, if some sequence wants them.

        ``fed`` (sequences,): drafts that were verified.
        """
        scalars = [decision.accepted, decision.trusted, decision.draft_count, decision.token]
        decisions = torch.cat([torch.stack(scalars, 1), decision.agrees, decision.drafts, *decision.candidates], 1)
        candidates = decision.candidates.tokens.shape[1]
        outputs = cls(decisions, decision.agrees.shape[1], candidates, *(logprobs or ()))
        if decision.log_shares is None:
            return outputs
        return replace(outputs, probabilities=decision.log_shares.exp(), fed=fed)

    def to_host(self, count: int, *, logprobs: bool, begun: torch.cuda.Event | None = None) -> StepOutputs:
        """Start copying the first ``count`` rows to the host, `results` waits for them; ``logprobs``: these as well."""
        if not self.decisions.is_cuda:
            return self
        wanted = (self.logprobs, self.top_ids) if logprobs else (None, None)
        known = (*wanted, self.probabilities, self.fed)
        values, ids, probabilities, fed = (None if each is None else _pinned_copy(each[:count]) for each in known)
        decisions = _pinned_copy(self.decisions[:count])
        arrived = torch.cuda.Event(enable_timing=begun is not None)
        arrived.record()
        parts = (values, ids, probabilities, fed)
        return StepOutputs(decisions, self.drafts, self.candidates, *parts, arrived=arrived, begun=begun)

    def wait(self) -> None:
        if self.arrived is not None:
            self.arrived.synchronize()

    def seconds(self) -> float | None:
        """That the device took, if it is known; after `wait`."""
        if self.begun is None or self.arrived is None:
            return None
        return self.begun.elapsed_time(self.arrived) / 1000

    def results(self, wants_logprobs: SequenceOf[bool]) -> list[StepResult]:
        """What was decided for each sequence, with logprobs for those that want them."""
        self.wait()
        decisions = self.decisions.cpu()  # in one copy, if `to_host` was not called
        accepted, trusted, counts, tokens = decisions[:, :4].T.tolist()
        ends = [4, 4 + self.drafts, decisions.shape[1] - 2 * self.candidates, decisions.shape[1] - self.candidates]
        _, *parts = decisions.tensor_split(ends, 1)
        agrees, predicted, others, points = (each.tolist() for each in parts)
        if self.fed is not None:
            agrees = [each[:count] for each, count in zip(agrees, self.fed.tolist(), strict=True)]
        drafts = [each[:count] for each, count in zip(predicted, counts, strict=True)]
        logprobs = [self._logprobs(row) if wanted else [] for row, wanted in enumerate(wants_logprobs)]
        candidates: list[SequenceOf[tuple[int, int]]] = [()] * len(tokens)
        if self.candidates:
            candidates = [list(zip(*each, strict=True)) for each in zip(others, points, strict=True)]
        return list(map(StepResult, accepted, tokens, agrees, drafts, trusted, logprobs, candidates))

    def draft_probabilities(self) -> list[list[float]]:
        """Of each sequence's predictions; empty where they are not known."""
        return [[]] * len(self.decisions) if self.probabilities is None else self.probabilities.tolist()

    def _logprobs(self, row: int) -> list[Logprob]:
        assert self.logprobs is not None and self.top_ids is not None
        positions = zip(self.logprobs[row].tolist(), self.top_ids[row].tolist(), strict=True)
        return [Logprob(chosen, list(zip(ids, top, strict=True))) for (chosen, *top), ids in positions]


def _pinned_copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """Chunks of texts whose keys and values are to be cached: one matrix, sent in one copy, read by name."""

    matrix: Tensor  # (chunks, 3 + width)

    @classmethod
    def of(cls, chunks: SequenceOf[tuple[int, int, SequenceOf[int]]], width: int) -> PrefillInputs:
        """On the host: slot, start and tokens of each chunk; chunks longer than ``width`` are cut into several."""
        rows = [
            [slot, start + first, len(part), *part, *[0] * (width - len(part))]
            for slot, start, tokens in chunks
            for first in range(0, len(tokens), width)
            for part in [tokens[first : first + width]]
        ]
        return cls(torch.tensor(rows))

    @classmethod
    def padding(cls, count: int, width: int) -> PrefillInputs:
        return cls(torch.zeros(count, 3 + width, dtype=torch.long))

    def __len__(self) -> int:
        return len(self.matrix)

    @property
    def slots(self) -> Tensor:
        return self.matrix[:, 0].contiguous()

    @property
    def starts(self) -> Tensor:
        return self.matrix[:, 1].contiguous()

    @property
    def lengths(self) -> Tensor:
        return self.matrix[:, 2].contiguous()

    @property
    def tokens(self) -> Tensor:
        return self.matrix[:, 3:]
