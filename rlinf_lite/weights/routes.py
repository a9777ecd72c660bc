"""The routes of weights: which actor sends to which rollout workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightRoutes:
    """The nodes of both groups, by rank."""

    rollout_nodes: tuple[int, ...]
    actor_nodes: tuple[int, ...]

    def sender(self, rollout_rank: int) -> int:
        """The actor rank that serves a rollout worker: the first on the worker's node. Nodes without an actor are
        distributed over the actors' nodes, each of which has whole weights when they are sent."""
        node = self.rollout_nodes[rollout_rank]
        if node in self.actor_nodes:
            return self.actor_nodes.index(node)
        without = [one for one in dict.fromkeys(self.rollout_nodes) if one not in self.actor_nodes]
        nodes = list(dict.fromkeys(self.actor_nodes))
        return self.actor_nodes.index(nodes[without.index(node) % len(nodes)])

    def receivers(self, actor_rank: int) -> list[int]:
        """The ranks of the rollout workers that an actor serves."""
        return [rank for rank in range(len(self.rollout_nodes)) if self.sender(rank) == actor_rank]
