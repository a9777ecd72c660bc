"""A Ray of our own on this machine: bound to loopback, no dashboard, with a token that no other program knows."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray import _raylet
from ray._private import ray_constants

SLOT_RESOURCE = "rlinf_lite_slot"


@contextmanager
def local_ray(temp_dir: str, num_slots: int, num_gpus: int | None, log_to_driver: bool) -> Iterator[None]:
    """Runs for as long as the block.

    Ray 2.60 reads its authentication token from the environment before `~/.ray/auth_token`, so a file left by another
    program, valid or not, is never looked at.
    """
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the switch by which Ray binds to 127.0.0.1
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # 15 otherwise: training would yield to everything else on the machine
    }
    with _environment(variables):
        try:
            ray.init(
                address="local",
                num_gpus=num_gpus,
                resources={SLOT_RESOURCE: num_slots},
                include_dashboard=False,
                log_to_driver=log_to_driver,
                logging_level=logging.WARNING,
                _temp_dir=temp_dir,
                _node_ip_address="127.0.0.1",
            )
            yield
        finally:
            ray.shutdown()


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Variables that Ray reads, set for as long as our Ray runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    cluster_mode = _reread(cluster_mode=False)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})
        _reread(cluster_mode)


def _reread(cluster_mode: bool) -> bool:
    """Make Ray look at the environment again, which it does once, when it is imported; returns the mode before."""
    before: bool = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = cluster_mode
    _raylet.Config.initialize("")  # type: ignore[attr-defined]
    _raylet.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]
    return before
