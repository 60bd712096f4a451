"""``mars generate``."""

import json
import sys
from typing import Annotated, Any

import typer
from typer import Argument, Option

from mars.cli.loading import load_warm
from mars.cli.options import AdapterOption, DtypeOption, ModelOption, TokensOption, takes_request_options
from mars.cli.output import print_pieces, remark, stdout, summary


@takes_request_options
def generate(
    prompt: Annotated[str, Argument(help="What to answer; - reads it from standard input.")],
    options: dict[str, Any],
    model: ModelOption = "smollm2-135m",
    adapter: AdapterOption = None,
    dtype: DtypeOption = None,
    max_new_tokens: TokensOption = 256,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
    show_steps: Annotated[
        bool, Option("--show-steps", help="Mark the text by forward: with colours, or bars where there are none.")
    ] = False,
) -> None:
    """Answer one prompt."""
    question = sys.stdin.read() if prompt == "-" else prompt
    stream = load_warm(model, adapter, dtype=dtype).stream(question, max_new_tokens=max_new_tokens, **options)
    if as_json:
        typer.echo(json.dumps(stream.result.as_dict(), ensure_ascii=False))
        return
    console = stdout()
    print_pieces(console, stream, marked=show_steps)
    if show_steps:
        remark(console, summary(stream.result))
