"""The benchmark scripts run and write what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import save_chat_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, out: Path, *arguments: str) -> dict:
    command = [sys.executable, BENCHMARKS / script, "--out", out, *arguments]
    done = subprocess.run(command, text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {"command", "commit", "date", "machine", "versions"} <= found["provenance"].keys()
    return found


def test_compare_decoders(tmp_path: Path) -> None:
    rows = run("compare_decoders.py", tmp_path / "out.json", "--prompts", "1", "--max-new-tokens", "4")["rows"]
    by_name = {row["decoder"]: row for row in rows}
    dials = ("one-token", "exact, chain", "exact, tree=2", "exact, tree")
    for lossless in (*dials, "Jacobi", "Jacobi as in the paper's scripts", "draft model (itself)"):
        assert by_name[lossless]["same_text"] == 1
        assert by_name[lossless]["agreement"] == 1
    paper = [row for row in rows if "0.95" in row["decoder"]]
    assert len(paper) == 3
    assert len({(row["tokens_per_forward"], row["agreement"]) for row in paper}) == 1


def test_forward_width(tmp_path: Path, chat_model: Path) -> None:
    rows = run("forward_width.py", tmp_path / "out.json", "--widths", "6", "--model", str(chat_model))["rows"]
    assert {(row["weights"], row["width"]) for row in rows} >= {("by columns", 1), ("by columns", 6), ("by rows", 6)}


def test_invariant_speed(tmp_path: Path) -> None:
    model = save_chat_model(tmp_path / "model", trained=True)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"prompt": "de"}\n')
    options = ["--model", str(model), "--dtype", "float32", "--prompts", str(prompts), "--requests", "2"]
    rows = run("invariant_speed.py", tmp_path / "out.json", *options, "--max-new-tokens", "3", "--memory", "1e7")[
        "rows"
    ]
    assert [row["what"] for row in rows] == ["one-token", "exact", "prefill"]
    assert all(row["best"].keys() == {"as always", "batch-invariant"} for row in rows)
