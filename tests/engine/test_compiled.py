"""What a captured step runs besides the model, compiled for the CPU: does the compiler keep its results?"""

import shutil
from itertools import product
from pathlib import Path

import pytest
import torch

from mars.engine import Engine
from mars.engine.compilation import MOST_VARIANTS, compiled
from mars.engine.packing import Packing
from mars.engine.step import StepInputs
from mars.method.windows import Window
from tests.conftest import gated_checkpoint

WINDOWS = [Window(), Window.of(1, 4), Window.of(4, 4), Window.of(4, 4, 5)]


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_windows_are_built_and_packed_as_without_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By engines of other sizes, one after the other: the compiler finds its own earlier results, some of them wrong.

    A slice with a step that is no constant was one.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for family, max_num_seqs, counts in (("gemma2", 32, (2, 16)), ("llama", 8, (2, 4, 8))):
        torch._dynamo.reset()
        engine = Engine(gated_checkpoint(family), max_num_seqs=max_num_seqs, memory=2**22, candidates=5)
        runner, state = engine._runner, engine._runner.state
        prepare = compiled(runner._prepare)
        for count, window in product(counts, WINDOWS):
            inputs = StepInputs.padding(count, 4, engine.checkpoint.vocabulary)
            packing = Packing.whole(count, window, state.device)
            with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=MOST_VARIANTS):
                found, expected = (each(inputs, window, packing) for each in (prepare, runner._prepare))
            for name in ("tokens", "positions", "cursors"):
                assert torch.equal(getattr(found, name), getattr(expected, name)), (name, count, window)
            assert torch.equal(found.windows.groups, expected.windows.groups), (count, window)
            assert found.packing.num_text == packing.num_text
