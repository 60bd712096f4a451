"""What only a GPU shows: FlexAttention with its gradient, compiled layers, the generator's captured step."""

from __future__ import annotations

import copy
import os

import pytest
import torch

import mars
from mars.method.streams import Pack, lay_out, random_anchors
from mars.training.generator import TextGenerator
from mars.training.objective import Objective, batch_tensors
from mars.training.recipe import Loss
from tests.conftest import MASK, tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTH = 200


def random_pack(rows: int = 3) -> Pack:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(10, (rows, LENGTH), generator=generator)
    documents = (torch.arange(LENGTH) // 67).expand(rows, -1).clone()
    documents[:, -9:] = -1
    assistant = (torch.arange(LENGTH) % 67 > 12).expand(rows, -1)
    return Pack(tokens, documents, assistant)


def loss_and_gradient(family: str, **options: bool) -> tuple[dict[str, float], torch.Tensor]:
    sizes = {"hidden_size": 64, "head_dim": 16} if family != "llama" else {"hidden_size": 64}
    model = tiny_checkpoint(family, **sizes).module.cuda().requires_grad_(True)
    base = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(0.9)
    pack = random_pack()
    streams = lay_out(pack, random_anchors(pack, 40, torch.Generator().manual_seed(2)), 3, MASK, 128)
    batch = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in batch_tensors(streams, LENGTH).items()
    }
    with Objective(Loss(base=0.0), None, **options).installed(model):
        terms = model(**batch)
        terms["loss"].backward()
    gradient = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    return {name: term.item() for name, term in terms.items()}, gradient


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral"])
@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention_gives_the_dense_loss_and_gradient(family: str, compiled: bool) -> None:
    if compiled and family != "llama":
        pytest.skip("one family shows it")
    terms, gradient = loss_and_gradient(family, flex=False)
    flex_terms, flex_gradient = loss_and_gradient(family, flex=True, compiled=compiled)
    assert flex_terms == pytest.approx(terms, rel=2e-3)
    assert (flex_gradient - gradient).norm() < 5e-3 * gradient.norm()


def test_the_generator_writes_what_the_plain_decoder_writes() -> None:
    model = mars.load(os.environ.get("MARS_TEST_MODEL", "smollm2-135m"), dtype="float32")
    prompts = ["Why is the sky blue?", "List the days of the week.", "Write a haiku.", "2+2?", "What is Python?"]
    generator = TextGenerator(model.checkpoint, 3, 256)
    jobs = [(prompt, generator.request(model.checkpoint.encode(prompt), 0.0, 40)) for prompt in prompts]
    generated = {prompt: tokens for prompt, tokens, _ in generator.generate(jobs)}
    for prompt in prompts:
        plain = model.generate(prompt, dial="one-token", max_new_tokens=40)
        assert generated[prompt] == plain.token_ids[: len(plain.token_ids) - (plain.finish_reason == "stop")]
