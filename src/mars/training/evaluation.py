"""Evaluation on held-out chats: clean loss, accuracy of the masks, and the tokens per forward ``exact`` would have."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mars.method.streams import IGNORED, Pack, lay_out, next_tokens
from mars.method.visibility import PADDING
from mars.training.objective import Batch, batch_tensors
from mars.training.packing import take

Predict = Callable[[Batch], dict[str, Tensor]]


@dataclass(slots=True)
class Evaluation:
    block_size: int
    tokens: int = 0  # answer tokens
    loss: float = 0.0  # of the clean stream, summed over these
    guessed: Tensor = field(init=False)
    """By offset: how many masks there were, and how many of them predicted the clean stream's argmax"""
    answers: list[list[int]] = field(default_factory=list)
    """For each position of each answer: how many masks behind it are right before the first wrong one"""

    def __post_init__(self) -> None:
        self.guessed = torch.zeros(2, self.block_size - 1, dtype=torch.long)

    @property
    def clean_loss(self) -> float:
        return self.loss / max(1, self.tokens)

    @property
    def mask_accuracy(self) -> list[float]:
        asked, right = self.guessed.tolist()
        return [hits / max(1, total) for total, hits in zip(asked, right, strict=True)]

    def tokens_per_forward(self, *, tree: bool = False) -> float:
        counts = [replay(each, self.block_size, tree=tree) for each in self.answers]
        return sum(tokens for tokens, _ in counts) / max(1, sum(forwards for _, forwards in counts))

    def metrics(self) -> dict[str, float]:
        accuracy = {f"mask_accuracy_{offset}": each for offset, each in enumerate(self.mask_accuracy, 2)}
        speed = {
            f"tokens_per_forward_{name}": self.tokens_per_forward(tree=name == "tree") for name in ("chain", "tree")
        }
        return {"clean_loss": self.clean_loss, **accuracy, **speed}


@torch.no_grad()
def evaluate(predict: Predict, pack: Pack, *, block_size: int, mask_token: int, rows: int, width: int) -> Evaluation:
    """Put masks behind every position of every answer, in several forwards with at most ``width`` masks per row."""
    found = Evaluation(block_size)
    for start in range(0, len(pack.tokens), rows):
        _evaluate_rows(found, predict, take(pack, range(start, min(start + rows, len(pack.tokens)))), mask_token, width)
    return found


def _evaluate_rows(found: Evaluation, predict: Predict, pack: Pack, mask_token: int, width: int) -> None:
    masks, labels = found.block_size - 1, next_tokens(pack)
    asked = labels != IGNORED
    choices = torch.full_like(labels, PADDING)
    guesses = torch.full((*labels.shape, masks), IGNORED)
    for turn, anchors in enumerate(_slices(asked, max(1, width // masks))):
        streams = lay_out(pack, anchors, masks, mask_token, max(width, masks))
        batch = batch_tensors(streams, labels.shape[1]) | {"mask_token": mask_token}
        out = {name: each.cpu() for name, each in predict(batch).items()}
        (rows, columns), count = _where(batch, "clean")
        choices[rows, columns] = out["clean"][:count]
        found.loss += float(out["clean_loss"][:count].sum()) * (turn == 0)
        (rows, columns), count = _where(batch, "masks")
        at = streams.visibility.reach[rows, columns], streams.offsets[rows, columns] - 1
        guesses[rows, *at] = out["masks"][:count]
    shifted = torch.nn.functional.pad(choices, (0, masks), value=PADDING)
    truth = torch.stack([shifted[:, offset : offset + labels.shape[1]] for offset in range(1, masks + 1)], 2)
    right = guesses == truth
    found.tokens += int(asked.sum())
    found.guessed += torch.stack([(guesses != IGNORED).sum((0, 1)), right.sum((0, 1))])
    found.answers += _answers(asked, right.long().cumprod(2).sum(2))


def _where(batch: Batch, stream: str) -> tuple[tuple[Tensor, Tensor], int]:
    """Rows and columns of a stream's predictions, and how many there are without the padding."""
    count = int((batch[f"{stream}_weights"] > 0).sum())
    at = batch[f"{stream}_at"][:count]
    width = batch["input_ids"].shape[1]
    return (at // width, at % width), count


def _answers(asked: Tensor, correct: Tensor) -> list[list[int]]:
    """The counts of every uninterrupted answer."""
    answers: list[list[int]] = []
    for flags, numbers in zip(asked.tolist(), correct.tolist(), strict=True):
        for here, (flag, number) in enumerate(zip(flags, numbers, strict=True)):
            if flag and (here == 0 or not flags[here - 1]):
                answers.append([])
            if flag:
                answers[-1].append(number)
    return answers


def _slices(asked: Tensor, groups: int) -> Iterator[Tensor]:
    """All positions to predict from, in every row, ``groups`` at a time."""
    length = asked.shape[1]
    positions = torch.where(asked, torch.arange(length), length).sort(1).values
    positions = torch.where(positions == length, PADDING, positions)
    for start in range(0, max(1, int(asked.sum(1).max())), groups):
        chosen = positions[:, start : start + groups]
        yield torch.nn.functional.pad(chosen, (0, groups - chosen.shape[1]), value=PADDING)


def replay(correct: Sequence[int], block_size: int, *, tree: bool = False) -> tuple[int, int]:
    """The tokens of one answer, and the forwards ``exact`` would need for it, computed without decoding.

    ``correct[a]`` is the number of right masks behind position ``a``, up to the first wrong one. Position 0 is the last
    token of the prompt, so an answer of ``n`` tokens has ``n`` positions.
    """
    written, forwards, start = 0, 0, None
    while written < len(correct):
        forwards += 1
        if start is None:  # no drafts yet: the next token, and drafts for those after it
            start, written = written, written + 1
            continue
        accepted = min(correct[start], block_size - 1, len(correct) - written)
        all_passed = accepted == block_size - 1
        # The window's masks follow its last draft; in a tree, there are masks behind every draft
        start = written + accepted if tree or all_passed else None
        written += accepted + 1
    return len(correct), forwards
