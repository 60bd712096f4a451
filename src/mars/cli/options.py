"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Literal

from typer import Option

from mars.errors import MarsError

ModelOption = Annotated[str, Option("--model", help="Hub id, folder, .gguf file, or smollm2-135m (built in).")]
AdapterOption = Annotated[str | None, Option("--adapter", help="Gated adapter (folder or hub id), or peft's to merge.")]
DialOption = Annotated[
    str | None,
    Option("--dial", help="one-token, exact, relaxed=0.3 or threshold=0.9; default: the model's own."),
]
EngineOption = Annotated[
    Literal["mars", "vllm"], Option("--engine", help="What decodes: mars, or vLLM with our plugin.")
]
DtypeOption = Annotated[
    str | None, Option("--dtype", help="bfloat16, float16, float32, or int8 on a CPU; default: the device's.")
]
MemoryOption = Annotated[float | None, Option("--memory", help="Cache: bytes, or on a GPU a share of what is free.")]
InvariantOption = Annotated[
    bool, Option("--batch-invariant", help="On a GPU: kernels whose bits do not depend on the other requests.")
]
TokensOption = Annotated[int, Option("--max-new-tokens", help="Longest answer, in tokens.")]
SeedOption = Annotated[int | None, Option("--seed", help="Makes sampling repeatable.")]


def _at_least_one(rows: int) -> int:
    if rows < 1:
        raise MarsError(f"--rows must be at least 1, not {rows}")
    return rows


RowsOption = Annotated[int, Option("--rows", help="Requests that are decoded together.", callback=_at_least_one)]


def request_options(
    dial: DialOption = None,
    window: Annotated[
        str | None,
        Option(
            help="chain, tree, or tree=N with N mask groups; +N for N candidates; default: the fastest here and now."
        ),
    ] = None,
    lookup: Annotated[
        int | None, Option(help="Most drafts of exact, the text's own among them; 0: from masks alone.")
    ] = None,
    system: Annotated[str | None, Option(help="System prompt.")] = None,
    stop: Annotated[
        list[str] | None, Option(metavar="TEXT", help="Text that ends the answer; may be given again.")
    ] = None,
    min_new_tokens: Annotated[int | None, Option(help="Shortest answer, in tokens.")] = None,
    ignore_end: Annotated[bool, Option("--ignore-end", help="Go on after the end token.")] = False,
    temperature: Annotated[float | None, Option(help="0, the default, is greedy.")] = None,
    top_k: Annotated[int | None, Option(help="Sample from so many of the likeliest tokens.")] = None,
    top_p: Annotated[float | None, Option(help="… from the likeliest that have this probability together.")] = None,
    min_p: Annotated[float | None, Option(help="… from those with this share of the highest probability.")] = None,
    repetition_penalty: Annotated[float | None, Option(help="Of tokens in prompt or answer; 1 is off.")] = None,
    presence_penalty: Annotated[float | None, Option(help="Of tokens in the answer; 0 is off.")] = None,
    frequency_penalty: Annotated[float | None, Option(help="… for every time they are in it.")] = None,
    logit_bias: Annotated[
        list[str] | None, Option(metavar="ID=BIAS", help="Added to a token's logit; may be given again.")
    ] = None,
    seed: SeedOption = None,
) -> dict[str, Any]:
    """The options of `mars.Model.request` as they are typed; None stands for a default."""
    options = dict(locals())
    options["stop"] = stop or None
    options["logit_bias"] = dict(map(_bias, logit_bias)) if logit_bias else None
    return options


def takes_request_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `request_options` to the options of a command, which gets all of them as one argument, ``options``."""
    shared = signature(request_options, eval_str=True).parameters
    own = [each for name, each in signature(command, eval_str=True).parameters.items() if name != "options"]
    parameters: list[Parameter] = [*own, *shared.values()]

    @wraps(command)
    def typed(**given: Any) -> None:
        options = request_options(**{name: given.pop(name) for name in shared})
        check(options)
        command(**given, options=options)

    typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    typed.__annotations__ = {each.name: each.annotation for each in parameters}
    return typed


def check(options: dict[str, Any]) -> None:
    """Raise if a dial or a sampling option makes no sense: a typing mistake should not cost a download."""
    from dataclasses import fields

    from mars.method.acceptance import Dial
    from mars.method.sampling import SamplingParams

    if options["dial"] is not None:
        Dial.parse(options["dial"])
    known = (each.name for each in fields(SamplingParams))
    SamplingParams(**{name: options[name] for name in known if options.get(name) is not None})


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise MarsError(f"--logit-bias must be a token's id and a number, such as 42=-5, not {text!r}") from None
