"""Which actor sends its weights to which rollout workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightRoutes:
    """The nodes of both groups, by rank."""

    rollout_nodes: tuple[int, ...]
    actor_nodes: tuple[int, ...]

    def sender(self, rollout_rank: int) -> int:
        """The actor that serves a rollout worker: the first on its node, or rank 0 where its node has none."""
        node = self.rollout_nodes[rollout_rank]
        return self.actor_nodes.index(node) if node in self.actor_nodes else 0

    def receivers(self, actor_rank: int) -> list[int]:
        """The rollout workers that an actor serves."""
        return [rank for rank in range(len(self.rollout_nodes)) if self.sender(rank) == actor_rank]
