"""Copies of tensors to a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor` on `device`. Python does not wait for a copy from host memory to a GPU, which goes through page-locked
    memory."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
