"""How many torch threads compute: the config says it, and workers set it here.

`env.num_threads` (1): while environments are reset and stepped, and while an expert plays.
`rollout.num_threads` (1): while a policy acts, or a language model generates.
`actor.num_threads` (null: the cores that the process may run on, divided among the group's workers there): while actor,
critic or reference trains or scores, by reinforcement or by imitation.

A process starts with one thread (`scheduler/host.py`) and is back at what it had behind each of these, so that roles
that share a process have their own numbers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GOMP_SPINCOUNT": "30000"}
"""Variables of every process that has workers, read when torch and numpy are imported. Threads that spin for long cost
a factor of 20 on a busy machine, ones that never spin half again on an idle one."""


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """`number` threads for what is inside, then as many as before. Nothing to do in a process without torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    if before == number:  # as for most: one
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def training_threads(configured: int | None, local_world_size: int) -> int:
    """`actor.num_threads`, or one worker's share of the node's cores that taskset or a container leaves."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return configured or max(cores // local_world_size, 1)
