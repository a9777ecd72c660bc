"""What off-policy rollout workers collect and send to actors: the decisions of a step, with the observations between
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from rlinf_lite.training.replay import Block, concat
from rlinf_lite.workers.messages import StepResult

_OF_RESULT = ("rewards", "terminated", "truncated", "executed", "success")


@dataclass
class Played:
    """A `Block` of the environments `env_ids` [B], in this order."""

    env_ids: Tensor
    versions: Tensor
    """int64 [B, T]: of the weights that decided."""
    block: Block

    def rows(self, rows: slice) -> Played:
        """The given environments."""
        block, before = self.block, self.block.has_next.sum(1).cumsum(0)
        first = int(before[rows.start - 1]) if rows.start else 0
        following = slice(first, int(before[rows.stop - 1]))
        tensors = {f.name: getattr(block, f.name) for f in fields(Block) if f.name not in ("inputs", "next_inputs")}
        return Played(
            self.env_ids[rows],
            self.versions[rows],
            Block(
                inputs={name: x[rows] for name, x in block.inputs.items()},
                next_inputs={name: x[following] for name, x in block.next_inputs.items()},
                **{name: x[rows] for name, x in tensors.items()},
            ),
        )

    @staticmethod
    def concat(parts: Sequence[Played]) -> Block:
        """The block of all environments of `parts`, sorted by id."""
        return concat([part.block for part in sorted(parts, key=lambda part: int(part.env_ids[0]))])


class TransitionBuilder:
    """Collects the decisions t = 0..T-1 of rows that are served together."""

    def __init__(self, env_ids: np.ndarray) -> None:
        self.env_ids = env_ids
        self._inputs: list[dict[str, Tensor]] = []
        self._actions: list[Tensor] = []
        self._versions: list[int] = []
        self._results: list[dict[str, np.ndarray]] = []
        self._following: list[tuple[int, np.ndarray, dict[str, Tensor]]] = []  # (t, rows, inputs)

    def add_decision(self, inputs: dict[str, Tensor], actions: Tensor, version: int) -> None:
        """Add the policy's inputs [B, ...] and the actions [B, C, D] for the next decision of every row, by weights of
        this version."""
        self._inputs.append(_copied(inputs))
        self._actions.append(actions)
        self._versions.append(version)

    def add_result(self, result: StepResult) -> None:
        """Add the environments' result of that decision."""
        self._results.append({name: getattr(result, name).copy() for name in _OF_RESULT})

    def add_following(self, rows: np.ndarray, inputs: dict[str, Tensor]) -> None:
        """Add the inputs [n, ...] that follow the latest decision of `rows` [n], where the next decision's are not."""
        if len(rows):
            self._following.append((len(self._results) - 1, rows, _copied(inputs)))

    def running_rows(self) -> np.ndarray:
        """The rows whose episode goes on after the latest decision."""
        last = self._results[-1]
        return np.flatnonzero(last["executed"][:, 0] & ~(last["terminated"] | last["truncated"]).any(axis=1))

    def finish(self) -> Played:
        def stacked(name: str) -> np.ndarray:
            return np.stack([result[name] for result in self._results], 1)

        terminated, truncated, executed = stacked("terminated"), stacked("truncated"), stacked("executed")
        has_next = np.zeros(executed.shape[:2], bool)
        order: list[tuple[int, int, int, int]] = []  # (row, t, index of the part, row in it)
        for index, (t, rows, _) in enumerate(self._following):
            has_next[rows, t] = True
            order += [(int(row), t, index, place) for place, row in enumerate(rows)]
        order.sort()
        names = self._inputs[0]
        following = {
            name: torch.stack([self._following[index][2][name][place] for _, _, index, place in order])
            if order
            else torch.empty(0, *self._inputs[0][name].shape[1:], dtype=self._inputs[0][name].dtype)
            for name in names
        }
        block = Block(
            inputs={name: torch.stack([step[name] for step in self._inputs], 1) for name in names},
            actions=torch.stack(self._actions, 1),
            rewards=torch.from_numpy(stacked("rewards").astype(np.float32)),
            mask=torch.from_numpy(executed),
            terminated=torch.from_numpy(terminated.any(-1)),
            ended=torch.from_numpy((terminated | truncated).any(-1)),
            success=torch.from_numpy(stacked("success")),
            has_next=torch.from_numpy(has_next),
            next_inputs=following,
        )
        versions = torch.tensor(self._versions).expand(len(self.env_ids), -1)
        return Played(torch.from_numpy(self.env_ids), versions, block)


def _copied(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies: a view would keep the whole message in shared memory."""
    return {name: x.clone() for name, x in inputs.items()}
