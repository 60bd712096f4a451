"""What the greedy decoders of this package share."""

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from mars.core.output import OutputProcessor
from mars.core.request import Request
from mars.core.sequence import Sequence
from mars.errors import MarsError
from mars.method.acceptance import Dial, DialTensors, confidence, leading
from mars.method.sampling import SamplingParams
from mars.method.windows import Window
from mars.models.checkpoint import Checkpoint
from mars.reference.cache import Cache, forward_windows, prefill, windows_of


def greedy_sequence(checkpoint: Checkpoint, request: Request) -> Sequence:
    if request.sampling != SamplingParams(seed=request.sampling.seed):
        raise MarsError("the baselines are greedy: temperature, penalties and logit_bias must be off")
    sequence = Sequence.of(request, checkpoint)
    OutputProcessor(sequence.output, checkpoint.tokenizer, sequence.end_tokens, request.stop)
    return sequence


def emit(sequence: Sequence, tokens: list[int], agrees: list[bool]) -> int:
    """Put tokens out, cut at stop strings, too; returns how many were taken."""
    before = sequence.output.num_tokens
    sequence.emit(tokens, agrees)
    if sequence.output.processor is not None:
        sequence.output.processor.update()
    return sequence.output.num_tokens - before


def mask_token(checkpoint: Checkpoint) -> int:
    if checkpoint.mask_token_id is None:
        raise MarsError(f"{checkpoint.name} has no MARS settings: this baseline needs a mask token")
    return checkpoint.mask_token_id


def without_mask(checkpoint: Checkpoint, logits: Tensor) -> Tensor:
    """Logits in float32 with the mask token ruled out."""
    logits = logits.float()
    if checkpoint.banned_token is not None:
        logits = logits.clone()
        logits[..., checkpoint.banned_token] = -torch.inf
    return logits


def with_head(checkpoint: Checkpoint, logits: Tensor) -> Tensor:
    """Logits (block, vocabulary) of the AR token and of masks, the masks' given the greedy tokens before them."""
    rows = [logits[0]]
    for row in logits[1:]:
        rows.append(row if checkpoint.head is None else row + checkpoint.head(rows[-1].argmax()).float())
    return torch.stack(rows)


def predicted(checkpoint: Checkpoint, logits: Tensor, dial: Dial) -> list[int]:
    """The paper's rule on logits (block, vocabulary): the AR token, then masks from the left while confident."""
    logits = with_head(checkpoint, logits)
    confident = confidence(logits[None, 1:], DialTensors.of([dial], logits.device)) >= dial.trust
    count = 1 + int(leading(confident))
    return [int(token) for token in logits[:count].argmax(1)]


class ThresholdText:
    """A sequence under the paper's rule. Its tokens may go on past its end, where a block has to be filled."""

    def __init__(self, checkpoint: Checkpoint, sequence: Sequence) -> None:
        self.checkpoint = checkpoint
        self.sequence = sequence
        self.tokens = sequence.tokens
        self.trusted = 0  # tokens at the end of the text that masks predicted and nothing has verified

    def read(self, logits: Tensor) -> None:
        """Verify the trusted tokens, then emit further ones, from logits that begin at the last verified token.

        Without logits beyond the text nothing is emitted.
        """
        logits = without_mask(self.checkpoint, logits)
        ar_choice = logits[: self.trusted].argmax(1).tolist()
        unverified = self.tokens[len(self.tokens) - self.trusted :]
        agrees = [mine == ar for mine, ar in zip(unverified, ar_choice, strict=True)]
        new = logits[self.trusted :]
        tokens = predicted(self.checkpoint, new, self.sequence.dial) if len(new) else []
        if self.sequence.is_finished:
            self.sequence.output.add([], [])  # the forward was paid for
        else:
            emit(self.sequence, tokens, [*agrees, *[True] * len(tokens[:1])])
        self.trusted = len(tokens[1:])
        self.tokens += tokens


class Text:
    """One text with a cache of its own."""

    def __init__(self, checkpoint: Checkpoint, capacity: int) -> None:
        self.checkpoint = checkpoint
        self.cache = Cache(1, capacity)
        self.cursor = 0  # how many tokens are cached; the caller moves it over the drafts that it accepts

    def feed(self, tokens: list[int], drafts: SequenceOf[int] = (), *, groups: int = 1, masks: int = 0) -> Tensor:
        """Cache the text, and feed a window behind it; returns the window's logits (width, vocabulary)."""
        prefill(self.checkpoint, self.cache, {0: tokens[:-1]}, {0: self.cursor})
        self.cursor = len(tokens) - 1
        row = torch.zeros(1, dtype=torch.long, device=self.checkpoint.device)
        window = Window(len(drafts), groups if masks else 0, masks)
        windows = windows_of(self.checkpoint, window, [(tokens[-1], list(drafts))], emitted=[False], groups=[groups])
        logits = forward_windows(self.checkpoint, self.cache, row, row + self.cursor, windows)
        return without_mask(self.checkpoint, logits)
