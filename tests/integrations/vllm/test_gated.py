"""The operators of a gated adapter: what they do to the rows of masks, and that they leave the others alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from mars.integrations.vllm import gated

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter multiplies no bfloat16
RANK, INPUTS = 5, 24


@pytest.fixture(params=["operator", "kernel"])
def change(request: pytest.FixtureRequest) -> object:
    """The operator of this device, and the kernel, which is interpreted where there is no GPU."""
    if request.param == "operator":
        return torch.ops.mars.add_change
    pytest.importorskip("triton")
    return gated._change_on_gpu


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("sizes", [[40], [64, 16, 9], [33, 33, 1, 1]])
@pytest.mark.parametrize("rows", [1, 7, 70])
def test_changes_act_at_marked_rows_alone(change: object, dtype: torch.dtype, sizes: list[int], rows: int) -> None:
    torch.manual_seed(rows)
    a = torch.randn(len(sizes) * RANK, INPUTS, device=DEVICE).to(dtype)
    b = torch.randn(sum(sizes), RANK, device=DEVICE).to(dtype)
    x, plain = (torch.randn(rows, size, device=DEVICE).to(dtype) for size in (INPUTS, sum(sizes)))
    gate = torch.rand(100, device=DEVICE) < 0.4
    gate[0] = True
    found = plain.clone()
    change(found, x, a, b, gate, sizes)
    parts = zip(linear(x, a).split(RANK, 1), b.split(sizes), strict=True)
    expected = plain + torch.cat([linear(low, part) for low, part in parts], 1)
    marked = gate[:rows]
    assert torch.allclose(found[marked], expected[marked], atol=1e-4 if dtype == torch.float32 else 0.2)
    assert torch.equal(found[~marked].view(torch.uint8), plain[~marked].view(torch.uint8))
    gated.step.masks = False
    try:
        untouched = plain.clone()
        change(untouched, x, a, b, gate, sizes)
        assert torch.equal(untouched, plain)
    finally:
        gated.step.masks = True


def test_masks_are_marked_and_get_their_row() -> None:
    tokens = torch.tensor([3, 12, 0, 12, 11], dtype=torch.int32, device=DEVICE)
    rows, row = torch.randn(5, 8, device=DEVICE), torch.randn(8, device=DEVICE)
    found, gate = rows.clone(), torch.ones(9, dtype=torch.bool, device=DEVICE)
    torch.ops.mars.insert_masks(found, gate, tokens, row, 12)
    assert gate[:5].tolist() == [False, True, False, True, False]
    assert torch.equal(found[[1, 3]], row.expand(2, 8)) and torch.equal(found[[0, 2, 4]], rows[[0, 2, 4]])


def test_the_operators_are_opaque_to_the_compiler() -> None:
    """What is written before is read after, for every number of rows, in one graph."""
    a, b = torch.randn(RANK, 8, device=DEVICE), torch.randn(16, RANK, device=DEVICE)
    weight, gate, row = torch.randn(16, 8, device=DEVICE), torch.zeros(64, dtype=torch.bool, device=DEVICE), a[0]

    def forward(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        rows = table[tokens.clamp(max=11)]
        torch.ops.mars.insert_masks(rows, gate, tokens, row, 12)
        y = linear(rows, weight)
        torch.ops.mars.add_change(y, rows, a, b, gate, [16])
        return y.relu()

    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend="aot_eager")
    table = torch.randn(12, 8, device=DEVICE)
    for count in (5, 9, 31):
        tokens = torch.randint(0, 13, (count,), device=DEVICE)
        expected = forward(tokens, table)
        gate.zero_()
        assert torch.allclose(compiled(tokens, table), expected, atol=1e-5)
        assert torch.equal(gate[:count], tokens == 12)
