"""The only module that uses private (underscore) names of Ray; docs/architecture.md lists them."""

from __future__ import annotations

from typing import Any

from ray import _raylet
from ray._private import ray_constants, services
from ray.experimental import internal_kv


def put_value(key: str, value: bytes) -> None:
    """Store `value` in the key-value store of the Ray that this process is connected to, replacing an earlier value."""
    internal_kv._internal_kv_put(key, value, overwrite=True)


def get_value(key: str) -> bytes | None:
    """The value stored under `key`, or None."""
    found: bytes | None = internal_kv._internal_kv_get(key)
    return found


def delete_value(key: str) -> None:
    """Delete the value under `key`, if there is one."""
    internal_kv._internal_kv_del(key)


def list_keys(prefix: str) -> list[str]:
    """The stored keys that begin with `prefix`, sorted."""
    return sorted(key.decode() for key in internal_kv._internal_kv_list(prefix))


def class_in_actor(cls: Any) -> Any:
    """The class that `@ray.remote` decorates; any other class is returned unchanged."""
    modified = getattr(getattr(cls, "__ray_metadata__", None), "modified_class", None)
    return getattr(modified, "__ray_actor_class__", cls)


def find_address(address: str) -> str:
    """Host and port of the Ray that `address` means; for `auto`, those in the file that a Ray on this machine wrote.
    The caller can check them: `ray.init` takes minutes if that Ray is dead. Raises ConnectionError or ValueError."""
    found: str = services.canonicalize_bootstrap_address_or_die(address)
    return found


def read_environment_again(cluster_mode: bool | None = None) -> bool:
    """Make Ray read again the environment variables that it reads at import: the interface it binds to, and its token.
    `cluster_mode`: whether it binds to all interfaces; None: unchanged. Returns the previous mode."""
    before: bool = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = before if cluster_mode is None else cluster_mode
    _raylet.Config.initialize("")  # type: ignore[attr-defined]
    _raylet.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]
    return before
