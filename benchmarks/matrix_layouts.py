"""Time of all matrix products of one forward on a CPU, by the memory layout of the weights.

    python benchmarks/matrix_layouts.py [--rows 1 4 7]

The matrices have the shapes of SmolLM2-135M and random values; each is used once, as in a forward. The result is why
``mars.models.layout`` stores weights by columns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

SHAPES = {(1536, 576): 60, (576, 1536): 30, (576, 576): 60, (192, 576): 60, (49152, 576): 1}
"""(outputs, inputs) → how many of them a forward uses"""


def milliseconds(products: list[Callable[[], Tensor]], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for product in products:
            product()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[repeats // 2]


def prepare(layout: str, weight: Tensor, x: Tensor) -> Callable[[], Tensor]:
    if layout == "by rows":
        return lambda: linear(x, weight)
    if layout == "by columns":
        by_columns = weight.t().contiguous().t()
        return lambda: linear(x, by_columns)
    if layout == "weight @ x.T":
        return lambda: torch.mm(weight, x.t())
    if layout == "oneDNN prepacked":
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))
        return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, len(x))
    return lambda: torch.ops.mkl._mkl_linear(x, packed, weight, None, len(x))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 7])
    options = parser.parse_args()
    weights = [torch.randn(shape) for shape, count in SHAPES.items() for _ in range(count)]
    for layout in ("by rows", "by columns", "weight @ x.T", "oneDNN prepacked", "MKL prepacked"):
        taken = []
        for rows in options.rows:
            if rows == 1 and "prepacked" in layout:
                continue
            products = [prepare(layout, weight, torch.randn(rows, weight.shape[1])) for weight in weights]
            taken.append(f"{rows} rows {milliseconds(products):6.1f} ms")
        print(f"{layout:16}  " + "   ".join(taken), flush=True)


if __name__ == "__main__":
    main()
