"""Rows become tokens in several processes, in order, and are read no further than needed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer

from mars.training.chats import encode_chat
from mars.training.prepare import encoded
from mars.training.rows import Row

ROWS = 5000


def test_rows_are_read_as_results_are_taken(chat_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    read, bad = 0, list[str]()

    def chat(number: int) -> list[dict[str, str]]:
        letters = "".join("abcdefghij"[int(digit)] for digit in str(number))
        answer = [{"role": "assistant", "content": letters}] if number % 1000 else []
        return [{"role": "user", "content": "abc"}, *answer]

    def rows() -> Iterator[Row]:
        nonlocal read
        for number in range(ROWS):
            read += 1
            yield Row(f"row {number}", chat(number))

    documents = encoded(rows(), tokenizer, bad.append)
    taken = [list(next(documents).tokens)]
    time.sleep(0.5)  # who takes results slowly finds that no more rows were read meanwhile
    assert read < ROWS / 2
    taken += [list(document.tokens) for document in documents]
    usable = [number for number in range(ROWS) if number % 1000]
    assert taken == [list(encode_chat(tokenizer, chat(number)).tokens) for number in usable]
    assert [each.partition(":")[0] for each in bad] == [f"row {number}" for number in range(0, ROWS, 1000)]
