"""The memory layout of linear layers on a CPU. Values and shapes stay the same.

With weights stored by columns, CPU kernels multiply a few rows of input (a window) almost as fast as one. Stored by
rows, as in checkpoints, four rows take more than twice as long as one (figures in docs/lab-log.md).
"""

import torch
from torch import Tensor


def by_columns(matrix: Tensor) -> Tensor:
    return matrix.t().contiguous().t()


def store_by_columns(model: torch.nn.Module) -> None:
    for linear in _linears(model):
        linear.weight.data = by_columns(linear.weight.data)


def store_by_rows(model: torch.nn.Module) -> None:
    """The usual order, which saving needs."""
    for linear in _linears(model):
        linear.weight.data = linear.weight.data.contiguous()


def _linears(model: torch.nn.Module) -> list[torch.nn.Linear]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
