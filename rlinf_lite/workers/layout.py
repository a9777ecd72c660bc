"""The assignment of environments to workers, as a pure function of the placement.

Global environment ids 0..N-1 are split into contiguous blocks, one per env worker, and each block into contiguous
stages. The rows of each stage go to rollout workers by `route`. Each of the A actors owns a contiguous block of N/A ids
and gets their trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlinf_lite.scheduler import route
from rlinf_lite.weights.routes import WeightRoutes


@dataclass(frozen=True)
class StagePiece:
    """The rows [start, stop) of one stage of an env worker that one rollout worker serves."""

    env_rank: int
    stage: int
    rollout_rank: int
    start: int
    stop: int


def padded(num_envs: int, num_stages: int) -> int:
    """`num_envs` rounded up to a multiple of `num_stages`."""
    return -(-num_envs // num_stages) * num_stages


@dataclass(frozen=True)
class Layout:
    """The sizes and nodes of the three groups, and the assignment of `num_envs` environments to them."""

    num_envs: int
    num_env_workers: int
    num_stages: int
    rollout_nodes: tuple[int, ...]
    """The node of every rollout worker, by rank."""
    actor_nodes: tuple[int, ...]
    """The node of every actor, by rank."""

    @property
    def num_actors(self) -> int:
        return len(self.actor_nodes)

    def of_evaluation(self, num_envs: int) -> Layout:
        """The layout of an evaluation with `num_envs` environments, padded to equal stages."""
        return replace(self, num_envs=padded(num_envs, self.num_env_workers * self.num_stages))

    @property
    def stage_size(self) -> int:
        """The number of environments in one stage of one env worker."""
        return self.num_envs // self.num_env_workers // self.num_stages

    @property
    def rows_per_actor(self) -> int:
        return self.num_envs // self.num_actors

    def env_ids(self, env_rank: int, stage: int) -> np.ndarray:
        """The global ids of a stage's environments, int64 [stage_size]."""
        first = (env_rank * self.num_stages + stage) * self.stage_size
        return np.arange(first, first + self.stage_size)

    @property
    def weight_routes(self) -> WeightRoutes:
        return WeightRoutes(self.rollout_nodes, self.actor_nodes)

    def pieces(self) -> list[StagePiece]:
        """All pieces, of all env workers and stages."""
        routes = route(self.num_env_workers, len(self.rollout_nodes), self.num_env_workers * self.stage_size)
        return [
            StagePiece(env_rank, stage, part.dst_rank, part.start, part.stop)
            for env_rank, parts in enumerate(routes)
            for stage in range(self.num_stages)
            for part in parts
        ]

    def actor_slices(self, env_ids: np.ndarray) -> list[tuple[int, slice]]:
        """The actors that own rows of contiguous `env_ids`, each with the slice of its rows."""
        owners = env_ids // self.rows_per_actor
        starts = np.flatnonzero(np.diff(owners, prepend=-1))
        stops = np.append(starts[1:], len(env_ids))
        return [(int(owners[a]), slice(int(a), int(b))) for a, b in zip(starts, stops, strict=True)]
