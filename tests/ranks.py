"""Ranks of a process group as processes of their own."""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch.multiprocessing as mp


def spawn(function: Callable[..., None], num_ranks: int, *arguments: object) -> None:
    """Call `function(rank, port, *arguments)` in `num_ranks` processes, which meet at `port`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.spawn(function, (port, *arguments), nprocs=num_ranks)
