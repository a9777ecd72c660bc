"""Workers that report what they know."""

import time
from typing import Any

import ray

from rlinf_lite.scheduler import Worker


class Talker(Worker):
    settings: tuple[Any, ...] = ()

    def init(self, *settings: Any) -> None:
        self.settings = settings

    def known(self) -> tuple[int, tuple[Any, ...]]:
        return self.rank, self.settings

    def greet(self, group: str, rank: int) -> None:
        self.send(f"from {self.name}[{self.rank}]", group, rank)

    def hear(self, group: str, rank: int) -> Any:
        return self.recv(group, rank, 10.0)

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def stumble(self, over: str) -> None:
        raise RuntimeError(over)

    def doze(self, seconds: float) -> None:
        time.sleep(seconds)


class Replaceable(Talker):
    failover = "worker"
