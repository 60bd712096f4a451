"""Rows of chats: every format and every kind of source, bad rows that are told apart from bad files."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mars import MarsError
from mars.training.rows import Row, read_rows, to_messages, to_prompt

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello."}
MORE = {"role": "user", "content": "Bye"}
LAST = {"role": "assistant", "content": "Goodbye."}
CHAT = {"messages": [USER, ASSISTANT]}


def said(source: str, text: str) -> dict[str, str]:
    return {"from": source, "value": text}


def never(reason: str) -> None:
    raise AssertionError(reason)


def read(source: str | Path, **options: Any) -> tuple[list[Row], list[str]]:
    bad: list[str] = []
    return list(read_rows(source, on_bad_row=bad.append, **options)), bad


# --- row formats


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [SYSTEM, USER, ASSISTANT], "id": 3, "prompt": "other"}, [SYSTEM, USER, ASSISTANT]),
        ({"messages": [USER | {"name": None}, ASSISTANT, MORE, LAST]}, [USER, ASSISTANT, MORE, LAST]),
        ({"messages": None, "conversations": [USER, ASSISTANT]}, [USER, ASSISTANT]),
        (
            {"conversations": [said("system", "Be brief."), said("human", "Hi"), said("gpt", "Hello.")]},
            [SYSTEM, USER, ASSISTANT],
        ),
        ({"conversations": [said("user", "Hi"), said("assistant", "Hello.")]}, [USER, ASSISTANT]),
        ({"prompt": "Hi", "completion": "Hello."}, [USER, ASSISTANT]),
        ({"prompt": [SYSTEM, USER], "completion": [ASSISTANT]}, [SYSTEM, USER, ASSISTANT]),
        ({"prompt": "Hi", "response": "Hello."}, [USER, ASSISTANT]),
        ({"question": "Hi", "answer": "Hello."}, [USER, ASSISTANT]),
        ({"instruction": "Hi", "output": "Hello."}, [USER, ASSISTANT]),
        ({"instruction": "Hi", "input": "", "output": "Hello."}, [USER, ASSISTANT]),
        ({"instruction": "", "input": "Hi", "output": "Hello."}, [USER, ASSISTANT]),
        ({"instruction": "Hi", "input": None, "output": "Hello."}, [USER, ASSISTANT]),
        ({"prompt": "Hi", "input": "of another kind", "completion": "Hello."}, [USER, ASSISTANT]),
        (
            {"instruction": "Add.", "input": "1, 2", "output": "Hello."},
            [{"role": "user", "content": "Add.\n\n1, 2"}, ASSISTANT],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "Hi"]}, ASSISTANT]},
            [USER, ASSISTANT],
        ),
        ({"messages": [SYSTEM | {"content": ""}, USER, ASSISTANT]}, [SYSTEM | {"content": ""}, USER, ASSISTANT]),
    ],
)
def test_formats(row: dict[str, Any], messages: list[dict[str, str]]) -> None:
    assert to_messages(row) == messages


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "this one has nothing"),
        ({"text": "Hi", "url": "x"}, "this one has text, url"),
        ({"output": "Hello."}, "no known format"),
        ({"messages": [SYSTEM, USER]}, "no answer"),
        ({"messages": []}, "no answer"),
        ({"prompt": "Hi"}, "no answer"),
        ({"prompt": "Hi", "completion": None}, "no answer"),
        ({"prompt": "Hi", "completion": 4}, "a list of messages, not int"),
        ({"messages": "Hi"}, "a list of messages, not str"),
        ({"messages": ["Hi", "Hello."]}, "with role and content, not str"),
        ({"messages": [USER, {"content": "Hello."}]}, "unknown role None"),
        ({"messages": [USER, ASSISTANT | {"role": ["assistant"]}]}, "unknown role"),
        ({"messages": [USER, {"role": "tool", "content": "4"}, ASSISTANT]}, "unknown role 'tool'"),
        ({"messages": [USER, ASSISTANT | {"content": " \n"}]}, "message of the assistant is empty"),
        ({"messages": [USER, ASSISTANT | {"content": []}]}, "message of the assistant is empty"),
        ({"messages": [USER | {"content": ""}, ASSISTANT]}, "message of the user is empty"),
        ({"prompt": "Hi", "completion": ""}, "message of the assistant is empty"),
        ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [1]}]}, "must be text"),
        ({"messages": [USER, {"role": "assistant"}]}, "must be text"),
        ({"messages": [USER | {"content": [{"type": "image", "url": "x"}]}, ASSISTANT]}, "must be text"),
        ({"messages": [USER | {"content": [{"type": "text", "text": None}]}, ASSISTANT]}, "must be text"),
        ({"instruction": "Hi", "input": 4, "output": "Hello."}, "must be text"),
    ],
)
def test_bad_rows(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(MarsError, match=reason):
        to_messages(row)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"messages": [SYSTEM, USER, ASSISTANT, MORE, LAST]}, [SYSTEM, USER]),
        ({"messages": [USER, MORE]}, [USER, MORE]),
        ({"messages": [USER, SYSTEM, ASSISTANT]}, [USER]),
        ({"messages": [USER, ASSISTANT, {"role": "tool", "content": "4"}]}, [USER]),
        ({"conversations": [said("human", "Hi"), said("gpt", "Hello.")]}, [USER]),
        ({"prompt": "Hi"}, [USER]),
        ({"prompt": [SYSTEM, USER, ASSISTANT, MORE]}, [SYSTEM, USER, ASSISTANT, MORE]),
        ({"prompt": "Hi", "completion": "Hello."}, [USER]),
        ({"question": "Hi", "answer": "Hello."}, [USER]),
        ({"instruction": "Add.", "input": "1, 2"}, [{"role": "user", "content": "Add.\n\n1, 2"}]),
        ({"question_id": 81, "category": "writing", "turns": ["Hi", "Bye"]}, [USER]),
    ],
)
def test_prompts(row: dict[str, Any], prompt: list[dict[str, str]]) -> None:
    assert to_prompt(row) == prompt


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [SYSTEM, ASSISTANT, USER]}, "no user turn"),
        ({"messages": []}, "no user turn"),
        ({"prompt": " "}, "empty"),
        ({"turns": []}, "no known format"),
        ({"turns": [4]}, "not int"),
    ],
)
def test_bad_prompts(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(MarsError, match=reason):
        to_prompt(row)


# --- files


def write_lines(path: Path, *lines: str) -> Path:
    data = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Question {number}", "completion": f"Answer {number}"} for number in range(count)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.jsonl.gz", "a.ndjson.gz", "a.json.gz", "A.JSONL"])
def test_lines(tmp_path: Path, name: str) -> None:
    path = write_lines(tmp_path / name, json.dumps(CHAT), "", '{"messages": [', "[1]", "  ", json.dumps(CHAT), "{}")
    rows, bad = read(path)
    assert rows == [Row(f"{path}:1", CHAT["messages"]), Row(f"{path}:6", CHAT["messages"])]
    assert [reason.split(": ")[:2] for reason in bad] == [
        [f"{path}:3", "not valid JSON"],
        [f"{path}:4", "a row must be a JSON object, not list"],
        [f"{path}:7", "no known format"],
    ]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_list(tmp_path: Path, name: str) -> None:
    path = write_lines(tmp_path / name, "", json.dumps([CHAT, "Hi", {}, CHAT], indent=2))
    rows, bad = read(path)
    assert [row.where for row in rows] == [f"{path}[0]", f"{path}[3]"]
    assert [reason.split(": ")[0] for reason in bad] == [f"{path}[1]", f"{path}[2]"]


def test_only_json_may_be_a_list(tmp_path: Path) -> None:
    rows, bad = read(write_lines(tmp_path / "a.jsonl", "[1]", json.dumps(CHAT)))
    assert (len(rows), len(bad)) == (1, 1)


def test_text_is_utf8_with_or_without_a_mark(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "Où?", "completion": "Ici 🙂\u2028là."}, ensure_ascii=False)
    path = tmp_path / "a.jsonl"
    for mark in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(mark + f"{line}\r\n{line}\r\n".encode())
        rows, bad = read(path)
        assert [row.messages[1]["content"] for row in rows] == ["Ici 🙂\u2028là."] * 2
        assert not bad


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    assert read(write_lines(tmp_path / "a.jsonl")) == ([], [])
    assert read(write_lines(tmp_path / "a.json")) == ([], [])


def test_a_bad_row_can_be_made_fatal(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", json.dumps(CHAT), "{", json.dumps(CHAT))

    def stop(reason: str) -> None:
        raise MarsError(reason)

    rows = read_rows(path, on_bad_row=stop)
    assert next(rows).where == f"{path}:1"
    with pytest.raises(MarsError, match=r"a\.jsonl:2: not valid JSON"):
        next(rows)


def test_lines_are_not_read_ahead(tmp_path: Path) -> None:
    """A file that breaks far behind the first row still gives the first row."""
    path = tmp_path / "a.jsonl"
    path.write_bytes((json.dumps(CHAT) + "\n").encode() * 10_000 + b"\xff\n")
    rows = read_rows(path, on_bad_row=never)
    assert next(rows).messages == CHAT["messages"]
    with pytest.raises(MarsError, match=r"a\.jsonl cannot be read"):
        list(rows)


def test_an_answer_that_was_cut_off(tmp_path: Path) -> None:
    rows = [CHAT, CHAT | {"ended": False}, CHAT | {"ended": True}, CHAT | {"ended": None}]
    path = write_lines(tmp_path / "a.jsonl", *map(json.dumps, rows))
    assert [row.ended for row in read_rows(path, on_bad_row=never)] == [True, False, True, True]


def test_another_conversion(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", json.dumps({"turns": ["Hi", "Bye"]}), json.dumps(CHAT))
    assert [row.messages for row in read_rows(path, on_bad_row=never, convert=to_prompt)] == [[USER], [USER]]


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = [CHAT, {"messages": []}, {"messages": [SYSTEM, USER, ASSISTANT]}, {"prompt": "Hi", "completion": "Hello."}]
    pq.write_table(pa.Table.from_pylist(table, schema=schema()), path, row_group_size=2)
    rows, bad = read(path)
    assert [row.where for row in rows] == [f"{path}[0]", f"{path}[2]", f"{path}[3]"]
    assert rows[1].messages == [SYSTEM, USER, ASSISTANT]
    assert bad[0].startswith(f"{path}[1]: there is no answer")


def schema() -> pa.Schema:
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    return pa.schema([("messages", pa.list_(message)), ("prompt", pa.string()), ("completion", pa.string())])


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    pq.write_table(pa.Table.from_pylist(numbered(1)), tmp_path / "b" / "x.parquet")
    write_lines(tmp_path / "c.jsonl.gz", *map(json.dumps, numbered(1)))
    write_lines(tmp_path / "a.json", json.dumps(numbered(2)))
    (tmp_path / "README.md").write_text("not rows")
    rows, bad = read(str(tmp_path))
    names = ["a.json[0]", "a.json[1]", "b/x.parquet[0]", "c.jsonl.gz:1"]
    assert [row.where for row in rows] == [f"{tmp_path}/{name}" for name in names]
    assert not bad


def test_a_path_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_lines(tmp_path / "a.jsonl", json.dumps(CHAT))
    assert len(read("~/a.jsonl")[0]) == 1


# --- files that cannot be read


def truncated(path: Path) -> None:
    lines = "\n".join(map(json.dumps, numbered(2000)))
    path.write_bytes(gzip.compress(lines.encode())[:-40])


def damaged(path: Path) -> None:
    data = bytearray(gzip.compress(json.dumps(CHAT).encode()))
    data[10:30] = b"\xff" * 20  # behind the header
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl.gz", truncated),
        ("a.jsonl.gz", damaged),
        ("a.json.gz", lambda path: path.write_text("[]")),
        ("a.jsonl", lambda path: path.write_bytes(b'{"prompt": "\xff"}')),
        ("a.json", lambda path: path.write_text(json.dumps(numbered(3))[:-9])),
        ("a.parquet", lambda path: path.write_text("PAR1 but not really")),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    write(tmp_path / name)
    with pytest.raises(MarsError, match=rf"{tmp_path / name} cannot be read: \S"):
        list(read_rows(tmp_path / name, on_bad_row=lambda _: None))


@pytest.mark.parametrize("source", ["/no/such", "./no", "../no", "~/no-such-file", "no.jsonl", "no/such.parquet"])
def test_missing_files(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MarsError, match=f"there is no file {source}"):
        read_rows(source, on_bad_row=never)


def test_other_paths_that_hold_no_rows(tmp_path: Path) -> None:
    with pytest.raises(MarsError, match="there is no file"):
        read_rows(Path("owner/name"), on_bad_row=never)
    with pytest.raises(MarsError, match="has no file that ends in"):
        read_rows(tmp_path, on_bad_row=never)
    (tmp_path / "a.txt").write_text("Hi")
    with pytest.raises(MarsError, match="its name must end in"):
        read_rows(tmp_path / "a.txt", on_bad_row=never)


# --- the hub


def fill_cache(folder: Path) -> None:
    """Put a data set ``owner/name`` where ``datasets`` keeps what it has fetched."""
    for split in ("train", "test"):
        rows = [{"prompt": f"{split} {number}", "completion": "Hello."} for number in range(3)]
        write_lines(folder / f"{split}.jsonl", *map(json.dumps, rows))
    files = {split: str(folder / f"{split}.jsonl") for split in ("train", "test")}
    datasets.load_dataset("json", data_files=files, cache_dir=str(folder / "made"))
    (made,) = (folder / "made" / "json").iterdir()
    cached = folder / "owner___name" / "default"
    shutil.copytree(made, cached)
    for file in cached.rglob("json-*.arrow"):
        file.rename(file.with_name(file.name.replace("json-", "name-")))


def test_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_cache(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for source, split, count in (("owner/name", "train", 3), ("owner/name:test[:2]", "test", 2)):
        rows, bad = read(source)
        assert [row.where for row in rows] == [f"owner/name[{number}]" for number in range(count)]
        assert [row.messages[0]["content"] for row in rows] == [f"{split} {number}" for number in range(count)]
        assert not bad
    with pytest.raises(MarsError, match=r"could be loaded: .*nosuch"):
        read_rows("owner/name:nosuch", on_bad_row=never)


def test_only_the_first_line_of_a_reason_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_cache(tmp_path)
    (tmp_path / "owner___name" / "default").rename(tmp_path / "owner___name" / "other")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MarsError, match=r"Couldn't find cache for owner/name$"):
        read_rows("owner/name", on_bad_row=never)


@pytest.mark.parametrize("source", ["mars-tests/no-such-data-set", "mars-tests/no-such-data-set:test[:10]", "typo"])
def test_a_data_set_that_cannot_be_loaded(source: str) -> None:
    begun = time.monotonic()
    with pytest.raises(MarsError, match=f"{source.partition(':')[0]} is neither a local file nor") as caught:
        read_rows(source, on_bad_row=never)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(("source", "library"), [("owner/name", "datasets"), ("a.parquet", "pyarrow.parquet")])
def test_without_the_libraries(source: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MarsError, match=rf"^{library} is needed to read this data: install MARS with its extra train"):
        list(read_rows(source, on_bad_row=never))
