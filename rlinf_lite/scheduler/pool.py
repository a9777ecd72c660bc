"""Sets of slots that nobody else may use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_lite.scheduler.placement import ComponentPlacement, ProcessPlacement, parse_placement

if TYPE_CHECKING:
    from rlinf_lite.scheduler.cluster import Cluster


class ResourcePool:
    """Slots of a cluster under a name: no other pool, and no group outside this one, can be placed on them.

    Groups of a pool may share its slots. Raises PlacementError where another pool or a running group has some already.
    """

    def __init__(self, cluster: Cluster, name: str, slots: str | int) -> None:
        placed = cluster.place(str(slots), name)
        self.name, self.slots = name, tuple(sorted(placed.slots))
        self._cluster = cluster
        cluster.add_pool(name, placed.slots)

    def get_strategy(self, component: str, spec: str | int = "all") -> ComponentPlacement:
        """What `launch` takes; slots in `spec` are numbered within the pool. Raises PlacementError."""
        local = parse_placement(
            spec,
            len(self.slots),
            component=component,
            accelerator=self._cluster.accelerator,
            where=f"the pool {self.name!r} has",
        )
        placed = tuple(ProcessPlacement(p.rank, tuple(self.slots[slot] for slot in p.slots)) for p in local)
        where = f"{spec} of the pool {self.name!r}"
        return self._cluster.place(ComponentPlacement(component, where, placed, pool=self.name), component)

    def release(self) -> None:
        """Give the slots back. Its groups keep running."""
        self._cluster.remove_pool(self.name)
