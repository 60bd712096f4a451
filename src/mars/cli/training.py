"""``mars train`` and ``mars distill``."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from mars.cli.loading import load
from mars.cli.options import AdapterOption, ModelOption, RowsOption, SeedOption, TokensOption
from mars.errors import MarsError


def train(recipe: Annotated[Path, Argument(help="A recipe in YAML; see docs/guides/training.md.")]) -> None:
    """Train a model by a recipe. Started again after a kill, it goes on where it stopped."""
    from mars.training.recipe import read_recipe

    what = read_recipe(recipe)  # a mistake is told before the slow imports
    from transformers.utils import logging

    from mars.training.run import train as run

    logging.disable_progress_bar()  # training shows its own
    run(what)


def distill(
    out: Annotated[Path, Argument(help="JSONL file to write; if it is there, it is continued.")],
    model: ModelOption = "smollm2-135m",
    adapter: AdapterOption = None,
    prompts: Annotated[
        list[str] | None, Option(metavar="NAME", help="File, folder or hub name; may be given again.")
    ] = None,
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
    counts = run(load(model, adapter).checkpoint, prompts or [], out, plan)
    typer.echo(f"{out}: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
