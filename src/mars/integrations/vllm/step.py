"""One step of all sequences: what it was fed, what comes of it, and the plain version, which calls `decide`.

Both paths of the plugin describe a step by `StepInputs` and get `StepOutputs`. `kernel.greedy_step` computes the same
for greedy sequences in one launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from mars.integrations.vllm.gated import attach, watch
from mars.integrations.vllm.options import Options
from mars.integrations.vllm.window import read_windows
from mars.method.acceptance import Decision, Dial, DialTensors, Kind, confidence, decide, leading, within_tolerance
from mars.method.markov import MarkovHead
from mars.method.sampling import SamplingParams, SamplingTensors
from mars.method.windows import WindowBatch

KINDS: tuple[Kind, ...] = get_args(Kind)
ONE_TOKEN, THRESHOLD = KINDS.index("one-token"), KINDS.index("threshold")
MOST_LOGITS = 2**25
"""Logits that `decide` gets at once: it makes several tensors of their size, for which vLLM keeps no memory"""
COUNTED = ("forwards", "tokens", "drafts", "accepted", "agreed")
"""What is counted of decoding sequences; ``agreed`` are accepted drafts that are the AR model's own choice"""


class Drafter:
    """What both paths have in common: options, the server's dial, and counts."""

    dial: Dial

    def __init__(self, vllm_config: Any, device: torch.device | str) -> None:
        self.options = Options.read(vllm_config)
        self.head: MarkovHead | None = None
        self._config, self._files = vllm_config, self.options.find_adapter()
        self._watched = {} if self._files is None else watch(self._files)
        self.counted = torch.zeros(len(COUNTED), dtype=torch.int64, device=device)  # counts of steps with windows
        self.single = 0  # forwards of sequences without windows, each of which emits one token

    def prepare(self, target: Any) -> None:
        """When the model is loaded, and before it is compiled: attach the adapter, and ban the mask token."""
        if self._files is not None:
            self.head = attach(target, self._files, self._watched, self._config)
        else:
            ban_mask_token(target, self.options.mask)

    @property
    def counts(self) -> dict[str, int]:
        """This waits for the device."""
        counts = dict(zip(COUNTED, self.counted.tolist(), strict=True))
        return counts | {name: counts[name] + self.single for name in ("forwards", "tokens")}

    def reset_counts(self) -> None:
        self.counted.zero_()
        self.single = 0


def ban_mask_token(target: Any, mask_token: int) -> None:
    """No text ever contains the mask token: set its logit to minus infinity wherever logits are computed."""
    compute = target.compute_logits

    @wraps(compute)
    def compute_logits(*args: Any, **kwargs: Any) -> Tensor | None:
        logits = compute(*args, **kwargs)
        if logits is not None:  # only some ranks have them
            logits[:, mask_token] = -torch.inf
        return logits

    target.compute_logits = compute_logits


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the sequences of a step were fed."""

    tokens: Tensor  # (tokens,): the windows of all sequences, one after the other; each begins with the last token
    starts: Tensor  # (sequences + 1,): where each window begins, and the end
    slots: Tensor  # (sequences,): where each sequence's dial is in ``kinds``
    kinds: Tensor | None  # (slots,): index of the dial's kind in `KINDS`; None: all dials of the step are exact
    prefilling: Tensor | None
    """(sequences,): is the prompt not prefilled to its end, so that nothing is emitted? None: no sequence's"""
    counts: Tensor  # `COUNTED` so far, to which this step's are added
    mask_token: int
    masks: int  # masks per window of the next step
    width: int  # tokens behind the last one in a full window

    def part(self, chosen: slice) -> StepInputs:
        """Some of the sequences; their windows stay where they are among the tokens."""
        starts = self.starts[chosen.start : chosen.stop + 1]
        prefilling = None if self.prefilling is None else self.prefilling[chosen]
        return replace(self, starts=starts, slots=self.slots[chosen], prefilling=prefilling)


class StepOutputs(NamedTuple):
    """What came of a step, and what the next one is fed; an entry per sequence."""

    sampled: Tensor  # (sequences, width + 1): the tokens that are emitted, then -1
    emitted: Tensor  # (sequences,): how many these are
    rejected: Tensor  # (sequences,): how many of the tokens that were fed are not part of the text
    windows: Tensor  # (sequences, width): what is fed behind the newest token: drafts, then masks


class GreedyChoices(NamedTuple):
    """What the step of greedy sequences needs of the logits, an entry per token that was fed."""

    argmax: Tensor
    tolerated: Tensor | None = None
    """Is the token fed behind this one a draft that ``relaxed`` accepts? None: no sequence has that dial"""
    confident: Tensor | None = None
    """Is the prediction here confident enough for ``threshold``? None: no sequence has that dial"""
    drafted: Tensor | None = None
    """(masks, sequences): what the masks predict with a Markov head; ``confident`` has the same shape then"""

    @classmethod
    def of(cls, tokens: Tensor, logits: Tensor, dials: DialTensors | None) -> GreedyChoices:
        """``dials`` has an entry per token; None: all are exact."""
        argmax = logits.argmax(dim=-1)
        if dials is None or not (dials.features.relaxes or dials.features.measures):
            return cls(argmax)
        rows, tolerated, confident = logits.float()[:, None], None, None
        if dials.features.relaxes:
            drafts = tokens.long().roll(-1).clamp(0, logits.shape[1] - 1)[:, None]
            tolerated = within_tolerance(rows, rows, drafts, dials.tolerance)[:, 0].view(torch.uint8)
        if dials.features.measures:
            confident = (confidence(rows, dials)[:, 0] >= dials.trust).view(torch.uint8)
        return cls(argmax, tolerated, confident)


def select(dials: DialTensors, index: Tensor | slice) -> DialTensors:
    return replace(dials, tolerance=dials.tolerance[index], trust=dials.trust[index], measure=dials.measure[index])


def step(
    inputs: StepInputs,
    logits: Tensor,
    dials: DialTensors,
    sampling: SamplingTensors,
    positions: Tensor,
    barred: Tensor | None = None,
    head: MarkovHead | None = None,
) -> StepOutputs:
    """A step of any sequences. ``logits`` (tokens, vocabulary) are adjusted by vLLM.

    ``dials``, ``sampling`` and ``positions`` (of the last tokens) have an entry per sequence. ``barred`` (tokens,)
    marks drafts that must not be accepted because a grammar did not validate them. ``head`` adds to the masks' logits.
    """
    sequences, size = len(inputs.slots), max(1, MOST_LOGITS // ((inputs.width + 1) * logits.shape[1]))
    if sequences > size:
        parts = []
        for begin in range(0, sequences, size):
            part = slice(begin, min(begin + size, sequences))
            names = (*SamplingTensors.FLOATS, *SamplingTensors.INTEGERS)
            some = replace(sampling, **{name: getattr(sampling, name)[part] for name in names})
            parts.append(step(inputs.part(part), logits, select(dials, part), some, positions[part], barred, head))
        return StepOutputs(*map(torch.cat, zip(*parts, strict=True)))
    layout = {"mask_token": inputs.mask_token, "width": inputs.width, "masks": inputs.masks}
    windows = read_windows(inputs.tokens, inputs.starts, **layout)
    if barred is not None or dials.features.measures:
        windows = _without_banned(windows, logits, barred)
    kinds = None if inputs.kinds is None else inputs.kinds[inputs.slots.long()]
    emitted = torch.zeros_like(positions, dtype=torch.bool) if kinds is None else kinds == THRESHOLD
    decision = decide(windows, logits, dials, sampling, positions=positions, emitted=emitted, head=head)
    return _outputs(inputs, windows, decision, kinds)


def _without_banned(windows: WindowBatch, logits: Tensor, barred: Tensor | None) -> WindowBatch:
    """Leave out drafts from the first one on that a grammar or a ban excludes: ``threshold`` accepts all others."""
    rows = windows.rows[:, : windows.drafts.shape[1]]
    allowed = logits[rows, windows.drafts] > -torch.inf
    if barred is not None:
        allowed &= ~barred[(rows + 1).clamp(max=len(logits) - 1)]
    return replace(windows, draft_count=torch.minimum(windows.draft_count, leading(allowed)))


def _outputs(inputs: StepInputs, windows: WindowBatch, decision: Decision, kinds: Tensor | None) -> StepOutputs:
    """What vLLM is told of a decision, and the next windows."""
    accepted, column = decision.accepted[:, None], torch.arange(inputs.width + 1, device=inputs.starts.device)
    sampled = torch.where(column < accepted, windows.tokens.roll(-1, 1), decision.token[:, None])
    emitted = decision.accepted + 1
    rejected = inputs.starts.diff().long() - emitted
    drafts = decision.draft_count
    if kinds is not None:
        drafts = torch.where(kinds == THRESHOLD, decision.trusted, torch.where(kinds == ONE_TOKEN, 0, drafts))
    if inputs.prefilling is not None:
        emitted, rejected, drafts = (
            each.masked_fill(inputs.prefilling.bool(), 0) for each in (emitted, rejected, drafts)
        )
    sampled = torch.where(column < emitted[:, None], sampled, -1)
    predicted = torch.nn.functional.pad(decision.drafts, (0, inputs.width - decision.drafts.shape[1]))
    following = torch.where(column[:-1] < drafts[:, None], predicted, inputs.mask_token)

    emits = emitted > 0
    agreed = (decision.agrees & (column[: windows.drafts.shape[1]] < accepted)).sum(1)
    counted = (emits.long(), emitted, *(each * emits for each in (windows.draft_count, decision.accepted, agreed)))
    inputs.counts.add_(torch.stack([each.sum() for each in counted]))
    return StepOutputs(sampled, emitted.int(), rejected.int(), following)


def token_scores(adjusted: Tensor, sampling: Sequence[SamplingParams], lengths: Iterable[int]) -> Tensor:
    """(tokens, vocabulary): what sequences sample from, for windows of such ``lengths``."""
    params = [each for each, length in zip(sampling, lengths, strict=True) for _ in range(length)]
    tensors = SamplingTensors.of(params, adjusted.shape[1], device=adjusted.device)
    return tensors.scores(adjusted.float()[:, None])[:, 0]
