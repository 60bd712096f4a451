"""``mars verify``, ``mars eval``, ``mars bench`` and ``mars report``."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from mars.cli.loading import load
from mars.cli.options import (
    AdapterOption,
    DtypeOption,
    EngineOption,
    InvariantOption,
    MemoryOption,
    ModelOption,
    RowsOption,
    SeedOption,
    TokensOption,
)
from mars.errors import MarsError, how_to_install


def verify(
    model: Annotated[str, Argument(help="Hub id, folder, .gguf file, or smollm2-135m (built in).")] = "smollm2-135m",
    adapter: AdapterOption = None,
    prompts: Annotated[Path | None, Option(help="JSONL file of prompts or messages; default: built in.")] = None,
    dials: Annotated[
        str, Option(help="Dials with commas between; a window may follow one.")
    ] = "one-token,exact chain,exact tree",
    rows: Annotated[str, Option(help="How many requests run at once, with commas between.")] = "1,8,32",
    max_new_tokens: TokensOption = 64,
    temperature: Annotated[float | None, Option(help="0, the default, is greedy.")] = None,
    seed: SeedOption = 0,
    dtype: DtypeOption = None,
    batch_invariant: InvariantOption = False,
    out: Annotated[Path | None, Option(help="JSON file to write.")] = None,
) -> None:
    """Check that dials write the text of one-token alone, at any load. Exits with 1 if a promise does not hold."""
    from mars.evaluation.bench import progress_bar
    from mars.evaluation.plan import PROMPTS, check_counts, check_dials, list_of, read_prompts, sizes_of
    from mars.evaluation.tables import show
    from mars.evaluation.verify import save, sentences, table
    from mars.evaluation.verify import verify as run

    wanted, sizes = list_of("--dials", dials), sizes_of("--rows", rows)
    check_counts({"--max-new-tokens": max_new_tokens})
    check_dials("mars", wanted)
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise MarsError(f"--out must name a file in a folder that is there, not {out}")
    questions = PROMPTS if prompts is None else read_prompts(prompts)
    checkpoint = load(model, adapter, dtype=dtype).checkpoint
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    with progress_bar() as bar:
        checks = run(checkpoint, questions, wanted, sizes, bar, batch_invariant=batch_invariant, **options)
    show(table(checks))
    for sentence in sentences(checks):
        typer.echo(sentence)
    if out is not None:
        save(checks, out)
    if any(each.is_broken for each in checks):
        raise typer.Exit(1)


def bench(
    dials: Annotated[str, Option(help='Dials with commas between; a window may follow one: "exact tree".')],
    batch_sizes: Annotated[str, Option(help="How many requests run at once, with commas between.")],
    out: Annotated[Path, Option(help="JSON file to write; a table and plots go beside it.")],
    model: ModelOption = "smollm2-135m",
    adapter: AdapterOption = None,
    prompts: Annotated[Path | None, Option(help="JSONL file of prompts or messages; default: built in.")] = None,
    peers: Annotated[
        str | None,
        Option(help="Of transformers, vllm, llama.cpp, block-cache=16, sliding-window, with commas between."),
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
    rows, files = run(load(model, adapter, dtype=dtype).checkpoint, plan)
    show(bench_table(rows))
    typer.echo("wrote " + ", ".join(map(str, files)))


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
    """Score a model on the benchmarks with every dial. Started again after a kill, it goes on where it stopped."""
    options = dict(locals())
    del options["memory"], options["score_only"]
    from mars.evaluation.bench import progress_bar
    from mars.evaluation.evaluate import evaluate as run
    from mars.evaluation.evaluate import plan_evaluation, score, table
    from mars.evaluation.tables import show

    plan = plan_evaluation(**options)
    loaded = None if score_only else load(model, adapter, dtype=dtype, max_num_seqs=max_num_seqs, memory=memory)
    with progress_bar() as bar:
        results = score(plan, bar) if loaded is None else run(loaded, plan, bar)
    show(table(results), names=2)
    typer.echo(f"wrote {out / 'results.json'}, {out / 'results.md'}")


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
