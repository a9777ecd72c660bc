"""Compute precision of acting and training, and deterministic computation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn


def autocast(device: torch.device | str, precision: str, cached: bool | None = None) -> AbstractContextManager[object]:
    """Autocast to bfloat16 if `actor.precision` is bf16; else a null context. `cached`: whether to cache cast weights;
    None: on all devices but CPUs, where threads share the cache and clear each other's entries, so that the rounding of
    gradients would depend on timing."""
    if precision == "fp32":
        return nullcontext()
    kind = torch.device(device).type
    return torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=kind != "cpu" if cached is None else cached)


@contextmanager
def shapes_vary() -> Iterator[None]:
    """A context for acting and generating, whose shapes change often. It disables cuDNN's attention, which makes a plan
    for each new shape: acting in bf16 on an H100 took 1.7 times as long with it."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def be_deterministic(device: torch.device | str, wanted: bool) -> None:
    """If `wanted` (`runner.deterministic`), let torch use only deterministic GPU operations in this process. Those that
    models use on CPUs are deterministic anyway. Call it before the first computation on a GPU."""
    if wanted and torch.device(device).type == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS is first used
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def cast_parameters(model: nn.Module, dtype: torch.dtype, frozen_only: bool = False) -> None:
    """Cast parameters (or only frozen ones) to `dtype`, in place. Buffers keep their types, as in a model that
    transformers loads in `dtype`.

    Rotary frequencies are buffers: in bf16 they would be 0.4% off, which is an angle of 1 rad at position 1,000.
    """
    kept = {part for module in model.modules() for part in getattr(module, "_keep_in_fp32_modules_strict", None) or ()}
    for name, parameter in model.named_parameters():
        if frozen_only and parameter.requires_grad:
            continue
        if parameter.is_floating_point() and not any(f".{part}." in f".{name}." for part in kept):
            parameter.data = parameter.data.to(dtype)
