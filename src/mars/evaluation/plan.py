"""The options of ``mars bench``, and checks of options that ``mars eval`` shares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from mars.errors import MarsError
from mars.evaluation.peers import check_peer
from mars.evaluation.vllm import import_vllm
from mars.method.acceptance import Dial
from mars.method.windows import parse_window
from mars.models import Checkpoint
from mars.models.loading import is_put_together
from mars.models.prompts import Prompt
from mars.training.rows import read_rows, to_prompt, warn

PROMPTS: tuple[Prompt, ...] = (
    "Why is the sky blue?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Tom has 3 boxes with 12 apples each. He eats 5 apples. How many are left?",
    "List the planets of the solar system in order from the sun.",
    "Summarise the plot of Romeo and Juliet in three sentences.",
    "Translate into French: The weather is nice today, let us go for a walk.",
    "Give five tips for sleeping well.",
    "What is the difference between a virus and a bacterium?",
    "Write a short poem about the sea in autumn.",
    "Explain to a child how a rainbow comes about.",
    "Write an SQL query that finds the ten customers with the largest orders.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey?",
    "Write a polite email that moves a meeting from Monday to Thursday.",
    "What were the main causes of the First World War?",
    "Give a recipe for pancakes with a list of ingredients.",
    "Compare electric cars and petrol cars in a table with four rows.",
)

Engine = Literal["mars", "vllm"]  # ours, or vLLM with the plugin


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    model: str
    adapter: str | None
    dials: Sequence[str]  # one-token is the first; a window may follow after a space: ``exact tree``
    batch_sizes: Sequence[int]
    peers: Sequence[str]
    prompts: Path | None
    max_new_tokens: int
    dtype: str | None
    min_requests: int
    engine: Engine  # the engine whose dials are measured
    out: Path
    questions: Mapping[str | None, Sequence[Prompt]]
    """The prompts by category if each is measured by itself, else all under None"""

    def options(self) -> dict[str, object]:
        """All options as JSON values."""
        options = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "questions"}
        return {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}

    def encode(self, checkpoint: Checkpoint) -> dict[str | None, list[list[int]]]:
        """The prompts' tokens, without prompts that leave too little room for an answer."""
        context = checkpoint.context
        fitting: dict[str | None, list[list[int]]] = {}
        for category, questions in self.questions.items():
            encoded = [checkpoint.encode(each) for each in questions]
            fitting[category] = [
                each for each in encoded if context is None or len(each) + self.max_new_tokens <= context
            ]
            if not fitting[category]:
                which = f"prompt of {category}" if category else "prompt"
                raise MarsError(
                    f"no {which} leaves room for {self.max_new_tokens} new tokens: "
                    f"{checkpoint.name} holds {context} in all"
                )
        return fitting


def make_plan(*, dials: str, batch_sizes: str, peers: str | None, by_category: bool, **options: Any) -> Plan:
    """Read and check the options, of which lists have commas between their items. Makes the folder of ``out``."""
    check_counts({"--max-new-tokens": options["max_new_tokens"], "--min-requests": options["min_requests"]})
    wanted = list_of("--dials", dials)
    sizes = sizes_of("--batch-sizes", batch_sizes)
    others = [] if peers is None else list_of("--peers", peers)
    check_dials(options["engine"], wanted)
    for peer in others:
        check_peer(peer)
    out = options["out"]
    if out.suffix != ".json" or out.is_dir():
        raise MarsError(f"--out must name a .json file, not {out}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MarsError(f"the folder {out.parent} cannot be made: {error.strerror}") from None
    return Plan(
        dials=list(dict.fromkeys(["one-token", *wanted])),
        batch_sizes=sizes,
        peers=others,
        questions=_questions(options["prompts"], by_category),
        **options,
    )


def _questions(path: Path | None, by_category: bool) -> dict[str | None, Sequence[Prompt]]:
    if not by_category:
        return {None: PROMPTS if path is None else read_prompts(path)}
    if path is None:
        raise MarsError("--by-category needs --prompts, a file whose rows have a category")
    apart: dict[str | None, list[Prompt]] = {}
    for category, prompt in _read(path):
        if category is None:
            raise MarsError(f"--by-category: not every row of {path} has a category")
        apart.setdefault(category, []).append(prompt)
    return {**apart}


def source_of(model: str, adapter: str | None, checkpoint: Checkpoint) -> str | None:
    """The folder or hub id with the very same weights; None if they were put together when the model was loaded."""
    return None if is_put_together(model, adapter) else checkpoint.name


def check_counts(counts: Mapping[str, int | None]) -> None:
    """Raise at the first flag that is given and below 1."""
    for flag, number in counts.items():
        if number is not None and number < 1:
            raise MarsError(f"{flag} must be at least 1, not {number}")


def check_dials(engine: Engine, dials: Sequence[str]) -> None:
    """Raise if the engine is not installed, or if a dial or its window is not known to it."""
    if engine == "vllm":
        import_vllm()
    for dial, window in map(split_dial, dials):
        if window and engine == "vllm":
            raise MarsError(f"{dial} {window}: the engine vllm has a chain for every dial, leave the window out")


def split_dial(text: str) -> tuple[str, str | None]:
    """A dial and its window: ``exact tree``; None: the engine chooses the window."""
    dial, _, window = text.partition(" ")
    Dial.parse(dial)
    if window:
        parse_window(window, 1)
    return dial, window or None


def read_prompts(path: Path) -> list[Prompt]:
    """The openings of a file's chats; a single question as text, so that models without a chat template take it."""
    return [prompt for _, prompt in _read(path)]


def _read(path: Path) -> list[tuple[str | None, Prompt]]:
    """Category and prompt of every row."""
    bad: list[str] = []
    rows = list(read_rows(path, on_bad_row=bad.append, convert=to_prompt))
    if not rows:
        raise MarsError(f"{path} has no usable row" + (f": {bad[0]}" if bad else ""))
    if bad:
        warn(f"skipped {len(bad)} rows, the first: {bad[0]}")
    return [(row.category, row.messages[0]["content"] if len(row.messages) == 1 else row.messages) for row in rows]


def sizes_of(option: str, text: str) -> list[int]:
    """Numbers of requests between the commas, the smallest first."""
    sizes = list_of(option, text)
    if wrong := [size for size in sizes if not size.isdecimal() or int(size) < 1]:
        raise MarsError(f"{option} must be whole numbers of 1 or more, not {wrong[0]!r}")
    return sorted({int(size) for size in sizes})


def list_of(option: str, text: str) -> list[str]:
    """The items between the commas, each once."""
    items = list(dict.fromkeys(" ".join(item.split()) for item in text.split(",") if item.strip()))
    if not items:
        raise MarsError(f"{option} is empty: give at least one, with commas between them")
    return items
