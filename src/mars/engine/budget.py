"""Windows of different lengths in one step: what each sequence feeds, within a number of tokens for all of them.

A draft is worth the chance that it is accepted, which the probability that its mask gave it tells; masks are worth the
drafts that they promise. What is worth most is fed. On a GPU the host is a step behind, so it knows neither the drafts
nor their probabilities in time: it chooses the number of tokens, from what steps of such a number brought, and the
device finds the price of a token at which that many are worth feeding.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch
from torch import Tensor

from mars.core.sequence import Sequence
from mars.engine.policy import (
    BINS,
    HOPE,
    LEARNING,
    PROMISE,
    Calibration,
    Cost,
    WindowPolicy,
    takes_any_window,
    tokens_per_forward,
)
from mars.engine.step import PADDING_SLOT
from mars.method.acceptance import Decision
from mars.method.windows import Window

PRICES = (*(0.02 * 1.25**each for each in range(17)), 1.0)  # of a token, in tokens; nothing is worth the last one
FEWEST = 16  # sequences: for fewer, windows that are alike cost little
SHARES = (1.25, 1.5, 1.8, 2.2, 2.7, 3.4, 4.4)  # tokens of a step, by sequence
USUAL = (0.1, 0.21, 0.33, 0.46, 0.58, 0.72, 0.82)  # drafts accepted in such a step, until some steps had it
ROUND = 8  # tokens of a step are a multiple of it
UNKNOWN = 0.7  # the probability of a draft of which nothing is known
FORGETTING = 0.02  # weight of hope in a step without masks: text changes, and they are tried again some day
SETTLES = 3  # steps of another size after which the drafts at hand were predicted in such steps
CURRENT = 0.1  # weight of the newest step in what steps of its size bring
TRIAL = 8  # steps of a size next to the best one, to see what it brings now
TRIAL_EVERY = 256  # steps after which that is seen anew
WORTH_TRYING = 0.9  # of the best one's speed must be expected of it
MARGIN = 1.03  # ragged windows must promise so much more than others: what they bring is not known better
TELL_EVERY = 64  # steps after which the device is told how often drafts are accepted


def budgets(num_seqs: int) -> list[int]:
    """Numbers of tokens that steps of so many sequences may have."""
    if num_seqs < FEWEST:
        return []
    return [-(-int(num_seqs * share) // ROUND) * ROUND for share in SHARES]


def ragged_windows(num_seqs: int, block_size: int) -> list[Window]:
    """Windows of which so many sequences feed parts."""
    if block_size < 2:
        return []
    return [Window(block_size - 1, 2, block_size - 1, budget=each) for each in budgets(num_seqs)]


class Allotment(NamedTuple):
    """What each sequence of a step feeds."""

    drafts: Tensor  # (sequences,)
    groups: Tensor  # (sequences,)
    masks: Tensor  # (sequences,): in each group


class DraftValues:
    """What the device knows of the drafts of all slots, and of those to come."""

    def __init__(self, slots: int, drafts: int, device: torch.device) -> None:
        """``drafts``: most of a sequence, which are as many as masks."""
        self.probability = torch.full((slots + 1, drafts), UNKNOWN, device=device)  # that masks gave the drafts at hand
        self._usual = HOPE ** torch.arange(1, drafts + 1, device=device)
        self.hope = self._usual.repeat(slots + 1, 1)
        """For each offset of the next drafts, the chance that it and all before it are accepted"""
        self.calibration = (torch.arange(BINS, device=device) + 0.5) / BINS
        """How often drafts are accepted, by probability"""
        self._prices = torch.tensor(PRICES, device=device)[:, None]

    def begin(self, slots: Tensor) -> None:
        self.probability[slots], self.hope[slots] = UNKNOWN, self._usual

    def survival(self, probability: Tensor) -> Tensor:
        """(sequences, drafts): the chance that a draft and all before it are accepted."""
        chances = self.calibration[(probability * BINS).long().clamp(max=BINS - 1)]
        return chances.cumprod(1)

    def allot(self, budget: int, slots: Tensor, draft_count: Tensor, most_masks: Tensor) -> Allotment:
        """``draft_count`` (sequences,): drafts at hand; ``most_masks`` (sequences,): in a group."""
        survival, hope = self.survival(self.probability[slots]), self.hope[slots]
        steps = torch.arange(survival.shape[1], device=slots.device)
        survival = torch.where(steps < draft_count[:, None], survival, 0.0)
        real = slots != PADDING_SLOT
        price = self._prices[:, :, None]
        feeds = (survival > price) & real[:, None]
        drafts = feeds.sum(2)  # (prices, sequences)

        chances = torch.cat([torch.ones_like(survival[:, :1]), survival], 1).expand(len(price), -1, -1)
        accepted = chances.gather(2, drafts[:, :, None])  # that all drafts fed are
        worth = PROMISE * (hope - price).clamp(min=0)
        promises = (accepted * worth > price) & real[:, None] & (steps < most_masks[:, None])
        masks = promises.sum(2)
        early = (drafts > 0) & ((1 - survival[:, :1]) * worth[:, :, :1] > price)[:, :, 0]
        groups = 1 + early.long()

        tokens, room = drafts + groups * masks, budget - len(slots)
        level = (tokens.sum(1) <= room).int().argmax().view(1)  # the lowest price at which all is fed that is worth it
        here, lower = (tokens.index_select(0, each)[0] for each in (level, (level - 1).clamp(min=0)))
        more = (lower - here).clamp(min=0)
        fits = more.cumsum(0) <= room - here.sum()  # some sequences feed what is worth the next lower price
        levels = torch.where(fits, (level - 1).clamp(min=0), level)[None]
        return Allotment(*(each.gather(0, levels)[0] for each in (drafts, groups, masks)))

    def advance(self, slots: Tensor, decision: Decision) -> None:
        """Take note of new drafts."""
        masks = decision.drafts.shape[1]
        if decision.log_shares is None:
            self.probability[slots, :masks] = UNKNOWN
            return
        probability = decision.log_shares.exp()
        self.probability[slots, :masks] = probability
        known, usual = self.hope[slots], self._usual
        offset = torch.arange(masks, device=slots.device)
        newer = known[:, :masks] + LEARNING * (self.survival(probability) - known[:, :masks])
        hope = known + FORGETTING * (usual - known) * (decision.draft_count == 0)[:, None]
        hope[:, :masks] = torch.where(offset < decision.draft_count[:, None], newer, hope[:, :masks])
        self.hope[slots] = hope


class BudgetPolicy(WindowPolicy):
    """Chooses between windows that are alike and ragged ones, and for these the number of tokens.

    What a number of tokens brings shows only after some steps of it, since the masks of one step are the drafts of the
    next. So the best number is looked for among those known, and its neighbours are tried now and then.
    """

    def __init__(
        self,
        block_size: int,
        default_groups: int,
        cost: Cost,
        values: DraftValues,
        padded: Callable[[int], int],
        candidates: int = 0,
        *,
        checks: bool = False,
    ) -> None:
        """``padded``: sequences of a step, padding included, by number of real ones."""
        super().__init__(block_size, default_groups, cost, candidates=candidates, checks=checks)
        self._block_size = block_size
        self._padded = padded
        self._values = values
        self._calibration = Calibration()
        self._accepted = list(USUAL)  # drafts of a sequence in a step, by share
        self._untried = [0] * len(SHARES)  # steps until a share is tried again, if it is next to the best one
        self._share = 0  # number of the last ragged step's share
        self._steps = 0  # ragged ones of this share without another in between
        self._trial = 0  # steps left of a trial
        self._until_told = TELL_EVERY

    def choose(self, sequences: SequenceOf[Sequence], host_seconds: float = 0.0) -> Window:
        alike = super().choose(sequences, host_seconds)
        count, padded = len(sequences), self._padded(len(sequences))
        needs = any(self._needed(each, takes_any_window(each)) for each in sequences)
        is_probe = not self._until_probe  # of single tokens
        if padded < FEWEST or needs or is_probe or self.check.pause:
            self._steps = 0
            return alike
        self._tell()

        def speed(window: Window, tokens: float) -> float:
            """Tokens per second and sequence."""
            return tokens / max(self._cost(count, window), host_seconds)

        ragged = ragged_windows(padded, self._block_size)
        speeds = [speed(window, 1 + each) for window, each in zip(ragged, self._accepted, strict=True)]
        hit = self.candidate_hits.rates()[alike.candidates]
        if max(speeds) <= MARGIN * speed(alike, tokens_per_forward(alike, self.acceptance.rates(), hit)):
            self._steps = 0
            return alike
        share = self._next_share(speeds)
        self._steps = self._steps + 1 if share == self._share else 0
        self._share = share
        return ragged[share]

    def _next_share(self, speeds: SequenceOf[float]) -> int:
        """The best one, or a neighbour that has not been tried for long."""
        if self._trial:
            self._trial -= 1
            return self._share
        best = max(range(len(speeds)), key=speeds.__getitem__)
        for share in (best - 1, best + 1):
            if 0 <= share < len(speeds) and speeds[share] > WORTH_TRYING * speeds[best]:
                self._untried[share] -= 1
                if self._untried[share] < 0:
                    self._untried[share], self._trial = TRIAL_EVERY, TRIAL - 1
                    return share
        return best

    def observe_ragged(self, num_seqs: int, accepted: int) -> None:
        """How many drafts were accepted in a ragged step of so many sequences."""
        if self._steps >= SETTLES:
            known = self._accepted[self._share]
            self._accepted[self._share] += CURRENT * (accepted / num_seqs - known)

    def _tell(self) -> None:
        """Let the device know from time to time how often drafts are accepted."""
        self._until_told -= 1
        if not self._until_told:
            chances = [self._calibration((each + 0.5) / BINS) for each in range(BINS)]
            self._values.calibration.copy_(torch.tensor(chances), non_blocking=True)
            self._until_told = TELL_EVERY

    def observe_drafts(self, sequence: Sequence, drafts: int, accepted: int) -> None:
        super().observe_drafts(sequence, drafts, accepted)
        for offset, probability in enumerate(sequence.draft_probabilities[: min(drafts, accepted + 1)]):
            self._calibration.observe(probability, offset < accepted)

    def observe_predictions(self, sequence: Sequence, probabilities: list[float]) -> None:
        sequence.draft_probabilities = probabilities
