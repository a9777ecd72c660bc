"""CUDA graphs without a GPU: what a pass does is written down, operation by operation, and done again as a graph would:
on the same memory, into the same memory, with the numbers and shapes that Python had when it was recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from rlinf_lite.models import graphs


class Emulation:
    """How many passes were recorded and replayed; `breaks`: recording raises."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self.breaks = False

    def capture(self, work: graphs.Pass, pool: Any) -> graphs.Pass:
        if self.breaks:
            raise RuntimeError("an emulated one")
        tape = _Tape()
        with tape:
            result = work()
        self.recorded += 1

        def replay() -> Tensor:
            self.replayed += 1
            tape.replay()
            return result

        return replay


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._entries: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = tree_map(_memory, (args, kwargs or {}))  # where a parameter is now, whatever it gets later
        read = {x.untyped_storage().data_ptr() for x in tree_leaves(kept) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        found = [(i, _memory(x)) for i, x in enumerate(tree_leaves(result)) if isinstance(x, Tensor)]
        own = [(i, x) for i, x in found if x.untyped_storage().data_ptr() not in read]  # others are views, or in place
        self._entries.append((func, *kept, own))
        return result

    def replay(self) -> None:
        for func, args, kwargs, own in self._entries:
            found = tree_leaves(func(*args, **kwargs))
            for i, target in own:
                target.copy_(found[i])


def _memory(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> Emulation:
    found = Emulation()
    monkeypatch.setattr(graphs, "can_record", lambda device: graphs.enabled)
    monkeypatch.setattr(graphs, "_captured", found.capture)
    monkeypatch.setattr(graphs, "_LAUNCHED", 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    graphs._warn.cache_clear()
    return found
