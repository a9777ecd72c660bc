"""The optimizer of a model, and the states of both, for a model that is sharded over ranks (`strategies.py`) or not.

Weights are gathered on rank 0, which writes them as a directory for `from_pretrained`. What else training needs to go
on exactly, moments and random states, goes through torch.distributed.checkpoint: each rank writes the parts that it has
to safetensors files of its own, and reads the parts that it needs, on any number of ranks. Nothing is pickled.
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
"""Largest size, roughly, of a rank's files; torch holds one in host memory twice while it writes it."""


def build_optimizer(policy: nn.Module, cfg: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the parameters that train; those that only the value uses are a group with its own learning rate."""
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
    """The whole state dict on the CPU of rank 0; on other ranks it is empty. All ranks call."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(policy, options=options)
    for name, first in tied_names(policy).items():  # each was gathered, or copied to the host, for itself
        if name in state:
            state[name] = state[first]
    return state


def load_policy_state(policy: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load a whole state dict, which every rank has, into a sharded or plain policy. Raises KeyError where names are
    missing or unknown, and ValueError where tensors that are one in the policy differ."""
    tied = tied_names(policy)  # torch makes shards of the first name of each tensor only
    for name, first in tied.items():
        if name in tensors and first in tensors and not torch.equal(tensors[name], tensors[first]):
            raise ValueError(f"{name} is {first} in this policy, and they differ in what is to be loaded")
    state: dict[str, Any] = {name: x for name, x in tensors.items() if name not in tied}
    found = set_model_state_dict(policy, state, options=StateDictOptions(full_state_dict=True, strict=not tied))
    lost = [*(name for name in found.missing_keys if name not in tied), *found.unexpected_keys]
    if lost:
        raise KeyError(f"the names of the state dict are not those of the policy: {', '.join(lost)}")


def save_training(
    policy: nn.Module, optimizer: torch.optim.Optimizer, others: dict[str, Tensor], directory: Path, num_ranks: int
) -> None:
    """Write the moments of the optimizer and `others`, tensors of this rank by names that no other rank uses, into
    `directory`. All ranks call; where one fails, all raise its error. Hyper-parameters come from the config."""
    state = _moments(policy, optimizer) if optimizer.state else {}  # torch would take a first step to have a state
    state = {name: tensor.contiguous() for name, tensor in (state | others).items()}
    files, num_bytes = defaultdict[str, int](int), 0  # numbers of files; names of other ranks' own tensors: the first
    for name, tensor in state.items():
        files[name] = num_bytes // FILE_BYTES
        num_bytes += tensor.numel() * tensor.element_size() // num_ranks
    with _errors_of_ranks():
        writer = HuggingFaceStorageWriter(str(directory), files, save_distributed=True)
        save(state, storage_writer=writer, no_dist=num_ranks == 1)


def load_training(
    policy: nn.Module, optimizer: torch.optim.Optimizer, others: dict[str, Tensor], directory: Path, num_ranks: int
) -> None:
    """Read what `save_training` wrote, on any number of ranks, into the optimizer and, in place, into `others`; those
    that no file has stay as they are. All ranks call; where one fails, all raise its error."""
    reader = HuggingFaceStorageReader(str(directory))
    saved = reader.read_metadata().state_dict_metadata
    optimizer.zero_grad()
    optimizer.state.clear()
    state = _moments(policy, optimizer) | others
    found: dict[str, Any] = {name: tensor for name, tensor in state.items() if name in saved}
    # a parameter that had no gradient yet has no moments, where torch has made some up
    having = {id(tensor) for tensor in found.values()}
    for parameter, moments in [*optimizer.state.items()]:
        if having.isdisjoint(map(id, moments.values())):
            del optimizer.state[parameter]
    with _errors_of_ranks():
        load(found, storage_reader=reader, no_dist=num_ranks == 1)


def _moments(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's own tensors, as `<parameter>/<moment>`; torch makes those of every parameter where there are
    none."""
    state: dict[str, Any] = get_optimizer_state_dict(policy, optimizer)
    return {f"{name}/{key}": value for name, values in state["state"].items() for key, value in values.items()}


@contextmanager
def _errors_of_ranks() -> Iterator[None]:
    """Turn torch's CheckpointException, which is no Exception, into the error of the first rank that failed."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled|torch.distributed is unavailable")
            yield
    except CheckpointException as failed:
        error, _ = next(iter(failed.failures.values()))
        raise error from failed
