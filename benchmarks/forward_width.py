"""Time of a forward by the width of its window, for one sequence.

python benchmarks/forward_width.py [--model NAME] [--widths 2 4 6 8] [--prefix 128] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import mars
from mars.evaluation.provenance import collect
from mars.method.windows import Window
from mars.models import Checkpoint
from mars.models.layout import store_by_columns, store_by_rows
from mars.reference.cache import Cache, forward_windows, prefill, windows_of


@torch.inference_mode()
def milliseconds(checkpoint: Checkpoint, width: int, prefix: int, repeats: int = 15) -> float:
    """Median time of one forward of ``width`` tokens behind ``prefix`` cached ones."""
    cache, row = Cache(1, prefix + width), torch.zeros(1, dtype=torch.long, device=checkpoint.device)
    prefill(checkpoint, cache, {0: [5] * prefix}, {0: 0})
    windows = windows_of(checkpoint, Window(drafts=width - 1), [(7, [7] * (width - 1))])
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        forward_windows(checkpoint, cache, row, row + prefix, windows).argmax(-1).tolist()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 6, 7, 8, 10, 16])
    parser.add_argument("--prefix", type=int, default=128)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    checkpoint = mars.load(options.model).checkpoint
    layouts = {"by rows": store_by_rows, "by columns": store_by_columns}
    if checkpoint.device.type != "cpu":
        layouts = {"by rows": store_by_rows}
    rows = []
    for layout, store in layouts.items():
        store(checkpoint.module)
        measured = {width: milliseconds(checkpoint, width, options.prefix) for width in {1, *options.widths}}
        base = measured[1]
        for width, taken in sorted(measured.items()):
            rows.append({"weights": layout, "width": width, "milliseconds": taken, "ratio_to_one": taken / base})
            print(f"weights {layout:10}  width {width:3}  {taken:7.1f} ms  {taken / base:.2f}x", flush=True)
    if options.out:
        options.out.write_text(json.dumps({"provenance": collect(), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
