"""The command as a user types it."""

from __future__ import annotations

import codecs
import inspect
import io
import json
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from operator import mul
from pathlib import Path

import pyte
import pytest
from rich.color import Color
from rich.console import Console
from typer.main import get_command

from mars import Model, SamplingParams, __version__, load
from mars.cli import demo, main
from mars.cli.app import FIRST_STEPS, app
from mars.cli.output import COLOURS
from mars.core.output import RequestOutput
from mars.engine.cpu import RaggedPolicy, StepSeconds
from mars.models import builtin
from tests.conftest import save_chat_model

Command = Callable[..., subprocess.CompletedProcess[str]]
ROWS = 200  # of a terminal: enough for all that a command writes


def mars(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mars", *arguments]
    return subprocess.run(
        command, input=stdin, env=os.environ | environment, text=True, capture_output=True, timeout=300, check=False
    )


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in this process, which need not load everything again."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["mars", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), said.out, said.err)

    return run


def in_terminal(width: int, *arguments: str, keys: Sequence[str] = (), **environment: str) -> list[str]:
    """What the command wrote to a terminal of so many columns, in the portions it came in.

    The keys are pressed one after the other, each when the command waits for a line.
    """
    terminal, other = pty.openpty()
    termios.tcsetwinsize(other, (ROWS, width))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    kept |= {"TERM": "xterm-256color", **environment}
    command = [sys.executable, "-m", "mars", *arguments]
    process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=kept, start_new_session=True)
    os.close(other)
    portions, waiting, decoder = [], list(keys), codecs.getincrementaldecoder("utf-8")()
    with suppress(OSError):  # on Linux, the end is an error
        while select.select([terminal], [], [], 120)[0] and (portion := os.read(terminal, 65536)):
            portions.append(decoder.decode(portion))
            if waiting and "".join(portions[-2:]).endswith("> "):
                os.write(terminal, waiting.pop(0).encode())
    os.close(terminal)
    assert process.wait(60) == 0, "".join(portions)
    return portions


def screens_of(portions: Sequence[str], width: int) -> list[list[str]]:
    """The lines of the screen after each portion."""
    screen = pyte.Screen(width, ROWS)
    stream = pyte.Stream(screen)
    shown = []
    for portion in portions:
        stream.feed(portion)
        shown.append(list(screen.display))
    return shown


def answers_in(lines: Sequence[str]) -> list[list[str]]:
    """The words of the answers on a screen of the demo, without bars."""
    text = "\n".join(line.rstrip().replace("│", "") for line in lines)
    answer = rf"^(?:{'|'.join(demo.DIALS)})\n(.*?)^[\d.]+ tokens per"
    return [found.split() for found in re.findall(answer, text, re.MULTILINE | re.DOTALL)]


def test_show_steps_colours_by_forward(chat_model: Path, here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    asked = ("generate", "abc", "--model", str(chat_model), "--max-new-tokens", "6", "--ignore-end", "--show-steps")
    said = here(*asked).stdout
    assert len(re.findall(r"\x1b\[38;5;\d+m\w", said)) == 6
    assert len(set(re.findall(r"\x1b\[38;5;(\d+)m", said))) == len(COLOURS)
    assert "6 tokens in 6 forwards: 1.00 per forward" in " ".join(said.split())


def test_show_steps_has_bars_where_there_are_no_colours(chat_model: Path, here: Command) -> None:
    asked = ("generate", "abc", "--model", str(chat_model), "--max-new-tokens", "6", "--ignore-end")
    plain = here(*asked).stdout
    text, _, summary = here(*asked, "--show-steps").stdout.partition("\n")
    assert len(plain) == 7 and text == "│".join(plain.strip())
    assert summary.startswith("6 tokens in 6 forwards")


def test_colours_are_readable_on_black_and_on_white() -> None:
    def luminance(name: str) -> float:
        parts = [part / 255 for part in Color.parse(name).get_truecolor()]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(map(mul, linear, (0.2126, 0.7152, 0.0722)))

    for name in COLOURS:
        assert 1.05 / (luminance(name) + 0.05) > 3.5, name
        assert (luminance(name) + 0.05) / (luminance("#1e1e1e") + 0.05) > 3, name


def test_json_and_plain_text_of_a_prompt_typed_or_piped() -> None:
    asked = ("--max-new-tokens", "24", "--temperature", "0.3", "--seed", "1", "--system", "Answer with code only.")
    question = "Write a Python function that prints :smile: [bold]."
    typed = mars("generate", question, "--dial", "exact", *asked, "--json")
    assert (typed.returncode, typed.stderr) == (0, "")
    out = json.loads(typed.stdout)
    assert out["text"] and out["finish_reason"] in ("stop", "length") and out["dial"] == "exact"
    assert out["tokens"] == len(out["token_ids"]) <= 24
    assert out["tokens_per_forward"] == out["tokens"] / out["forwards"]
    assert out["agreement"] == 1
    assert out["tokens_per_second"] == pytest.approx(out["tokens"] / out["seconds"])
    piped = mars("generate", "-", *asked, stdin=question)
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout == out["text"] + "\n"


def test_chat_remembers_and_turns_the_dial() -> None:
    smollm = load("smollm2-135m", device="cpu")  # in the precision that the command has
    lines = ["My name is Ada.", "/dial exact", "What is my name?", "/dial warp", "/exit"]
    done = mars("chat", "--max-new-tokens", "16", stdin="\n".join(lines) + "\n")
    assert (done.returncode, done.stderr) == (0, "")
    said = [{"role": "user", "content": "My name is Ada."}]
    said.append({"role": "assistant", "content": smollm.generate(said, max_new_tokens=16).text})
    said.append({"role": "user", "content": "What is my name?"})
    remembered = smollm.generate(said, max_new_tokens=16).text
    assert remembered != smollm.generate("What is my name?", max_new_tokens=16).text
    assert remembered in done.stdout.split("dial exact", 2)[2]
    assert "error: unknown dial 'warp'" in done.stdout
    assert done.stdout.count("per second") == 2


def test_chat_says_what_its_commands_did(chat_model: Path, here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {
        "/dial": r"dial one-token\n/dial one-token +one token per forward *\n/dial exact +several",
        "/system": "no system prompt",
        "/system Be [bold]brief[/].": r"system prompt: Be \[bold\]brief\[/\]\.",
        "abc": "tokens in",
        "/reset": "forgot 2 messages; the dial and the system prompt stay",
        "/system  ": r"system prompt: Be \[bold\]",
        "/system none": "no system prompt",
        "/turn left": "unknown command /turn: there are /dial, /system, /reset, /help, /exit",
        "/help": "/dial +show the dial(.|\n)*/exit +leave",
    }
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    done = here("chat", "--model", str(chat_model))
    assert (done.returncode, done.stderr) == (0, "")
    answers = done.stdout.split("> ")[1:]
    assert len(answers) == len(lines) + 1
    for says, answer in zip(lines.values(), answers, strict=False):
        assert re.search(says, answer), (says, answer)


def test_chat_in_a_terminal_colours_forwards(chat_model: Path) -> None:
    asked = ("chat", "--model", str(chat_model), "--max-new-tokens", "6", "--ignore-end")
    said = "".join(in_terminal(80, *asked, keys=("abc\r", "\x04")))  # Ctrl-D leaves
    assert "Loading weights" not in said  # transformers' bar
    assert len(re.findall(r"\x1b\[38;5;\d+m", said)) == 6


def test_chat_leaves_forwards_unmarked_if_told_to(
    chat_model: Path, here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    for option, colours in (("--no-show-steps", 0), ("--show-steps", 6)):
        monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n"))
        done = here("chat", "--model", str(chat_model), "--max-new-tokens", "6", "--ignore-end", option)
        assert len(re.findall(r"\x1b\[3\d(;5;\d+)?m\w", done.stdout)) == colours


def test_demo(smollm: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, with less to write, and not in a terminal."""
    monkeypatch.setattr(demo, "load_warm", lambda *_, **__: smollm)
    monkeypatch.setattr(demo, "PROMPTS", demo.PROMPTS[1:])
    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 32)
    monkeypatch.setenv("COLUMNS", "120")
    engine = smollm.engine()
    policy = RaggedPolicy(engine.block_size, StepSeconds(lambda *_: 1.0, engine.block_size - 1))
    monkeypatch.setattr(engine, "policy", policy)
    monkeypatch.setattr(policy, "observe_step", lambda *_: None)  # masks cost nothing, whatever they take
    demo.demo()
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\r" not in said
    assert len(re.findall(r"^one-token +exact +threshold=0.9 *$", said, re.MULTILINE)) == 2
    rows = re.findall(r"^1.00 tokens per forward +([\d.]+) tokens per forward +([\d.]+) tokens", said, re.MULTILINE)
    assert len(rows) == 2 and all(float(exact) > 1.5 for exact, _ in rows)
    last = " ".join(said.rpartition("\n\n")[2].split())
    assert re.fullmatch(
        r"exact wrote the same text as one-token in 2 of 2 answers, with [1-4]\.\d tokens per forward, "
        r"(at \d+\.\d times the speed|but no faster here)\. Try next: mars chat, mars serve\.",
        last,
    )


def test_demo_in_a_terminal() -> None:
    """Columns that fill one after the other, at 80 characters and, without colours, at 46."""
    wide, narrow = in_terminal(80, "demo"), in_terminal(46, "demo", NO_COLOR="1")
    screens, left, right = screens_of(wide, 80), slice(0, 40), slice(40, 80)
    titles = re.compile("one-token +exact *")
    firsts = [next((i for i, line in enumerate(screen) if titles.fullmatch(line)), ROWS - 1) for screen in screens]
    below = [screen[first + 1 :] for screen, first in zip(screens, firsts, strict=True)]
    filling = [lines for lines in below if lines and lines[0][left].strip() and not lines[0][right].strip()]
    assert filling and "per second" not in "".join(filling[0])
    assert re.search(r"\x1b\[38;5;\d+m", "".join(wide))

    assert not re.search(r"\x1b\[[0-9;]*(3|9)[0-9][;m]", "".join(narrow))
    last = screens_of(narrow, 46)[-1]
    assert not any(titles.fullmatch(line) for line in last)
    words = answers_in(last)
    assert len(words) == 3 * len(demo.PROMPTS)
    for number, plain in enumerate(answers_in([line[left] for line in screens[-1]])[::2]):
        assert plain == words[3 * number], "a word is cut"
    assert " ".join(" ".join(last).split()).endswith("mars chat, mars serve.")


def test_demo_shows_the_end_of_what_is_higher_than_the_terminal() -> None:
    console = Console(width=40, file=io.StringIO())
    column = demo.Column("exact", [f"line {number}\n" for number in range(30)])
    for height, first in ((None, "line 0"), (16, "line 22")):
        with console.capture() as shown:
            console.print(demo.side_by_side(console, [column], 36, height))
        lines = [line.strip(" │") for line in shown.get().splitlines()]
        assert (lines[0], lines[1], "line 29" in lines) == ("exact", first, True)


@pytest.mark.parametrize(
    ("forwards", "seconds", "says"),
    [
        (10, 0.5, "in 1 of 2 answers, with 2.0 tokens per forward, at 2.0 times the speed. Try next: mars chat,"),
        (10, 1.0, "with 2.0 tokens per forward, but no faster here. Try next: mars demo --dtype bfloat16, mars chat,"),
        (20, 0.5, "with 1.0 tokens per forward, but no faster here. Try next: mars demo --dtype bfloat16, mars chat,"),
    ],
)
def test_demo_claims_no_more_than_was_measured(forwards: int, seconds: float, says: str) -> None:
    plain = RequestOutput(token_ids=[1] * 20, steps=[1] * 20, seconds=1.0)
    exact = RequestOutput(token_ids=[1] * 20, steps=[20 // forwards] * forwards, seconds=seconds)
    other = RequestOutput(token_ids=[2] * 20, steps=[20 // forwards] * forwards, seconds=seconds)
    assert says in demo.verdict([[plain, exact], [plain, other]], "int8")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["hi", "--dial", "warp"], "unknown dial 'warp'"),
        (["hi", "--dial", "threshold=1.5"], "τ must be between 0 and 1"),
        (["hi", "--dial", "relaxed=0"], "δ must be above 0"),
        (["hi", "--model", "/no/such/model"], "there is no folder /no/such/model"),
        (["hi", "--model", "nobody/nothing"], "no model 'nobody/nothing'"),
        (["hi", "--adapter", "/no/such/adapter"], "not an adapter folder"),
        (["hi", "--dial", "exact"], "train it with `mars train`"),
        (["hi", "--window", "forest"], "unknown window"),
        (["hi", "--temperature", "-1"], "temperature"),
        (["hi", "--temperature", "1e308"], "temperature must be between 0 (greedy) and 1e+06"),
        (["hi", "--temperature", "nan"], "temperature must be a finite number"),
        (["hi", "--max-new-tokens", "0"], "max_new_tokens"),
        (["hi", "--min-new-tokens", "999"], "min_new_tokens must be between 0 and max_new_tokens, 256, not 999"),
        (["hi", "--top-p", "0"], "top_p must be above 0 and at most 1, not 0.0"),
        (["hi", "--top-p", "most"], "'--top-p'"),
        (["hi", "--top-k", "-1"], "top_k must be 0 (off) or more, not -1"),
        (["hi", "--min-p", "2"], "min_p must be between 0 and 1, not 2.0"),
        (["hi", "--repetition-penalty", "0"], "repetition_penalty must be between"),
        (["hi", "--presence-penalty", "inf"], "presence_penalty must be a finite number"),
        (["hi", "--frequency-penalty", "1e9"], "frequency_penalty must be between"),
        (["hi", "--logit-bias", "the"], "--logit-bias must be a token's id and a number, such as 42=-5, not 'the'"),
        (["hi", "--logit-bias", "12=1"], "logit_bias names token 12, but the vocabulary has 12 tokens"),
        (["hi", "--topp", "0.5"], "No such option: --topp"),
        ([], "Missing argument 'prompt'"),
        (["", "--json"], "the prompt is empty"),
        (["a" * 300], "shorten the prompt"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], says: str, chat_model: Path, here: Command) -> None:
    model = () if "--model" in arguments else ("--model", str(chat_model))
    assert_one_line(here("generate", *arguments, *model), says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "nowhere.yaml"], "the recipe nowhere.yaml cannot be read"),
        (["train", "RECIPE"], "stages.0.loss.cleen"),
        (["distill", "out.jsonl"], "nothing to answer"),
        (["distill", "out.jsonl", "--prompts", "nowhere.jsonl"], "there is no file nowhere.jsonl"),
        (["distill", "out.jsonl", "--own-prompts", "1", "--temperatures", "hot"], "temperatures"),
        (["distill", "out.jsonl", "--own-prompts", "1", "--rows", "0"], "--rows must be at least 1, not 0"),
        (["serve", "--rows", "0"], "--rows must be at least 1, not 0"),
        (["eval", "--dials", "one-token", "--out", "o", "--rows", "-1"], "--rows must be at least 1, not -1"),
        (["eval", "--dials", "one-token", "--out", "o", "--memory", "0.5"], "a share, which works on a GPU only"),
    ],
)
def test_training_mistakes_are_one_clear_line(
    arguments: list[str], says: str, chat_model: Path, tmp_path: Path, here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stage = "{stage: mars, loss: {cleen: 1}}"
    (tmp_path / "RECIPE").write_text(f"{{model: m, output: o, data: {{train: [d]}}, stages: [{stage}]}}")
    model = () if arguments[0] == "train" else ("--model", str(chat_model))
    assert_one_line(here(*arguments, *model), says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sing"], "No such command 'sing'. (see mars --help)"),
        (["--loud"], "No such option: --loud (see mars --help)"),
        (["bench"], "Missing option '--dials'. (see mars bench --help)"),
    ],
)
def test_an_unknown_command_is_one_clear_line(arguments: list[str], says: str, here: Command) -> None:
    assert_one_line(here(*arguments), says)


def test_sampling_options_do_what_they_say(chat_model: Path, here: Command) -> None:
    def text(*options: str) -> str:
        asked = ("abc", "--model", str(chat_model), "--max-new-tokens", "24", "--ignore-end", *options)
        return here("generate", *asked).stdout.strip()

    greedy, hot = text(), ("--temperature", "5", "--seed", "1")
    assert text(*hot) != greedy
    for narrow in (("--top-k", "1"), ("--top-p", "0.001"), ("--min-p", "1")):
        assert text(*hot, *narrow) == greedy
    first = greedy[0]
    assert first not in text("--logit-bias", f"{'abcdefghij'.index(first)}=-1000")
    assert text("--stop", "zz", "--stop", greedy[3:5]) == greedy[: greedy.index(greedy[3:5])]
    for penalty in ("--repetition-penalty", "--presence-penalty", "--frequency-penalty"):
        assert text(penalty, "1000") != greedy


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_option_of_a_request_can_be_typed(command: str) -> None:
    known = {*inspect.signature(Model.request).parameters, *(each.name for each in fields(SamplingParams))}
    not_typed = {"self", "prompt", "sampling", "sampling_options", "block_size", "min_position"}
    assert known - not_typed <= {each.name for each in get_command(app).commands[command].params}


def test_the_version_is_said_without_importing_torch() -> None:
    done = mars("--version")
    assert re.fullmatch(rf"mars {__version__} \(Python [\d.]+, torch \S+, transformers \S+\)\n", done.stdout)
    imported = "import sys, mars.cli; assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", imported], check=False).returncode == 0


def test_every_help_ends_with_examples_that_can_be_typed(here: Command) -> None:
    group = get_command(app)
    assert here().stdout == here("--help").stdout
    assert all(line in here("--help").stdout for line in FIRST_STEPS)
    for name, command in group.commands.items():
        _, _, examples = here(name, "--help").stdout.partition("Examples:\n")
        lines = [shlex.split(line.partition(" < ")[0], comments=True) for line in examples.splitlines()]
        assert 1 <= len(lines) <= 3
        for program, typed, *arguments in lines:
            assert (program, typed) == ("mars", name)
            command.make_context(name, arguments)  # raises if it cannot be read


@pytest.mark.parametrize("width", [46, 80])
def test_no_help_is_wider_than_the_terminal(width: int, here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for name in ((), *((name,) for name in get_command(app).commands)):
        help_, _, examples = here(*name, "--help").stdout.partition("Examples:\n")
        assert max(map(len, help_.splitlines())) <= width
        assert max(map(len, ["", *examples.splitlines()])) <= 80


def test_a_server_that_cannot_start_says_why(chat_model: Path) -> None:
    done = mars("serve", "--model", str(chat_model), "--port", "0", "--memory", "0.5")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: memory=0.5 is a share, which works on a GPU only")


def test_a_damaged_cache_is_one_clear_line(tmp_path: Path) -> None:
    folder = tmp_path / builtin.builtin_folder().name
    shutil.copytree(builtin.builtin_folder(), folder)
    os.truncate(folder / "model.safetensors", 1000)
    assert_one_line(mars("generate", "hi", MARS_HOME=str(tmp_path)), f"delete {folder} and try again")


def assert_one_line(done: subprocess.CompletedProcess[str], says: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ") and says in lines[0]


def test_verify_says_what_is_the_same_and_what_is_not(here: Command, tmp_path: Path) -> None:
    model, prompts, out = save_chat_model(tmp_path / "tiny", trained=True), tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "cae", "ghij")))
    options = ("verify", str(model), "--prompts", str(prompts), "--max-new-tokens", "16", "--dtype", "float32")
    done = here(*options, "--rows", "1,2", "--out", str(out))
    assert done.returncode == 0 and done.stdout.count("3 of 3") == 6
    assert "What is promised holds: the same text in all 18 answers." in done.stdout
    assert [check["identical"] for check in json.loads(out.read_text())["checks"]] == [3] * 6
    lossy = here(*options, "--rows", "2", "--dials", "threshold=0")
    assert lossy.returncode == 0 and "where one-token alone has" in lossy.stdout
    wrong = here("verify", "--rows", "none")
    assert (wrong.returncode, wrong.stderr) == (2, "error: --rows must be whole numbers of 1 or more, not 'none'\n")
