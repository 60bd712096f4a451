"""The notebook converts a model, here a tiny one on a CPU."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

import mars

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "convert-your-model.ipynb"


def test_the_notebook_converts_a_model(your_model: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    [parameters] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    tiny = {"MODEL": str(your_model), "FOLDER": "runs", "PROMPTS": 40, "STEPS": 10, "BATCH": 4, "LENGTH": 64}
    assert re.findall(r"(?m)^(\w+) = ", parameters.source) == list(tiny)
    parameters.source = "\n".join(f"{name} = {value!r}" for name, value in tiny.items())
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = {cell.id: "".join(out.get("text", "") for out in cell.get("outputs", [])) for cell in notebook.cells}
    assert len(re.findall(r"\d tokens per forward, the same text", printed["compare"])) == 3
    assert "mars/adapter.safetensors" in printed["save"]
    model = mars.load(tmp_path / "runs" / "train" / "model")
    assert model.settings is not None and model.settings.dial == "exact"


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
