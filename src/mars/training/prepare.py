"""The packed rows of a recipe: its sources are read, tokenised, split into training and held-out chats, and packed."""

import json
import multiprocessing
import os
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.pool import AsyncResult, Pool

from rich.console import Console
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from mars.errors import MarsError
from mars.method.streams import Pack
from mars.training.chats import Document, encode_chat
from mars.training.files import write_whole
from mars.training.packing import load_pack, pack, save_pack
from mars.training.recipe import Data, Recipe
from mars.training.rows import Row, read_rows, warn

REPORTED = 5  # bad rows shown on the way; all of them are in ``data/bad_rows.txt``
CHUNK = 64  # rows that a process gets at once
CHUNKS_AHEAD = 4  # chunks per process that are read before their results are taken


@dataclass(frozen=True, slots=True)
class Prepared:
    train: Pack
    held_out: Pack
    report: str


def check_owner(recipe: Recipe) -> None:
    """Raise if the output folder belongs to another recipe."""
    stored = recipe.output / "recipe.json"
    if stored.exists() and json.loads(stored.read_text()) != recipe.model_dump(mode="json"):
        raise MarsError(f"{recipe.output} belongs to another recipe ({stored}): choose another output or remove it")


def prepare(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Prepared:
    """The packed rows of a recipe; kept in its output folder, so that a resumed run uses the same.

    The folder belongs to the recipe once its data were read: until then, it can be corrected.
    """
    folder = recipe.output / "data"
    paths = folder / "train.safetensors", folder / "held_out.safetensors"
    if not all(path.exists() for path in paths):
        bad_rows: list[str] = []
        rest, kept, report = _split(recipe, tokenizer, bad_rows)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(recipe.output / "recipe.json", recipe.model_dump_json(indent=2))
        (folder / "bad_rows.txt").write_text("\n".join(bad_rows))
        (folder / "report.txt").write_text(report)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
        for some, path in zip((rest, kept), paths, strict=True):
            save_pack(pack(some, recipe.data.length, pad, together=recipe.data.packing), path)
    train, held_out = map(load_pack, paths)
    return Prepared(train, held_out, (folder / "report.txt").read_text())


def _split(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, bad_rows: list[str]
) -> tuple[list[Document], list[Document], str]:
    """Chats to train on, chats to evaluate on, and a report. Chats with the same prompt are not separated."""
    data = recipe.data
    documents, report = _documents(data, data.train, tokenizer, bad_rows)
    random.Random(recipe.seed).shuffle(documents)
    if isinstance(data.held_out, list):
        kept, of_kept = _documents(data, data.held_out, tokenizer, bad_rows)
        report += f"; held out: {of_kept}"
    else:
        chosen = {_prompt(each) for each in documents[: data.held_out]}
        kept = [each for each in documents if _prompt(each) in chosen]
        documents = [each for each in documents if _prompt(each) not in chosen]
        report += f"; {len(kept)} are held out"
    if not documents:
        raise MarsError(f"there is no chat to train on: {report}")
    return documents, kept, report


def _prompt(document: Document) -> tuple[int, ...]:
    """The tokens before the first answer."""
    return tuple(document.tokens[: list(document.assistant).index(True)])


def _documents(
    data: Data, sources: list[str], tokenizer: PreTrainedTokenizerBase, bad_rows: list[str]
) -> tuple[list[Document], str]:
    """Every usable chat, and a sentence about the others."""
    documents: list[Document] = []
    too_long, before = 0, len(bad_rows)

    def on_bad_row(message: str) -> None:
        if data.bad_rows == "stop":
            raise MarsError(message)
        bad_rows.append(message)
        if len(bad_rows) - before <= REPORTED:
            warn(f"skipped {message}")

    rows = chain.from_iterable(read_rows(source, on_bad_row=on_bad_row) for source in sources)
    for document in encoded(rows, tokenizer, on_bad_row):
        is_long = len(document.tokens) > data.length
        too_long += is_long
        kept = Document(document.tokens[: data.length], document.assistant[: data.length])
        if not is_long or (data.long_rows == "cut" and any(kept.assistant)):
            documents.append(kept)
    fate = "dropped" if data.long_rows == "drop" else "cut"
    long = f"{too_long} longer than {data.length} tokens ({fate})"
    return documents, f"{len(documents)} chats, {long}, {len(bad_rows) - before} bad rows skipped"


def encoded(
    rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, on_bad_row: Callable[[str], None]
) -> Iterator[Document]:
    """Chats as tokens, in order, tokenised by one process per core. Rows are read as results are taken."""
    console, processes = Console(stderr=True), os.cpu_count() or 1
    with multiprocessing.Pool(processes, _Worker.start, (tokenizer,)) as pool:
        results = _in_order(pool, rows, CHUNKS_AHEAD * processes)
        for result in track(results, "reading chats", console=console, disable=not console.is_terminal):
            if isinstance(result, Document):
                yield result
            else:
                on_bad_row(result)


def _in_order(pool: Pool, rows: Iterable[Row], most_chunks: int) -> Iterator[Document | str]:
    """The workers' results, with at most so many chunks in work or waiting; ``imap`` would queue all rows."""
    source, pending = iter(rows), deque[AsyncResult[list[Document | str]]]()
    while chunk := list(islice(source, CHUNK)):
        pending.append(pool.apply_async(_Worker.encode_all, (chunk,)))
        if len(pending) >= most_chunks:
            yield from pending.popleft().get()
    for result in pending:
        yield from result.get()


class _Worker:
    """A worker process, which has the tokenizer and gets chunk after chunk."""

    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def start(cls, tokenizer: PreTrainedTokenizerBase) -> None:
        cls.tokenizer = tokenizer

    @classmethod
    def encode_all(cls, rows: list[Row]) -> list[Document | str]:
        return [cls.encode(row) for row in rows]

    @classmethod
    def encode(cls, row: Row) -> Document | str:
        """A row's document, or a message why there is none."""
        try:
            document = encode_chat(cls.tokenizer, row.messages, ended=row.ended)
            return Document(array("i", document.tokens), array("b", document.assistant))  # lists are ten times as big
        except MarsError as error:
            return f"{row.where}: {error}"
