"""Chats from JSON, JSON Lines and Parquet files, folders of them, and data sets of the Hugging Face hub."""

import gzip
import importlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console

from mars.errors import MarsError, how_to_install

Chat = list[dict[str, str]]
Convert = Callable[[Mapping[str, Any]], Chat]
Found = tuple[str, Any]  # where a row is, and the row itself: a value, or a line of JSON that is not parsed yet

SUFFIXES = (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".ndjson.gz", ".parquet")
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
QUESTIONS = ("instruction", "prompt", "question")
ANSWERS = ("output", "completion", "response", "answer")
FORMATS = f"messages, conversations, or one of {'/'.join(QUESTIONS)} with one of {'/'.join(ANSWERS)}"


@dataclass(frozen=True, slots=True)
class Row:
    where: str
    """``data.jsonl:17``, lines counted from 1; ``data.parquet[17]`` or ``owner/name[17]``, rows counted from 0"""
    messages: Chat
    ended: bool = True  # false (``"ended": false`` in the row): the last answer was cut off, so its end is not learned
    category: str | None = None  # as in Spec-Bench


def to_messages(row: Mapping[str, Any]) -> Chat:
    """The chat in a row, which must have an answer."""
    messages = list(_turns(row))
    if all(message["role"] != "assistant" for message in messages):
        raise MarsError(f"there is no answer: a row must have {FORMATS}")
    return messages


def to_prompt(row: Mapping[str, Any]) -> Chat:
    """What a model is to answer: a whole chat that ends with the user's turn, else its opening.

    The opening is all up to the user's last turn before the first answer.
    """
    turns = row.get("turns")  # Spec-Bench: what the user says, turn by turn
    asked = {"prompt": turns[0]} if isinstance(turns, list) and turns else row
    opening = list(takewhile(lambda message: message["role"] != "assistant", _turns(asked)))
    while opening and opening[-1]["role"] != "user":
        opening.pop()
    if not opening:
        raise MarsError("there is no user turn before the first answer")
    with suppress(MarsError):  # turns behind the opening may be of kinds that we do not know
        whole = list(_turns(asked))
        return whole if whole[-1]["role"] == "user" else opening
    return opening


def _turns(row: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    chat = _first(row, ("messages", "conversations"))
    if chat is not None:
        return _said(chat)
    question, answer = _first(row, QUESTIONS), _first(row, ANSWERS)
    if question is None:
        raise MarsError(f"no known format: a row must have {FORMATS}, but this one has {', '.join(row) or 'nothing'}")
    if row.get("instruction") is not None and row.get("input"):
        question = "\n\n".join(filter(str.strip, (_text(question), _text(row["input"]))))
    return chain(_said(question, "user"), _said([] if answer is None else answer, "assistant"))


def _first(row: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """The value of the first key that has one: tables have null in columns that a row does not use."""
    return next((row[key] for key in keys if row.get(key) is not None), None)


def _said(value: Any, role: str | None = None) -> Iterator[dict[str, str]]:
    """Messages from a list of them, or one from a text if its ``role`` is given."""
    if isinstance(value, str) and role:
        value = [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise MarsError(f"a chat must be a list of messages, not {type(value).__name__}")
    return map(_message, value)


def _message(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise MarsError(f"a message must be an object with role and content, not {type(value).__name__}")
    role = ROLES.get(str(_first(value, ("role", "from"))))
    if role is None:
        raise MarsError(
            f"unknown role {_first(value, ('role', 'from'))!r}: only system, user and assistant can be used"
        )
    content = _text(_first(value, ("content", "value")))
    if role != "system" and not content.strip():
        raise MarsError(f"a message of the {role} is empty")
    return {"role": role, "content": content}


def _text(content: Any) -> str:
    """A text, which may be given as a list of text parts."""
    parts = content if isinstance(content, list) else [content]
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise MarsError("the content of a message must be text and nothing else")
    if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):
        raise MarsError("the content of a message has half a character in it, which cannot be encoded")
    return "".join(texts)


def warn(message: str) -> None:
    Console(stderr=True).print(message, style="yellow", markup=False, soft_wrap=True)


def read_rows(
    source: str | Path, *, on_bad_row: Callable[[str], None], convert: Convert = to_messages
) -> Iterator[Row]:
    """Every usable row of a file, a folder or a hub data set (``owner/name`` or ``owner/name:split``).

    For a row that cannot be used, ``on_bad_row`` is called with a message; it may raise. A source that cannot be read
    raises ``MarsError``, a missing one before the first row is asked for.
    """
    return _usable(_find(source), on_bad_row, convert)


def _usable(found: Iterator[Found], on_bad_row: Callable[[str], None], convert: Convert) -> Iterator[Row]:
    for where, row in found:
        try:
            content = json.loads(row) if isinstance(row, str) else row
            if not isinstance(content, Mapping):
                raise MarsError(f"a row must be a JSON object, not {type(content).__name__}")
            ended, category = content.get("ended") is not False, content.get("category")
            found_row = Row(where, convert(content), ended, category if isinstance(category, str) else None)
        except MarsError as error:
            on_bad_row(f"{where}: {error}")
        except (ValueError, RecursionError) as error:
            on_bad_row(f"{where}: not valid JSON: {error}")
        else:
            yield found_row


def _find(source: str | Path) -> Iterator[Found]:
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.is_file() and _suffixed(each))
        if not files:
            raise MarsError(f"the folder {source} has no file that ends in {', '.join(SUFFIXES)}")
        return chain.from_iterable(map(_file, files))
    if path.exists():
        if not _suffixed(path):
            raise MarsError(f"{source} is not a file of rows: its name must end in {', '.join(SUFFIXES)}")
        return _file(path)
    if isinstance(source, Path) or source.startswith(("/", ".", "~")) or _suffixed(path):
        raise MarsError(f"there is no file {source}")
    return _hub(source)


def _suffixed(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES)


def _file(path: Path) -> Iterator[Found]:
    try:
        if path.suffix.lower() == ".parquet":
            batches = _library("pyarrow.parquet").ParquetFile(path).iter_batches()
            yield from _numbered(path, chain.from_iterable(batch.to_pylist() for batch in batches))
        else:
            yield from _json(path)
    except MarsError:
        raise
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise MarsError(f"{path} cannot be read: {error}") from error


def _json(path: Path) -> Iterator[Found]:
    """An object on each line; a .json file may be one list instead."""
    name = path.name.lower()
    opener = gzip.open if name.endswith(".gz") else open
    with cast(TextIO, opener(path, "rt", encoding="utf-8-sig")) as file:  # there may be a byte-order mark
        opening = next((line for line in file if line.strip()), "")
        file.seek(0)
        if name.removesuffix(".gz").endswith(".json") and opening.lstrip().startswith("["):
            yield from _numbered(path, json.load(file))
        else:
            yield from ((f"{path}:{number}", line) for number, line in enumerate(file, start=1) if line.strip())


def _hub(source: str) -> Iterator[Found]:
    name, _, split = source.partition(":")
    datasets = _library("datasets")
    try:
        rows = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # the hub, the network and the data set's own files each fail in their own way
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise MarsError(f"{name} is neither a local file nor a data set that could be loaded: {reason}") from error
    return _numbered(name, rows)


def _numbered(name: str | Path, rows: Iterable[Any]) -> Iterator[Found]:
    return ((f"{name}[{number}]", row) for number, row in enumerate(rows))


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MarsError(f"{name} is needed to read this data: {how_to_install('train')}") from None
