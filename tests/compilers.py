"""Compilers in place of torch's own, which takes a minute."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlinf_lite.models import layers


@contextmanager
def compiling_by(compiler: str | Callable[..., Any] = "eager") -> Iterator[None]:
    """Have layers compiled by `compiler`, by default one that changes nothing."""
    layers._compiled.cache_clear()
    torch.compiler.set_default_backend(compiler)
    try:
        yield
    finally:
        torch.compiler.set_default_backend(None)
        layers._compiled.cache_clear()
        torch.compiler.reset()
