"""The command ``mars``: read arguments, call the package, print what came out."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from mars.errors import MarsError, how_to_install

if TYPE_CHECKING:
    from mars.api import Model, Stream
    from mars.core.output import RequestOutput

COLOURS = ("bright_cyan", "bright_yellow", "bright_green", "bright_magenta")
DEMO_PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Tom has 3 boxes with 12 apples each. He eats 5 apples. How many apples are left?",
    "List the planets of the solar system in order from the sun.",
)
DEMO_DIALS = ("one-token", "exact", "threshold=0.9")
DEMO_TOKENS = 64
DEFAULT_URL = "http://127.0.0.1:8000"
CHAT_HELP = "/dial DIAL sets the dial, /system TEXT sets the system prompt, /reset forgets the chat, /exit leaves"
VLLM_OPTIONS = ("model", "adapter", "dial", "host", "port", "max_num_seqs", "memory", "api_key", "name")
"""Of ``mars serve``, known to both engines"""

app = typer.Typer(
    help="Several tokens per forward pass from any instruct language model.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
ModelOption = Annotated[str, Option("--model", help="Hub id, folder, .gguf file, or smollm2-135m (built in).")]
AdapterOption = Annotated[str | None, Option("--adapter", help="Gated adapter (folder or hub id), or peft's to merge.")]
DialOption = Annotated[
    str | None,
    Option("--dial", help="one-token, exact, relaxed=0.3 or threshold=0.9; default: the model's own."),
]
WindowOption = Annotated[
    str | None,
    Option("--window", help="chain, tree, or tree=N with N mask groups; default: the fastest here and now."),
]
EngineOption = Annotated[
    Literal["mars", "vllm"], Option("--engine", help="What decodes: mars, or vLLM with our plugin.")
]
DtypeOption = Annotated[
    str | None, Option("--dtype", help="bfloat16, float16, float32, or int8 on a CPU; default: the device's.")
]


def _at_least_one(rows: int) -> int:
    if rows < 1:
        raise MarsError(f"--rows must be at least 1, not {rows}")
    return rows


RowsOption = Annotated[int, Option("--rows", help="Requests that are decoded together.", callback=_at_least_one)]
MemoryOption = Annotated[float | None, Option("--memory", help="Cache: bytes, or on a GPU a share of what is free.")]
TokensOption = Annotated[int, Option("--max-new-tokens", help="Longest answer, in tokens.")]
TemperatureOption = Annotated[float, Option("--temperature", help="0 is greedy.")]
SeedOption = Annotated[int | None, Option("--seed", help="Makes sampling repeatable.")]
SystemOption = Annotated[str | None, Option("--system", help="System prompt.")]


@app.command()
def generate(
    prompt: Annotated[str, Argument(help="What to answer; - reads it from standard input.")],
    model: ModelOption = "smollm2-135m",
    adapter: AdapterOption = None,
    dial: DialOption = None,
    window: WindowOption = None,
    max_new_tokens: TokensOption = 256,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = None,
    system: SystemOption = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
    show_steps: Annotated[bool, Option("--show-steps", help="Colour the text by forward.")] = False,
) -> None:
    """Answer one prompt."""
    loaded = _warm(_load(model, adapter, dial))
    stream = loaded.stream(
        sys.stdin.read() if prompt == "-" else prompt,
        dial=dial,
        window=window,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        system=system,
    )
    console = Console(soft_wrap=True, highlight=False)
    if as_json:
        typer.echo(json.dumps(stream.result.as_dict(), ensure_ascii=False))
    elif show_steps:
        console.print(coloured(stream.result))
        console.print(_summary(stream.result), style="dim")
    else:
        _print_pieces(stream)


@app.command()
def chat(
    model: ModelOption = "smollm2-135m",
    adapter: AdapterOption = None,
    dial: DialOption = None,
    window: WindowOption = None,
    max_new_tokens: TokensOption = 512,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = None,
    system: SystemOption = None,
) -> None:
    """Chat in the terminal; /dial sets the dial for the answers that follow."""
    console = Console(soft_wrap=True, highlight=False)
    loaded = _warm(_load(model, adapter, dial))
    setting = loaded.dial(dial)
    history: list[dict[str, str]] = []
    console.print(f"{model}, dial {setting}. {CHAT_HELP}.", style="dim", markup=False)
    while (line := _read_line()) is not None:
        command, _, rest = line.partition(" ")
        try:
            if command == "/exit":
                break
            if command == "/reset":
                history = []
            elif command == "/system":
                system = rest or None
            elif command == "/dial":
                setting = loaded.dial(rest)
                console.print(f"dial {setting}", style="dim")
            elif command.startswith("/"):
                console.print(CHAT_HELP, style="dim", markup=False)
            elif line:
                asked = [*history, {"role": "user", "content": line}]
                options = {"dial": setting, "window": window, "max_new_tokens": max_new_tokens, "system": system}
                answer = _say(console, loaded, asked, temperature=temperature, seed=seed, **options)
                history = [*asked, {"role": "assistant", "content": answer}]
        except MarsError as error:
            console.print(f"error: {error}", style="red", markup=False)


@app.command()
def train(recipe: Annotated[Path, Argument(help="A recipe in YAML; see docs/guides/training.md.")]) -> None:
    """Train a model by a recipe; started again after a kill, it goes on where it stopped."""
    from mars.training.recipe import read_recipe

    what = read_recipe(recipe)  # a mistake is told before the slow imports
    from transformers.utils import logging

    from mars.training.run import train as run

    logging.disable_progress_bar()  # training shows its own
    run(what)


@app.command()
def distill(
    out: Annotated[Path, Argument(help="JSONL file to write; if it is there, it is continued.")],
    model: ModelOption = "smollm2-135m",
    adapter: AdapterOption = None,
    prompts: Annotated[list[str] | None, Option(help="File, folder or hub name; may be given again.")] = None,
    own_prompts: Annotated[int, Option(help="Prompts that the model generates itself.")] = 0,
    temperatures: Annotated[str, Option(help="One answer to every prompt at each of these.")] = "0,0.8",
    max_new_tokens: TokensOption = 256,
    max_prompt_tokens: Annotated[int, Option(help="Longer prompts are left out.")] = 512,
    min_tokens: Annotated[int, Option(help="Shorter answers are left out.")] = 4,
    max_repetition: Annotated[float, Option(help="Largest share of repeated four-token sequences.")] = 0.6,
    drop_cut: Annotated[bool, Option("--drop-cut", help="Leave out answers that hit the limit.")] = False,
    max_num_seqs: RowsOption = 64,
    seed: SeedOption = 0,
) -> None:
    """Generate training data with the model that is to be trained: answers, and prompts too."""
    from mars.training.distill import Distillation, Filters
    from mars.training.distill import distill as run

    filters = Filters(min_tokens, max_prompt_tokens, max_repetition, keep_cut=not drop_cut)
    try:
        heats = [float(each) for each in temperatures.split(",")]
    except ValueError:
        raise MarsError(f"--temperatures must be numbers with commas between them, not {temperatures!r}") from None
    plan = Distillation(heats, max_new_tokens, own_prompts, max_num_seqs, seed or 0, filters)
    counts = run(_load(model, adapter, None).checkpoint, prompts or [], out, plan)
    typer.echo(f"{out}: " + ", ".join(f"{count} {name}" for name, count in counts.items()))


@app.command()
def bench(
    dials: Annotated[str, Option(help='Dials with commas between; a window may follow one: "exact tree".')],
    batch_sizes: Annotated[str, Option(help="How many requests run at once, with commas between.")],
    out: Annotated[Path, Option(help="JSON file to write; a table and plots go beside it.")],
    model: ModelOption = "smollm2-135m",
    adapter: AdapterOption = None,
    prompts: Annotated[Path | None, Option(help="JSONL file of prompts or messages; default: built in.")] = None,
    peers: Annotated[
        str | None, Option(help="Of transformers, vllm, block-cache=16, sliding-window, with commas between.")
    ] = None,
    max_new_tokens: TokensOption = 256,
    dtype: DtypeOption = None,
    min_requests: Annotated[int, Option(help="Fewest requests of a measurement.")] = 16,
    engine: EngineOption = "mars",
    by_category: Annotated[
        bool, Option("--by-category", help="Measure each category of the prompts by itself.")
    ] = False,
) -> None:
    """Measure dials and peers side by side: speed, cost of a forward, agreement."""
    options = dict(locals())
    from mars.evaluation.bench import bench as run
    from mars.evaluation.plan import make_plan
    from mars.evaluation.tables import bench_table, show

    plan = make_plan(**options)
    rows, files = run(_load(model, adapter, None, dtype).checkpoint, plan)
    show(bench_table(rows))
    typer.echo("wrote " + ", ".join(map(str, files)))


@app.command("eval")
def evaluate(
    dials: Annotated[str, Option(help="Dials with commas between; the others are compared with the first.")],
    out: Annotated[Path, Option(help="Folder to write; if it is there, it is continued.")],
    model: ModelOption = "smollm2-135m",
    adapter: AdapterOption = None,
    tasks: Annotated[
        str, Option(help="Of ifeval, bbh, mmlu_pro, gpqa, gsm8k, humaneval, with commas between; or all.")
    ] = "all",
    data: Annotated[Path | None, Option("--data-dir", help="Folder of benchmark files; default: from the hub.")] = None,
    limit: Annotated[str | None, Option(help="Items of each task, or such as gsm8k=200,bbh=500.")] = None,
    max_new_tokens: TokensOption = 256,
    block_size: Annotated[int | None, Option(help="Tokens a forward predicts; default: as trained.")] = None,
    dtype: DtypeOption = None,
    max_num_seqs: RowsOption = 64,
    memory: MemoryOption = None,
    name: Annotated[str | None, Option(help="What a report calls the model; default: as given.")] = None,
    seed: Annotated[int, Option(help="Of the items that a limit leaves.")] = 0,
    engine: EngineOption = "mars",
    score_only: Annotated[bool, Option("--score-only", help="Score what is there; needs no model.")] = False,
) -> None:
    """Score a model on the benchmarks with every dial; started again after a kill, it goes on where it stopped."""
    options = dict(locals())
    del options["memory"], options["score_only"]
    from mars.evaluation.bench import progress_bar
    from mars.evaluation.evaluate import evaluate as run
    from mars.evaluation.evaluate import plan_evaluation, score, table
    from mars.evaluation.tables import show

    plan = plan_evaluation(**options)
    loaded = None if score_only else _load(model, adapter, None, dtype, max_num_seqs=max_num_seqs, memory=memory)
    with progress_bar() as bar:
        results = score(plan, bar) if loaded is None else run(loaded, plan, bar)
    show(table(results), names=2)
    typer.echo(f"wrote {out / 'results.json'}, {out / 'results.md'}")


@app.command()
def report(
    sources: Annotated[list[Path], Argument(help="Folders of mars eval and JSON files of mars bench.")],
    out: Annotated[Path, Option(help="Folder to write: report.md, report.html and plots.")],
) -> None:
    """Put results together on one page, in Markdown and in HTML."""
    try:
        import matplotlib  # noqa: F401

        from mars.evaluation.report import report as run
    except ImportError as error:
        raise MarsError(f"a report needs more packages ({error.name}): {how_to_install('bench')}") from None
    typer.echo("wrote " + ", ".join(map(str, run(sources, out))))


@app.command(context_settings={"allow_extra_args": True})
def serve(
    context: typer.Context,
    model: ModelOption = "smollm2-135m",
    adapter: AdapterOption = None,
    dial: DialOption = None,
    floor: Annotated[str | None, Option(help="Loosest dial that may be asked for.")] = None,
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535)] = 8000,
    max_num_seqs: RowsOption = 64,
    memory: MemoryOption = None,
    dtype: DtypeOption = None,
    max_waiting: Annotated[int, Option(help="Requests that may wait; more get a 429.")] = 256,
    max_new_tokens: Annotated[int | None, Option(help="Longest answer allowed.")] = None,
    api_key: Annotated[str | None, Option(envvar="MARS_API_KEY", help="Needed by all requests, if given.")] = None,
    admin_key: Annotated[str | None, Option(envvar="MARS_ADMIN_KEY", help="Needed to set the server's dial.")] = None,
    name: Annotated[str | None, Option(help="What the model is called; default: as given.")] = None,
    target_token: Annotated[float, Option(min=1e-6, help="With --dial auto: most seconds per token.")] = 0.05,
    target_wait: Annotated[float, Option(min=1e-6, help="With --dial auto: most seconds to the first token.")] = 1.0,
    log_level: Annotated[
        Literal["debug", "info", "warning"], Option(help="Of the log, whose lines are JSON.")
    ] = "info",
    log_prompts: Annotated[bool, Option("--log-prompts", help="Have prompts and answers in the log.")] = False,
    max_connections: Annotated[int, Option(min=1, help="Connections that may be open at a time.")] = 1000,
    allowed_host: Annotated[
        list[str] | None, Option(help="Name that clients may call the server by; may be given again.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, Option(help="Origin of pages that may use the server; may be given again.")
    ] = None,
    engine: EngineOption = "mars",
) -> None:
    """Serve a model with OpenAI's API. --dial auto leaves the dial to the load, between exact and --floor.

    With --engine vllm, vLLM's own options may follow behind --.
    """
    options = dict(locals())
    del options["context"], options["engine"]
    if engine == "vllm":
        raise typer.Exit(_serve_vllm(context, options))
    if context.args:
        raise MarsError(f"unexpected argument {context.args[0]!r}: only --engine vllm takes options of another kind")
    _serve(**options)


def _serve_vllm(context: typer.Context, options: dict[str, Any]) -> int:
    from mars.method.acceptance import Dial

    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in (*VLLM_OPTIONS, "engine") and source is not None and source.name != "DEFAULT":
            raise MarsError(f"--{name.replace('_', '-')} is not known to the engine vllm: leave it out")
    if options["dial"] is not None:
        Dial.parse(options["dial"])
    from mars.integrations.vllm import launch

    return launch.serve(**{name: options[name] for name in VLLM_OPTIONS}, others=context.args)


def _serve(dial: str | None, floor: str | None, target_token: float, target_wait: float, **options: Any) -> None:
    from mars.method.acceptance import Dial

    try:
        from mars.serving.governor import Target
        from mars.serving.protocol import AUTO
        from mars.serving.server import Serving, run
    except ImportError as error:
        raise MarsError(f"serving needs more packages ({error.name}): {how_to_install('serve')}") from None
    run(
        Serving(
            dial=None if dial in (None, AUTO) else Dial.parse(dial),
            floor=None if floor is None else Dial.parse(floor),
            auto=dial == AUTO,
            target=Target(target_token, target_wait),
            **options,
        )
    )


@app.command("dial")
def set_dial(
    dial: Annotated[str | None, Argument(help="The new dial; without one, the dial is only shown.")] = None,
    url: Annotated[
        list[str] | None,
        Option("--url", help=f"Where mars serve listens, {DEFAULT_URL} unless given; may be given again."),
    ] = None,
    key: Annotated[str | None, Option("--key", envvar="MARS_ADMIN_KEY", help="The server's admin key.")] = None,
) -> None:
    """Show or set the dial of a running server, or of several."""
    from mars.method.acceptance import Dial
    from mars.serving.remote import dials_of

    urls = url or [DEFAULT_URL]
    for each, state in dials_of(urls, key, dial if dial in (None, "auto") else str(Dial.parse(dial))):
        name = f"{each}: " if len(urls) > 1 else ""
        floor = f", nothing looser than {state['floor']}" if state["floor"] else ""
        shown = f"auto (now {state['dial']})" if state.get("auto") else state["dial"]
        typer.echo(f"{name}{shown}{floor}")


@app.command()
def demo() -> None:
    """Show one-token, exact and threshold side by side on the built-in model."""
    console = Console(highlight=False)
    console.print(
        "[bold]MARS[/]: several tokens per forward pass. Each colour is one forward. The model is smollm2-135m; "
        "text and speed come from this machine, now. Code, sums and lists, as here, gain most; free prose gains "
        "least.\n"
    )
    model = _warm(_load("smollm2-135m", None, None))
    model.generate("Hello", max_new_tokens=4)  # the first forwards of a process are slow: keep them out of the table
    speeds = []
    for prompt in DEMO_PROMPTS:
        answers = []
        for dial in DEMO_DIALS:
            with console.status(f"{dial}: {prompt}"):
                answers.append(model.generate(prompt, dial=dial, max_new_tokens=DEMO_TOKENS))
        texts = Table(expand=True, box=None, padding=(0, 1))
        table = Table("dial", "tokens per forward", "tokens per second", "agreement", "same text as one-token")
        for answer in answers:
            texts.add_column(answer.dial, ratio=1, overflow="fold")
            same = "yes" if answer.token_ids == answers[0].token_ids else "no"
            numbers = (answer.tokens_per_forward, answer.tokens_per_second, answer.agreement)
            table.add_row(answer.dial, *(f"{number:.2f}" for number in numbers), same)
        texts.add_row(*map(coloured, answers))
        console.rule(prompt, style="dim")
        console.print(texts)
        console.print(table)
        speeds.append(answers[0].tokens_per_second)
    console.print(_memory_speed(model, max(speeds)), style="dim")


def _memory_speed(model: Model, tokens_per_second: float) -> str:
    """What one token at a time takes from memory, beside what memory gives."""
    from mars.evaluation.provenance import machine
    from mars.evaluation.speed import copy_bandwidth

    weights, checkpoint = model.engine().weight_bytes, model.checkpoint
    read, copied = weights * tokens_per_second, copy_bandwidth(checkpoint.device)
    return (
        f"{machine()}. One token at a time reads {weights / 1e6:.0f} MB of weights per token ({checkpoint.form}) at "
        f"{read / 1e9:.1f} GB/s, {read / copied:.0%} of what a copy in memory reads and writes."
    )


def coloured(answer: RequestOutput) -> Text:
    """The text with every forward's tokens in one colour."""
    return Text.assemble(*((piece, COLOURS[step % len(COLOURS)]) for step, piece in enumerate(answer.pieces)))


def _summary(answer: RequestOutput) -> str:
    return (
        f"{answer.num_tokens} tokens in {answer.forwards} forwards: {answer.tokens_per_forward:.2f} per forward, "
        f"{answer.tokens_per_second:.1f} per second, agreement {answer.agreement:.2f}, dial {answer.dial}"
    )


def _load(model: str, adapter: str | None, dial: str | None, dtype: str | None = None, **options: Any) -> Model:
    """Load a model. The dial is checked first: a typing mistake should not cost a download."""
    from transformers.utils import logging

    from mars.api import load
    from mars.method.acceptance import Dial
    from mars.models import builtin

    if dial is not None:
        Dial.parse(dial)
    built_in = model in (builtin.NAME, builtin.BASE)
    if built_in:
        builtin.fetch()  # shows its own progress
    if not built_in and sys.stderr.isatty():
        return load(model, adapter=adapter, dtype=dtype, **options)  # may be gigabytes: transformers shows its bars
    logging.disable_progress_bar()
    with Console(stderr=True).status(f"Loading {model} …"):
        return load(model, adapter=adapter, dtype=dtype, **options)


def _warm(model: Model) -> Model:
    """Get the engine ready for one request at a time: a GPU's graphs, a CPU's compiled step."""
    took = "a minute" if model.checkpoint.device.type == "cuda" else "some seconds"
    with Console(stderr=True).status(f"Warming up, which takes {took} the first time …"):
        model.warm_up(num_seqs=1)
    return model


def _say(console: Console, model: Model, messages: list[dict[str, str]], **options: object) -> str:
    """Stream one answer; Ctrl-C ends it but keeps the text so far."""
    stream = model.stream(messages, **options)
    try:
        _print_pieces(stream)
        console.print(_summary(stream.result), style="dim")
    except KeyboardInterrupt:
        console.print(" …", style="dim")
    return stream.text


def _print_pieces(stream: Stream) -> None:
    """Print text as it comes, without wrapping or markup."""
    for piece in stream:
        print(piece, end="", flush=True)
    print()


def _read_line() -> str | None:
    """The next line the user types, with arrow keys where readline is there, or None at the end of the input."""
    with suppress(ImportError):
        import readline  # noqa: F401
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def main() -> None:
    """Run the command line; a user's mistake is one line and exit code 2, never a traceback."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    try:
        app()
    except MarsError as error:
        message = " ".join(str(error).split())
        typer.echo(f"error: {message}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
