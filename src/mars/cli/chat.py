"""``mars chat``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from typer import Option

from mars.cli.loading import load_warm
from mars.cli.options import AdapterOption, DtypeOption, ModelOption, TokensOption, takes_request_options
from mars.cli.output import has_colours, print_pieces, remark, stdout, summary
from mars.errors import MarsError

if TYPE_CHECKING:
    from mars.api import Model

COMMANDS = {
    "/dial": "show the dial and which there are; /dial exact sets it",
    "/system": "show the system prompt; /system TEXT sets it, /system none takes it away",
    "/reset": "forget the chat so far",
    "/help": "show this",
    "/exit": "leave, as Ctrl-D does; Ctrl-C ends an answer",
}
DIALS = {
    "one-token": "one token per forward",
    "exact": "several tokens, each the model's own choice",
    "relaxed=0.3": "also drafts with at least 0.3 times the highest probability",
    "threshold=0.9": "predictions with a confidence of at least 0.9, unchecked",
}


@takes_request_options
def chat(
    options: dict[str, Any],
    model: ModelOption = "smollm2-135m",
    adapter: AdapterOption = None,
    dtype: DtypeOption = None,
    max_new_tokens: TokensOption = 512,
    show_steps: Annotated[
        bool | None,
        Option(
            "--show-steps/--no-show-steps",
            help="Mark the text by forward: with colours, or bars where there are none; default: with colours only.",
        ),
    ] = None,
) -> None:
    """Chat in the terminal. Type /help there for its commands."""
    console = stdout()
    loaded = load_warm(model, adapter, dtype=dtype)
    options |= {"dial": loaded.dial(options["dial"]), "max_new_tokens": max_new_tokens}
    talk = Chat(console, loaded, options, has_colours(console) if show_steps is None else show_steps)
    colours = " Each colour is one forward." if talk.marked and has_colours(console) else ""
    remark(console, f"{model}, dial {options['dial']}.{colours} /help lists the commands.")
    while (line := _read_line()) not in (None, "/exit"):
        try:
            talk.take(line)
        except MarsError as error:
            remark(console, f"error: {error}", "red")


@dataclass
class Chat:
    """A conversation, and what is set for its next answers."""

    console: Console
    model: Model
    options: dict[str, Any]  # of `mars.Model.request`
    marked: bool  # by forward
    history: list[dict[str, str]] = field(default_factory=list)

    def take(self, line: str) -> None:
        """Answer a line, or do what it commands."""
        command, _, rest = line.partition(" ")
        match command:
            case "/dial":
                self.dial(rest.strip())
            case "/system":
                self.system(rest.strip())
            case "/reset":
                count, self.history = len(self.history), []
                remark(self.console, f"forgot {count} messages; the dial and the system prompt stay")
            case "/help":
                self.list(COMMANDS)
            case _ if command.startswith("/"):
                remark(self.console, f"unknown command {command}: there are {', '.join(COMMANDS)}")
            case _ if line:
                self.answer(line)

    def dial(self, wanted: str) -> None:
        if wanted:
            self.options["dial"] = self.model.dial(wanted)
        remark(self.console, f"dial {self.options['dial']}")
        if not wanted:
            self.list({f"/dial {dial}": what for dial, what in DIALS.items()})

    def system(self, wanted: str) -> None:
        if wanted:
            self.options["system"] = None if wanted == "none" else wanted
        prompt = self.options["system"]
        remark(self.console, f"system prompt: {prompt}" if prompt else "no system prompt")

    def answer(self, question: str) -> None:
        """Stream one answer; Ctrl-C ends it but keeps the text so far."""
        asked = [*self.history, {"role": "user", "content": question}]
        stream = self.model.stream(asked, **self.options)
        try:
            print_pieces(self.console, stream, marked=self.marked)
            remark(self.console, summary(stream.result))
        except KeyboardInterrupt:
            remark(self.console, " …")
        self.history = [*asked, {"role": "assistant", "content": stream.text}]

    def list(self, meanings: Mapping[str, str]) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        for name, meaning in meanings.items():
            table.add_row(name, meaning)
        remark(self.console, table)


def _read_line() -> str | None:
    """The next line the user types, with arrow keys where readline is there, or None at the end of the input."""
    with suppress(ImportError):
        import readline  # noqa: F401
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        return None
