"""``mars serve`` and ``mars dial``."""

from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from mars.cli.options import (
    AdapterOption,
    DialOption,
    DtypeOption,
    EngineOption,
    InvariantOption,
    MemoryOption,
    ModelOption,
    RowsOption,
)
from mars.errors import MarsError, how_to_install

DEFAULT_URL = "http://127.0.0.1:8000"
VLLM_OPTIONS = ("model", "adapter", "dial", "host", "port", "max_num_seqs", "memory", "api_key", "name")
"""Of ``mars serve``, known to both engines"""


def serve(
    context: typer.Context,
    model: ModelOption = "smollm2-135m",
    adapter: AdapterOption = None,
    dial: DialOption = None,
    floor: Annotated[str | None, Option(help="Loosest dial that may be asked for.")] = None,
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    max_num_seqs: RowsOption = 64,
    memory: MemoryOption = None,
    dtype: DtypeOption = None,
    batch_invariant: InvariantOption = False,
    max_waiting: Annotated[int, Option(min=0, help="Requests that may wait; more get a 429.")] = 256,
    max_new_tokens: Annotated[int | None, Option(min=1, help="Longest answer allowed.")] = None,
    api_key: Annotated[str | None, Option(envvar="MARS_API_KEY", help="Needed by requests to the API.")] = None,
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
        list[str] | None, Option(metavar="NAME", help="Name that clients may call the server by; may be given again.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, Option(metavar="URL", help="Origin of pages that may use the server; may be given again.")
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


def set_dial(
    dial: Annotated[str | None, Argument(help="The new dial; without one, the dial is only shown.")] = None,
    url: Annotated[
        list[str] | None,
        Option(
            "--url", metavar="URL", help=f"Where mars serve listens, {DEFAULT_URL} unless given; may be given again."
        ),
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
