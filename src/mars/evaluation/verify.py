"""``mars verify``: is the text that of one-token alone, whatever the dial, the window and the load?"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import Progress

from mars.api import Model
from mars.core.output import RequestOutput
from mars.core.request import Request
from mars.errors import MarsError
from mars.evaluation.plan import split_dial
from mars.evaluation.provenance import collect
from mars.evaluation.tables import Lines
from mars.method.acceptance import TOP_LOGPROBS, Dial
from mars.models import Checkpoint
from mars.models.prompts import Prompt

SHOWN = 3  # differences that are printed
ALONE = "one-token"


class Difference(NamedTuple):
    """Where an answer first leaves that of one-token alone."""

    prompt: int
    position: int
    expected: str  # the token that one-token alone wrote; empty if its answer ended here
    found: str
    logprobs: tuple[float | None, float | None]  # of both tokens, by one-token alone; None below its likeliest


@dataclass(frozen=True, slots=True)
class Check:
    """A dial at a number of requests at once, compared with one-token alone."""

    dial: str  # with its window, if one was asked for
    requests: int
    answers: int
    tokens_per_forward: float
    is_promised: bool
    differences: Sequence[Difference]

    @property
    def identical(self) -> int:
        return self.answers - len(self.differences)

    @property
    def is_broken(self) -> bool:
        return self.is_promised and bool(self.differences)


def verify(
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt],
    dials: Sequence[str],
    rows: Sequence[int],
    bar: Progress,
    *,
    batch_invariant: bool = False,
    **options: Any,
) -> list[Check]:
    """Answer every prompt with one-token, one request at a time; then with every dial, so many requests at once.

    ``options`` are those of `Model.request`. A seed is that of the first prompt; the next have the numbers that follow.
    """
    seed = options.pop("seed", None)
    seeds = [None if seed is None else seed + number for number in range(len(prompts))]
    alone = Model(checkpoint, max_num_seqs=1, batch_invariant=batch_invariant)

    def requests(model: Model, dial: str) -> list[Request]:
        name, window = split_dial(dial)
        given = zip(prompts, seeds, strict=True)
        return [model.request(each, dial=name, window=window, seed=own, **options) for each, own in given]

    task = bar.add_task(f"{ALONE}, 1 at a time", total=len(prompts) * (1 + len(dials) * len(rows)))
    asked = requests(alone, ALONE)
    expected = [answer for each in asked for _, answer in _advance(bar, task, alone.run([each]))]
    checks = []
    for size in rows:
        model = Model(checkpoint, max_num_seqs=size, batch_invariant=batch_invariant)
        for dial in dials:
            bar.update(task, description=f"{dial}, {size} at a time")
            answers = _in_any_order(requests(model, dial), lambda some, by=model: _advance(bar, task, by.run(some)))
            differences = [
                _difference(alone, number, asked[number], one, other)
                for number, (one, other) in enumerate(zip(expected, answers, strict=True))
                if one.token_ids != other.token_ids
            ]
            tokens, forwards = (sum(getattr(each, name) for each in answers) for name in ("num_tokens", "forwards"))
            promised = promises_same_text(model, Dial.parse(split_dial(dial)[0]))
            checks.append(Check(dial, size, len(answers), tokens / forwards, promised, differences))
    return checks


def promises_same_text(model: Model, dial: Dial) -> bool:
    """Is the text that of one-token alone? See docs/concepts.md, "What is guaranteed"."""
    is_lossless = dial.kind in (ALONE, "exact")
    return is_lossless and (model.engine().is_batch_invariant or model.checkpoint.module.dtype is torch.float32)


def _in_any_order(requests: Sequence[Request], run: Any) -> list[RequestOutput]:
    """Run the requests in a random order, so that neighbours in the file are not always neighbours in a step."""
    order = random.Random(0).sample(range(len(requests)), len(requests))
    answers = dict(run([requests[number] for number in order]))
    return [answers[order.index(number)] for number in range(len(requests))]


def _advance(bar: Progress, task: Any, answers: Iterable[Any]) -> Iterable[Any]:
    for each in answers:
        bar.advance(task)
        yield each


def _difference(alone: Model, number: int, asked: Request, one: RequestOutput, other: RequestOutput) -> Difference:
    """The first token that differs, and what one-token alone thinks of both."""
    both = list(zip(one.token_ids, other.token_ids, strict=False))
    position = next((at for at, (mine, theirs) in enumerate(both) if mine != theirs), len(both))
    candidates = [tokens[position : position + 1] for tokens in (one.token_ids, other.token_ids)]
    prompt = [*asked.prompt, *one.token_ids[:position]]
    (answer,) = (each for _, each in alone.run([Request(prompt, max_new_tokens=1, logprobs=TOP_LOGPROBS)]))
    likeliest = dict(answer.logprobs[0].top)
    expected, found = (likeliest.get(each[0]) if each else None for each in candidates)
    words = [alone.checkpoint.tokenizer.decode(each) for each in candidates]
    return Difference(number, position, words[0], words[1], (expected, found))


def save(checks: Sequence[Check], out: Path) -> None:
    """Write all checks and where they come from as JSON."""
    found = [asdict(each) | {"identical": each.identical} for each in checks]
    try:
        out.write_text(json.dumps({"checks": found, "provenance": collect()}, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise MarsError(f"{out} cannot be written: {error.strerror}") from None


def table(checks: Sequence[Check]) -> Lines:
    head = ["dial", "requests at once", "same text", "tokens per forward", "promised"]
    return [
        head,
        *(
            [
                each.dial,
                str(each.requests),
                f"{each.identical} of {each.answers}",
                f"{each.tokens_per_forward:.2f}",
                "yes" if each.is_promised else "no",
            ]
            for each in checks
        ),
    ]


def sentences(checks: Sequence[Check]) -> list[str]:
    """The first differences, then whether what is promised holds."""
    said = []
    for check in checks:
        for each in check.differences[:SHOWN]:
            one, other = (
                f"{word!r} (log-probability {'below the likeliest' if value is None else f'{value:.4f}'})"
                for word, value in zip((each.expected, each.found), each.logprobs, strict=True)
            )
            at = f"{check.dial}, {check.requests} at once, prompt {each.prompt + 1}, token {each.position + 1}"
            said.append(f"{at}: {other}, where one-token alone has {one}")
    promised = [each for each in checks if each.is_promised]
    broken = [each for each in promised if each.is_broken]
    if broken:
        said.append(f"What is promised does not hold: {len(broken)} of {len(promised)} checks have other texts.")
    elif promised:
        said.append(f"What is promised holds: the same text in all {sum(each.answers for each in promised)} answers.")
    if len(promised) < len(checks):
        said.append("Where the same text is not promised, differences are no error: see docs/concepts.md.")
    return said
