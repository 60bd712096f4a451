"""Small tensors made on the host and sent to the device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def send(values: Tensor | Sequence[object], device: torch.device | str) -> Tensor:
    """Values as a tensor on the device. A GPU gets them from pinned memory, so the host does not wait for it."""
    made = values if isinstance(values, Tensor) else torch.tensor(values)
    if torch.device(device).type != "cuda":
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)
