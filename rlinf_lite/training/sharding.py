"""A model's optimizer, and the states of both as files, whether it is sharded over ranks (`strategies.py`) or not.

States are written whole, as safetensors, so that they load into any number of ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from rlinf_lite.config.schema import OptimConfig
from rlinf_lite.models.tensor_files import read_tensors, tied_names

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def build_optimizer(policy: nn.Module, cfg: OptimConfig) -> torch.optim.AdamW:
    """AdamW over what trains; parameters that only the value uses are a group with a learning rate of its own."""
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
    """The whole state dict on the CPU of rank 0 (other ranks: empty)."""
    state: dict[str, Any] = get_model_state_dict(policy, options=_FULL)
    for name, first in tied_names(policy).items():  # which were gathered, or copied to the host, one by one
        if name in state:
            state[name] = state[first]
    return state


def load_policy_state(policy: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load a whole state dict, present on every rank, into a sharded or plain policy."""
    tied = tied_names(policy)  # torch makes shards of their first names alone
    for name, first in tied.items():
        if name in tensors and first in tensors and not torch.equal(tensors[name], tensors[first]):
            raise ValueError(f"{name} is {first} in this policy, and they differ in what is to be loaded")
    state: dict[str, Any] = {name: x for name, x in tensors.items() if name not in tied}
    found = set_model_state_dict(policy, state, options=StateDictOptions(full_state_dict=True, strict=not tied))
    lost = [*(name for name in found.missing_keys if name not in tied), *found.unexpected_keys]
    if lost:
        raise KeyError(f"the state dict has not the names of the policy: {', '.join(lost)}")


def full_optimizer_state(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The moments of every parameter on the CPU of rank 0 (other ranks: empty), as `<parameter>/<moment>`; all ranks
    call. Hyper-parameters come from the config."""
    if not optimizer.state:  # torch would take a first step of its own to have a state
        return {}
    whole: dict[str, Any] = get_optimizer_state_dict(policy, optimizer, options=_FULL)
    state = whole.get("state", {})  # empty on other ranks
    return {f"{name}/{key}": value for name, values in state.items() for key, value in values.items()}


def load_optimizer(policy: nn.Module, optimizer: torch.optim.Optimizer, file: Path) -> None:
    """Read `full_optimizer_state` from a file, on every rank."""
    state: dict[str, dict[str, Tensor]] = {}
    for name, value in read_tensors(file).items():
        parameter, _, key = name.rpartition("/")
        state.setdefault(parameter, {})[key] = value
    if not state:  # it was written before the first update
        optimizer.state.clear()
        return
    whole: dict[str, Any] = {**get_optimizer_state_dict(policy, optimizer), "state": state}
    set_optimizer_state_dict(policy, optimizer, whole, options=replace(_FULL, strict=False))
    # a parameter that had no gradient yet has no moments, where torch has made some up
    for group, named in zip(optimizer.param_groups, whole["param_groups"], strict=True):
        for parameter, name in zip(group["params"], named["params"], strict=True):
            if name not in state:
                optimizer.state.pop(parameter, None)
