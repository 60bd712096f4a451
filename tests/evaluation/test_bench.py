"""``mars bench`` on a tiny model: what it measures, what it writes, and what it refuses. Never how fast."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import mars
from mars import cli
from mars.errors import how_to_install
from mars.evaluation import bench
from mars.evaluation.peers import open_peer
from mars.evaluation.speed import measure, with_dial
from tests.conftest import gated_checkpoint, save_chat_model, tiny_checkpoint

KEYS = {
    *("window", "batch_size", "requests", "tokens", "seconds", "tokens_per_second", "tokens_per_forward", "forwards"),
    *("ms_per_forward", "ratio_to_one_token", "agreement", "same_text", "bandwidth_share", "peak_memory_bytes"),
    *(
        "width",
        "drafts_passed",
        "expected_tokens_per_second",
        "ttft_ms_p50",
        "ttft_ms_p99",
        "tpot_ms_p50",
        "tpot_ms_p99",
    ),
}
SMALL = ("--max-new-tokens", "20", "--min-requests", "3")


@pytest.fixture(scope="module")
def mars_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that calls itself trained."""
    return save_chat_model(tmp_path_factory.mktemp("models") / "tiny", trained=True)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARS_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Type ``mars bench …``; returns the exit code."""

    def typed(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["mars", "bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return int(left.value.code or 0)

    return typed


def read(out: Path) -> dict[str, dict]:
    """Rows by name and batch size."""
    rows = json.loads(out.read_text())["rows"]
    return {f"{row.get('dial') or row['peer']} {row['window']} {row['batch_size']}": row for row in rows}


@pytest.mark.parametrize(("family", "is_known"), [("gemma2", True), ("llama", False)])
def test_what_the_policy_expected(family: str, is_known: bool) -> None:
    """Llama runs as a compiled step, where every sequence has a window of its own."""
    model = mars.Model(gated_checkpoint(family))
    for name, window in (("one-token", None), ("exact", "chain")):
        prompts = [[start, 2, 3] for start in range(8)]
        run = measure(with_dial(model, name, window), prompts, batch_size=8, requests=8, max_new_tokens=40)
        forwards = sum(each.forwards for each in run.answers)
        assert run.accepted == run.tokens - forwards and (run.drafts > 0) == (name == "exact")
        assert (run.expected is not None) == is_known
        if run.expected is not None:
            tokens, seconds = run.expected
            assert seconds > 0 and (tokens == forwards if name == "one-token" else forwards < tokens < 4 * forwards)


def test_everything(mars_model: Path, tmp_path: Path, run, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out.json"
    dials = ("--dials", "exact,exact tree, threshold=0.3", "--batch-sizes", "2,1")
    peers = ("--peers", "transformers,block-cache=4,block-cache:paper=4,sliding-window")
    assert run("--model", mars_model, "--dtype", "float32", *dials, *peers, *SMALL, "--out", out) == 0
    record = json.loads(out.read_text())
    assert set(record) == {"options", "provenance", "bandwidth_bytes_per_second", "rows"}
    assert record["options"]["dials"] == ["one-token", "exact", "exact tree", "threshold=0.3"]
    assert record["options"]["batch_sizes"] == [1, 2] and record["options"]["dtype"] == "float32"
    assert record["bandwidth_bytes_per_second"] > 0

    rows = read(out)
    lossless = ("one-token auto", "exact auto", "exact tree", "transformers None")
    loose = ("threshold=0.3 auto", "block-cache=4 None", "block-cache:paper=4 None", "sliding-window None")
    assert set(rows) == {f"{name} {size}" for name in lossless + loose for size in (1, 2)}
    for row in rows.values():
        assert (row["width"] is None) == ("peer" in row)
        assert set(row) - {"dial", "peer"} == KEYS and ("dial" in row) != ("peer" in row)
        unknown = {"window", "width", "drafts_passed", "expected_tokens_per_second"}
        assert all(row[key] is not None for key in KEYS - unknown)
        assert row["drafts_passed"] is None or ("dial" in row and 0 <= row["drafts_passed"] <= 1)
        assert row["requests"] == (3 if row["batch_size"] == 1 else 4)
        assert row["tokens_per_second"] == row["tokens"] / row["seconds"]
        assert row["ms_per_forward"] == 1000 * row["seconds"] / row["forwards"]
        assert row["ttft_ms_p50"] <= row["ttft_ms_p99"] and row["tpot_ms_p50"] <= row["tpot_ms_p99"]
    for size in (1, 2):
        assert rows[f"one-token auto {size}"]["ratio_to_one_token"] == 1
        for name in lossless:
            assert rows[f"{name} {size}"]["same_text"] == rows[f"{name} {size}"]["agreement"] == 1
        assert rows[f"exact tree {size}"]["tokens_per_forward"] > rows[f"one-token auto {size}"]["tokens_per_forward"]
        assert rows[f"threshold=0.3 auto {size}"]["agreement"] < 1
    assert rows["one-token auto 1"]["forwards"] == rows["one-token auto 1"]["tokens"]
    assert rows["one-token auto 2"]["forwards"] < rows["one-token auto 2"]["tokens"]

    table = out.with_suffix(".md").read_text().splitlines()
    assert len(table) == 2 + len(rows) and len({line.count("|") for line in table}) == 1
    plots = [f"out.{name}.{kind}" for name in ("tokens-per-second", "ms-per-forward") for kind in ("svg", "png")]
    assert {path.name for path in out.parent.iterdir()} == {"out.json", "out.md", *plots}
    said = capsys.readouterr()
    assert "exact tree" in said.out and "wrote" in said.out
    assert len(said.err.splitlines()) == len(rows)


def test_prompts_from_a_file_without_matplotlib(
    chat_model: Path, tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    rows = [{"prompt": "abc"}, {"messages": [{"role": "user", "content": "fed"}]}, {"turns": ["cba", "x"]}, {"no": 1}]
    with gzip.open(tmp_path / "prompts.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    asked = ("--dials", "one-token", "--batch-sizes", "4", "--prompts", "prompts.jsonl.gz")
    assert run("--model", chat_model, *asked, *SMALL, "--out", "out.json") == 0
    assert read(tmp_path / "out.json")["one-token auto 4"]["requests"] == 4
    assert not list(tmp_path.glob("*.png"))
    said = capsys.readouterr().err
    assert how_to_install("bench") in said and "skipped 1 rows" in said


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict]]:
    """A stand-in for vLLM, which can only check what it is asked; returns what was opened."""
    opened = []

    class Stand:
        def __init__(self, model: str, **options: object) -> None:
            opened.append((model, options))
            self.model = mars.load(model, device="cpu", dtype=str(options["dtype"]))
            self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))

        def generate(self, prompts: list, sampling: SimpleNamespace, use_tqdm: bool) -> list[SimpleNamespace]:
            ids = [prompt["prompt_token_ids"] for prompt in prompts]
            answers = self.model.generate(ids, dial="one-token", max_new_tokens=sampling.max_tokens)
            times = SimpleNamespace(first_token_latency=0.1, first_token_ts=5.0, last_token_ts=6.0)
            return [SimpleNamespace(outputs=[each], metrics=times) for each in answers]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Stand, SamplingParams=SimpleNamespace))
    return opened


def test_vllm(mars_model: Path, tmp_path: Path, run, vllm: list[tuple[str, dict]]) -> None:
    asked = ("--dials", "exact", "--batch-sizes", "1,2", "--peers", "vllm", *SMALL, "--out", "out.json")
    assert run("--model", mars_model, *asked) == 0
    ((where, options),) = vllm
    assert where == str(mars_model) and options["max_num_seqs"] == 2
    row = read(tmp_path / "out.json")["vllm None 2"]
    assert row["same_text"] == row["tokens_per_forward"] == 1
    assert row["ttft_ms_p50"] == pytest.approx(100)
    unknown = {key for key in KEYS if row[key] is None}
    known = {"batch_size", "requests", "tokens", "seconds", "tokens_per_second", "tokens_per_forward", "same_text"}
    assert KEYS - unknown == known | {"ratio_to_one_token", *(key for key in KEYS if key.startswith(("ttft", "tpot")))}


def test_vllm_gets_a_folder_of_what_was_put_together_here(vllm: list[tuple[str, dict]]) -> None:
    checkpoint, prompts = tiny_checkpoint("llama"), [[1, 2, 3], [4, 5]]
    with open_peer("vllm", checkpoint, None, max_num_seqs=2, length=32) as peer:
        theirs = peer.decode(prompts, 8)
    assert not Path(vllm[0][0]).exists()
    ours = mars.Model(checkpoint).generate(prompts, dial="one-token", max_new_tokens=8)
    assert [each.token_ids for each in theirs.answers] == [each.token_ids for each in ours]


def test_no_round_knows_the_prompts_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mars.Model(tiny_checkpoint("llama"), max_num_seqs=1)
    found, pages = [], model.engine().scheduler.pages
    find = pages.find
    monkeypatch.setattr(pages, "find", lambda tokens: found.append(find(tokens)) or found[-1])
    decoder = with_dial(model, "one-token", None)
    for _ in range(2):
        decoder.decode([list(range(10)) * 4], 4)
    assert found == [[], []]
    model.generate(list(range(10)) * 4, dial="one-token", max_new_tokens=4)
    assert found[-1], "nothing is shared anyway: a weak test"


def test_a_run_that_dies_leaves_whole_files(
    chat_model: Path, tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(decoder, *arguments: object, batch_size: int, **options: object):
        if batch_size == 2:
            raise KeyboardInterrupt
        return measure(decoder, *arguments, batch_size=batch_size, **options)

    monkeypatch.setattr(bench, "measure", dying)
    asked = ("--dials", "one-token", "--batch-sizes", "1,2", *SMALL, "--out", "out.json")
    assert run("--model", chat_model, *asked) != 0
    assert list(read(tmp_path / "out.json")) == ["one-token auto 1"]
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"out.json", "out.md"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"--dials": " , "}, "--dials is empty"),
        ({"--dials": "exact,warp"}, "unknown dial 'warp'"),
        ({"--dials": "exact forest"}, "unknown window 'forest'"),
        ({"--dials": "exact"}, "train it with `mars train`"),
        ({"--batch-sizes": ""}, "--batch-sizes is empty"),
        ({"--batch-sizes": "1,0"}, "whole numbers of 1 or more, not '0'"),
        ({"--batch-sizes": "two"}, "not 'two'"),
        ({"--peers": ""}, "--peers is empty"),
        (
            {"--peers": "llama"},
            "use transformers, vllm, llama.cpp, block-cache=16, block-cache:paper=16 (any block size) or",
        ),
        ({"--peers": "llama.cpp"}, "llama.cpp"),  # it is not installed, or the model is no GGUF file
        ({"--peers": "block-cache=x"}, "unknown peer"),
        ({"--peers": "block-cache:own=4"}, "unknown peer"),
        ({"--peers": "block-cache:paper=4"}, "train it with `mars train`"),
        ({"--peers": "vllm"}, how_to_install("vllm")),
        ({"--peers": "sliding-window"}, "train it with `mars train`"),
        ({"--prompts": "nowhere.jsonl"}, "there is no file nowhere.jsonl"),
        ({"--prompts": "bad.jsonl"}, "bad.jsonl has no usable row: bad.jsonl:1"),
        ({"--max-new-tokens": "0"}, "--max-new-tokens must be at least 1"),
        ({"--max-new-tokens": "250"}, "no prompt leaves room for 250 new tokens"),
        ({"--min-requests": "0"}, "--min-requests must be at least 1"),
        ({"--dtype": "int4"}, "unknown dtype"),
        ({"--out": "out.txt"}, "must name a .json file"),
        ({"--out": "bad.jsonl/out.json"}, "the folder bad.jsonl cannot be made"),
    ],
)
def test_bad_input_is_one_clear_line(
    changes: dict[str, str],
    says: str,
    chat_model: Path,
    tmp_path: Path,
    run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"nothing": "here"}\n')
    monkeypatch.setitem(sys.modules, "vllm", None)
    options = {"--model": str(chat_model), "--dials": "one-token", "--batch-sizes": "1", "--out": "out.json"} | changes
    assert run(*[part for pair in options.items() for part in pair]) == 2
    said = capsys.readouterr()
    assert said.out == "" and not (tmp_path / "out.json").exists()
    assert len(said.err.splitlines()) == 1 and says in said.err, said.err


def test_categories_are_measured_by_themselves(mars_model: Path, tmp_path: Path, run) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"category": kind, "turns": [text]} for kind, text in (("sums", "abc"), ("songs", "hhh"), ("sums", "de"))]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.json"
    asked = ("--model", mars_model, "--dials", "exact", "--batch-sizes", "1,2", "--prompts", prompts, "--out", out)
    assert run(*asked, "--by-category", *SMALL) == 0
    found = json.loads(out.read_text())["rows"]
    assert {(row["category"], row["dial"], row["batch_size"]) for row in found} == {
        (kind, dial, size) for kind in ("sums", "songs") for dial in ("one-token", "exact") for size in (1, 2)
    }
    assert all(row["ratio_to_one_token"] == 1.0 for row in found if row["dial"] == "one-token")
    assert all(row["same_text"] == 1.0 for row in found)
    assert "exact, songs" in out.with_suffix(".md").read_text()


def test_categories_that_are_not_there(tmp_path: Path, run, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n')
    asked = ("--dials", "exact", "--batch-sizes", "1", "--out", tmp_path / "out.json", "--by-category")
    assert run(*asked, "--prompts", prompts) == 2
    assert "has a category" in capsys.readouterr().err
    assert run(*asked) == 2
    assert "needs --prompts" in capsys.readouterr().err
