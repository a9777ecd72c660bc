"""Trajectories: T decisions of B environments, built where the policy acts and sent once to the actors."""

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
    """T decisions (chunks of C actions of D dimensions) of B environments, ascending in `env_ids`.

    `mask` tells which actions were executed: not those after an episode's end within a chunk, nor those of an
    environment that waits for its next reset. `next_values` is the value of what follows a decision: of the next one,
    of the final observation where the episode was truncated, 0 where it terminated (see algorithm.bootstrap_type).
    """

    env_ids: Tensor  # int64 [B]
    rewards: Tensor  # float32 [B, T, C]
    dones: Tensor  # bool [B, T, C]
    mask: Tensor  # bool [B, T, C]
    logprobs: Tensor  # float32 [B, T, C, D]
    values: Tensor  # float32 [B, T, 1 or C]
    next_values: Tensor  # float32 [B, T]
    forward_inputs: dict[str, Tensor]  # each [B, T, ...]

    def rows(self, rows: slice) -> Trajectories:
        """Some environments of the batch, as views."""
        return Trajectories(**{f.name: _map(getattr(self, f.name), lambda x: x[rows]) for f in fields(self)})

    @staticmethod
    def concat(parts: Sequence[Trajectories]) -> Trajectories:
        """All environments of `parts`, in ascending order of their ids."""
        parts = sorted(parts, key=lambda part: int(part.env_ids[0]))
        joined: dict[str, Any] = {}
        for f in fields(Trajectories):
            values = [getattr(part, f.name) for part in parts]
            if f.name == "forward_inputs":
                joined[f.name] = {name: torch.cat([value[name] for value in values]) for name in values[0]}
            else:
                joined[f.name] = torch.cat(values)
        return Trajectories(**joined)


class TrajectoryBuilder:
    """Collects the decisions of the rows that are served together, t = 0..T-1, into `Trajectories`."""

    def __init__(self, env_ids: np.ndarray, num_decisions: int) -> None:
        self.env_ids = env_ids
        self._steps: dict[str, list[Any]] = {name: [] for name in ("logprobs", "values", "forward_inputs")}
        self._results: dict[str, list[np.ndarray]] = {name: [] for name in ("rewards", "dones", "mask")}
        self._next_values = torch.zeros(len(env_ids), num_decisions)
        self._pending: list[tuple[int, np.ndarray, dict[str, Any]]] = []  # (t, rows, obs) whose value is needed

    def add_decision(self, logprobs: Tensor, values: Tensor, forward_inputs: dict[str, Tensor]) -> None:
        """What the policy said about the next decision of every row."""
        self._steps["logprobs"].append(logprobs)
        self._steps["values"].append(values)
        self._steps["forward_inputs"].append(forward_inputs)

    def add_result(self, result: StepResult) -> None:
        """What the environments answered to that decision."""
        self._results["rewards"].append(result.rewards)
        self._results["dones"].append(result.terminated | result.truncated)
        self._results["mask"].append(result.executed)

    def need_values(self, rows: np.ndarray, obs: dict[str, Any]) -> None:
        """Ask for the value of `obs` as what follows the latest decision of `rows`."""
        if len(rows):
            self._pending.append((len(self._results["rewards"]) - 1, rows, obs))

    def pending_observations(self) -> list[dict[str, Any]]:
        """Observations whose values `finish` needs, in the order it needs them."""
        return [obs for _, _, obs in self._pending]

    def running_rows(self) -> np.ndarray:
        """Rows whose episode goes on after the latest decision."""
        return np.flatnonzero(self._results["mask"][-1][:, 0] & ~self._results["dones"][-1].any(axis=1))

    def finish(self, pending_values: Tensor | None) -> Trajectories:
        """The trajectories; `pending_values` [sum of rows] belong to `pending_observations`."""
        values = torch.stack(self._steps["values"], 1)
        dones = torch.from_numpy(np.stack(self._results["dones"], 1))
        self._next_values[:, :-1] = torch.where(dones[:, :-1].any(-1), 0.0, values[:, 1:, 0])
        offset = 0
        for t, rows, _ in self._pending:
            assert pending_values is not None
            self._next_values[torch.from_numpy(rows), t] = pending_values[offset : offset + len(rows)]
            offset += len(rows)
        inputs = self._steps["forward_inputs"]
        return Trajectories(
            env_ids=torch.from_numpy(self.env_ids),
            rewards=torch.from_numpy(np.stack(self._results["rewards"], 1)),
            dones=dones,
            mask=torch.from_numpy(np.stack(self._results["mask"], 1)),
            logprobs=torch.stack(self._steps["logprobs"], 1),
            values=values,
            next_values=self._next_values,
            forward_inputs={name: torch.stack([step[name] for step in inputs], 1) for name in inputs[0]},
        )


def advantage_inputs(trajectories: Trajectories, cfg: AlgorithmConfig) -> AdvantageInputs:
    """One position per chunk, [B, T], or with `reward_type: action_level` one per action, [B, T * C]."""
    own = trajectories
    group_ids = own.env_ids // cfg.group_size
    rewards = own.rewards * cfg.reward_scale
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


def _map(value: Any, function: Any) -> Any:
    return {k: function(v) for k, v in value.items()} if isinstance(value, dict) else function(value)
