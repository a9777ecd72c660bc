"""Which roles a reasoning run has."""

from __future__ import annotations

from rlinf_lite.config.names import ROLES, needs_of
from rlinf_lite.config.reasoning import ReasoningConfig


def roles_of(config: ReasoningConfig) -> list[str]:
    """The roles that a run has."""
    roles = ["actor", "rollout", "reward"]
    roles += ["reference"] * (config.algorithm.kl.place != "none")
    return roles + ["critic"] * needs_of(config).values


def fused_roles(config: ReasoningConfig) -> list[str]:
    """The roles that `cluster.fuse` names and that the run has; unknown names too."""
    named = [name.strip() for name in (config.cluster.fuse or "").split(",") if name.strip()]
    return [name for name in named if name not in ROLES or name in roles_of(config)]
