"""The one place where names of Ray with a leading underscore are used: see docs/architecture.md."""

from __future__ import annotations

from typing import Any

from ray import _raylet
from ray._private import ray_constants, services
from ray.experimental import internal_kv


def put_value(key: str, value: bytes) -> None:
    """Store `value` in the key-value store of the Ray that this process is connected to, over what is there."""
    internal_kv._internal_kv_put(key, value, overwrite=True)


def get_value(key: str) -> bytes | None:
    """The value that is stored there, or None."""
    found: bytes | None = internal_kv._internal_kv_get(key)
    return found


def delete_value(key: str) -> None:
    """Delete it. Does nothing where there is none."""
    internal_kv._internal_kv_del(key)


def list_keys(prefix: str) -> list[str]:
    """The keys that begin with `prefix`, sorted."""
    return sorted(key.decode() for key in internal_kv._internal_kv_list(prefix))


def class_in_actor(cls: Any) -> Any:
    """The class that `@ray.remote` was put over; any other comes back as it is."""
    modified = getattr(getattr(cls, "__ray_metadata__", None), "modified_class", None)
    return getattr(modified, "__ray_actor_class__", cls)


def find_address(address: str) -> str:
    """Host and port of the Ray that an address means; `auto` is the one that runs on this machine, by what it has left
    in a file. Ray itself would take minutes where that is dead. Raises ConnectionError or ValueError."""
    found: str = services.canonicalize_bootstrap_address_or_die(address)
    return found


def read_environment_again(cluster_mode: bool | None = None) -> bool:
    """Have Ray read the variables that it otherwise reads once, when it is imported: what it binds to, and its token.
    `cluster_mode`: whether it binds to all interfaces, None for what it is. Returns what that was before."""
    before: bool = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = before if cluster_mode is None else cluster_mode
    _raylet.Config.initialize("")  # type: ignore[attr-defined]
    _raylet.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]
    return before
