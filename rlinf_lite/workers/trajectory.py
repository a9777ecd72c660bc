"""Trajectories: T decisions of B environments, built by rollout workers and sent once to the actors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_lite.algorithms import AdvantageInputs
from rlinf_lite.config import AlgorithmConfig
from rlinf_lite.workers.messages import StepResult


@dataclass
class Trajectories:
    """T decisions (chunks of C actions with D dimensions) of B environments, sorted by `env_ids`.

    `mask`: the actions that were executed, without those after an episode's end within a chunk, and those of an
    environment that waits for its next reset. `next_values`: the value after each decision: that of the next decision;
    that of the final observation if the episode was truncated; 0 if it terminated (see algorithm.bootstrap_type).
    """

    env_ids: Tensor  # int64 [B]
    rewards: Tensor  # float32 [B, T, C]
    dones: Tensor  # bool [B, T, C]
    mask: Tensor  # bool [B, T, C]
    logprobs: Tensor  # float32 [B, T, C, D]
    values: Tensor  # float32 [B, T, 1 or C]
    next_values: Tensor  # float32 [B, T]
    versions: Tensor  # int64 [B, T]: versions of the weights that decided
    forward_inputs: dict[str, Tensor]  # each [B, T, ...]

    def rows(self, rows: slice) -> Trajectories:
        """The given environments, as views."""
        tensors = {name: x[rows] for name, x in vars(self).items() if name != "forward_inputs"}
        return Trajectories(**tensors, forward_inputs={name: x[rows] for name, x in self.forward_inputs.items()})

    @staticmethod
    def concat(parts: Sequence[Trajectories]) -> Trajectories:
        """All environments of `parts`, sorted by id."""
        parts = sorted(parts, key=lambda part: int(part.env_ids[0]))
        inputs = [part.forward_inputs for part in parts]
        names = (f.name for f in fields(Trajectories) if f.name != "forward_inputs")
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return Trajectories(**joined, forward_inputs={name: torch.cat([x[name] for x in inputs]) for name in inputs[0]})


class TrajectoryBuilder:
    """Collects the decisions t = 0..T-1 of rows that are served together into `Trajectories`."""

    def __init__(self, env_ids: np.ndarray, num_decisions: int) -> None:
        self.env_ids = env_ids
        self._decisions: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []
        self._versions: list[int] = []
        self._results: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # rewards, dones, executed; [B, C]
        self._next_values = torch.zeros(len(env_ids), num_decisions)
        self._pending: list[tuple[int, np.ndarray, dict[str, Any]]] = []  # (t, rows, obs) whose value is needed

    def add_decision(self, logprobs: Tensor, values: Tensor, forward_inputs: dict[str, Tensor], version: int) -> None:
        """Add the policy's outputs for the next decision of every row, computed by weights of `version`."""
        self._decisions.append((logprobs, values, forward_inputs))
        self._versions.append(version)

    def add_result(self, result: StepResult) -> None:
        """Add the environments' result of that decision."""
        # copies: a view would keep the whole message, with its final observations, in shared memory
        self._results.append((result.rewards.copy(), result.terminated | result.truncated, result.executed.copy()))

    def need_values(self, rows: np.ndarray, obs: dict[str, Any]) -> None:
        """Request the value of `obs`, as the value after the latest decision of `rows`."""
        if len(rows):
            self._pending.append((len(self._results) - 1, rows, obs))

    def pending_observations(self) -> list[dict[str, Any]]:
        """The observations whose values `finish` needs, in order."""
        return [obs for _, _, obs in self._pending]

    def running_rows(self) -> np.ndarray:
        """The rows whose episode goes on after the latest decision."""
        _, dones, executed = self._results[-1]
        return np.flatnonzero(executed[:, 0] & ~dones.any(axis=1))

    def finish(self, pending_values: Tensor | None) -> Trajectories:
        """Build the trajectories. `pending_values` [sum of rows]: the values of `pending_observations`."""
        all_logprobs, all_values, inputs = zip(*self._decisions, strict=True)
        values = torch.stack(all_values, 1)
        rewards, dones, executed = (torch.from_numpy(np.stack(kind, 1)) for kind in zip(*self._results, strict=True))
        self._next_values[:, :-1] = torch.where(dones[:, :-1].any(-1), 0.0, values[:, 1:, 0])
        offset = 0
        for t, rows, _ in self._pending:
            assert pending_values is not None
            self._next_values[torch.from_numpy(rows), t] = pending_values[offset : offset + len(rows)]
            offset += len(rows)
        return Trajectories(
            env_ids=torch.from_numpy(self.env_ids),
            rewards=rewards,
            dones=dones,
            mask=executed,
            logprobs=torch.stack(all_logprobs, 1),
            values=values,
            next_values=self._next_values,
            versions=torch.tensor(self._versions).expand(len(self.env_ids), -1),
            forward_inputs={name: torch.stack([step[name] for step in inputs], 1) for name in inputs[0]},
        )


def advantage_inputs(trajectories: Trajectories, cfg: AlgorithmConfig) -> AdvantageInputs:
    """The inputs of advantage estimation, with one position per chunk, [B, T], or with `reward_type: action_level` one
    per action, [B, T * C]."""
    own = trajectories
    group_ids = own.env_ids // cfg.group_size
    rewards = torch.where(own.mask, own.rewards, 0.0).double() * cfg.reward_scale  # equal returns stay equal
    if cfg.reward_type == "chunk_level":
        return AdvantageInputs(
            rewards=rewards.sum(-1),
            mask=own.mask[..., 0].float(),
            values=own.values[..., 0],
            next_values=own.next_values,
            dones=own.dones.any(-1),
            group_ids=group_ids,
        )
    following = torch.cat([own.values[..., 1:], own.next_values[..., None]], -1)
    next_values = torch.where(own.dones, own.next_values[..., None], following)
    return AdvantageInputs(
        rewards=rewards.flatten(1),
        mask=own.mask.flatten(1).float(),
        values=own.values.flatten(1),
        next_values=next_values.flatten(1),
        dones=own.dones.flatten(1),
        group_ids=group_ids,
    )
