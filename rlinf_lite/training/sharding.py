"""The optimizer of a model, and saving and loading of both, whether the model is sharded (`strategies.py`) or not.

Weights are gathered on rank 0, which writes them as a directory for `from_pretrained`. Other state that exact resume
needs (the optimizer's moments, random states) goes through torch.distributed.checkpoint: each rank writes its parts to
its own safetensors files, and any number of ranks can read them. Nothing is pickled.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rlinf_lite.config.schema import OptimConfig
from rlinf_lite.models.tensor_files import tied_names

FILE_BYTES = 2**30
"""Approximate largest size of a rank's files; while torch writes a file, host memory holds it twice."""


def build_optimizer(policy: nn.Module, cfg: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the parameters that train; those that only the value uses form a group with its own learning rate."""
    of_value = {id(parameter) for parameter in getattr(policy, "value_parameters", list)()}
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    value_lr = cfg.lr if cfg.value_lr is None else cfg.value_lr
    groups = [
        {"params": [p for p in trained if id(p) not in of_value], "base_lr": cfg.lr, "is_value": False},
        {"params": [p for p in trained if id(p) in of_value], "base_lr": value_lr, "is_value": True},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, weight_decay=cfg.weight_decay, fused=True)


def full_policy_state(policy: nn.Module) -> dict[str, Tensor]:
    """The whole state dict, on the CPU of rank 0; empty on other ranks. All ranks must call this."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(policy, options=options)
    for name, first in tied_names(policy).items():  # torch gathered or copied each name separately
        if name in state:
            state[name] = state[first]
    return state


def load_policy_state(policy: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load a whole state dict, which every rank has, into a sharded or plain policy. Raises KeyError for missing or
    unknown names, and ValueError if tensors that are tied in the policy differ."""
    tied = tied_names(policy)  # torch shards each tensor under its first name only
    for name, first in tied.items():
        if name in tensors and first in tensors and not torch.equal(tensors[name], tensors[first]):
            raise ValueError(f"{name} and {first} are one tensor in this policy, and differ in the weights to load")
    state: dict[str, Any] = {name: x for name, x in tensors.items() if name not in tied}
    found = set_model_state_dict(policy, state, options=StateDictOptions(full_state_dict=True, strict=not tied))
    lost = [*(name for name in found.missing_keys if name not in tied), *found.unexpected_keys]
    if lost:
        raise KeyError(f"the names of the state dict are not those of the policy: {', '.join(lost)}")


def save_training(
    policy: nn.Module, optimizer: torch.optim.Optimizer, others: dict[str, Tensor], directory: Path, num_ranks: int
) -> None:
    """Write the optimizer's moments, and `others` (tensors of this rank, under names that no other rank uses), into
    `directory`. All ranks must call this; if one fails, all raise its error. Hyper-parameters are not saved."""
    state = _moments(policy, optimizer) if optimizer.state else {}  # for an empty state torch would take a step
    state = {name: tensor.contiguous() for name, tensor in (state | others).items()}
    files, num_bytes = defaultdict[str, int](int), 0  # number of the file by name; 0 for names of other ranks
    for name, tensor in state.items():
        files[name] = num_bytes // FILE_BYTES
        num_bytes += tensor.numel() * tensor.element_size() // num_ranks
    with _errors_of_ranks():
        writer = HuggingFaceStorageWriter(str(directory), files, save_distributed=True)
        save(state, storage_writer=writer, no_dist=num_ranks == 1)


def load_training(
    policy: nn.Module, optimizer: torch.optim.Optimizer, others: dict[str, Tensor], directory: Path, num_ranks: int
) -> None:
    """Read what any number of ranks wrote with `save_training`, into the optimizer and, in place, into `others`, whose
    tensors do not change if no file has them. All ranks must call this; if one fails, all raise its error."""
    reader = HuggingFaceStorageReader(str(directory))
    saved = reader.read_metadata().state_dict_metadata
    optimizer.zero_grad()
    optimizer.state.clear()
    state = _moments(policy, optimizer) | others
    found: dict[str, Any] = {name: tensor for name, tensor in state.items() if name in saved}
    # drop moments that torch has made for parameters that had no gradient yet
    having = {id(tensor) for tensor in found.values()}
    for parameter, moments in [*optimizer.state.items()]:
        if having.isdisjoint(map(id, moments.values())):
            del optimizer.state[parameter]
    with _errors_of_ranks():
        load(found, storage_reader=reader, no_dist=num_ranks == 1)


def _moments(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors, named `<parameter>/<moment>`; for parameters without moments torch makes some."""
    state: dict[str, Any] = get_optimizer_state_dict(policy, optimizer)
    return {f"{name}/{key}": value for name, values in state["state"].items() for key, value in values.items()}


@contextmanager
def _errors_of_ranks() -> Iterator[None]:
    """Raise the error of the first failed rank instead of torch's CheckpointException, a mere BaseException."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled|torch.distributed is unavailable")
            yield
    except CheckpointException as failed:
        error, _ = next(iter(failed.failures.values()))
        raise error from failed
