"""The commands, their help, and how they end."""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from shutil import get_terminal_size
from typing import Annotated, Any

import typer
from typer import Option

from mars import __version__
from mars.cli.chat import chat
from mars.cli.demo import demo
from mars.cli.evaluation import bench, evaluate, report, verify
from mars.cli.generate import generate
from mars.cli.serving import serve, set_dial
from mars.cli.training import distill, train
from mars.errors import MarsError

FIRST_STEPS = (
    "mars demo    # the dials, side by side",
    "mars chat    # with a small model",
    "mars serve   # OpenAI's API, a chat page",
)


def examples(*lines: str, title: str = "Examples") -> str:
    """The end of a help text; \\b keeps it from being wrapped."""
    return "\b\n" + "\n  ".join((f"{title}:", *lines))


app = typer.Typer(
    help="Several tokens per forward pass from any instruct language model.",
    epilog=examples(*FIRST_STEPS, title="First steps"),
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
        typer.echo(f"mars {__version__} (Python {platform.python_version()}, {packages})")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def first(
    context: typer.Context,
    _version: Annotated[
        bool, Option("--version", help="Show the version and exit.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def add(run: Callable[..., None], *lines: str, name: str | None = None, **settings: Any) -> None:
    """Make a function a command, with examples in its help."""
    short = (run.__doc__ or "").partition(".")[0] + "."
    app.command(name, epilog=examples(*lines), short_help=short, **settings)(run)


add(demo, "mars demo", "mars demo --dtype int8")
add(
    generate,
    'mars generate "Write a haiku about the sea." --temperature 0.7 --top-p 0.9',
    'mars generate "Count from 1 to 20." --dial exact --show-steps',
    "mars generate - --json < question.txt",
)
add(chat, "mars chat", 'mars chat --dial exact --system "Answer in one sentence."')
add(
    serve,
    "mars serve",
    "mars serve --dial auto --floor relaxed=0.3 --port 8001",
    "mars serve --engine vllm -- --tensor-parallel-size 2",
    context_settings={"allow_extra_args": True},
)
add(set_dial, "mars dial", "mars dial relaxed=0.3 --url http://127.0.0.1:8000", name="dial")
add(distill, "mars distill data.jsonl --own-prompts 100")
add(train, "mars train recipes/smollm2-135m.yaml")
add(verify, "mars verify", "mars verify --rows 1,4 --temperature 0.8")
add(evaluate, "mars eval --dials one-token,exact --tasks gsm8k --limit 20 --out mine", name="eval")
add(
    bench,
    "mars bench --dials one-token,exact --batch-sizes 1,4 --out bench.json",
    'mars bench --dials "exact,exact tree" --batch-sizes 1 --out windows.json',
)
add(report, "mars report mine bench.json --out report")


def main() -> None:
    """Run the command line; a user's mistake is one line and exit code 2, never a traceback."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)  # what one library does to another is not the user's concern
    try:
        width = min(get_terminal_size().columns, 80) - 2
        sys.exit(app(prog_name="mars", standalone_mode=False, terminal_width=width) or 0)
    except MarsError as error:
        _complain(str(error))
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        _complain(f"{error.format_message()} (see {context.command_path if context else 'mars'} --help)")


def _complain(message: str) -> None:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(2)
