"""Run by two processes: the loss and its gradient under FSDP2 are those of the whole model."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mars.training.objective import Objective, batch_tensors
from mars.training.recipe import Loss
from tests.conftest import tiny_checkpoint
from tests.training.test_objective import LENGTH, laid_out


def loss_and_gradient(*, sharded: bool) -> tuple[float, dict[str, torch.Tensor]]:
    model = tiny_checkpoint("llama", tie_word_embeddings=True).module.requires_grad_(True)
    with Objective(Loss()).installed(model):
        for module in [*model.model.layers, model] if sharded else []:
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        loss = model(**batch_tensors(laid_out(), LENGTH))["loss"]
        loss.backward()
    assert all(isinstance(each, DTensor) == sharded for each in model.parameters())
    gradients = {name: each.grad.full_tensor() if sharded else each.grad for name, each in model.named_parameters()}
    return loss.item(), gradients


if __name__ == "__main__":
    dist.init_process_group("gloo")
    (whole, expected), (sharded, gradients) = (loss_and_gradient(sharded=sharded) for sharded in (False, True))
    assert abs(whole - sharded) < 1e-6
    for name, gradient in expected.items():
        assert torch.allclose(gradient, gradients[name], atol=1e-6), name
    dist.barrier()
    os._exit(0)  # now and then PyTorch's own threads abort while the interpreter closes: nothing of ours is left to see
