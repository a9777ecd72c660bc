"""Policies: backbone, action head, value head and checkpoint format.

Names are loaded when first used, so that a policy's config (`vla.config`) can be read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_lite.lazy import lazy_names

if TYPE_CHECKING:
    from rlinf_lite.models.base import NOISE_KEY, ActionOutput, CheckpointFormatError, Mode, Policy, PolicyOutput
    from rlinf_lite.models.check import check_policy
    from rlinf_lite.models.mlp.policy import MLPGaussianPolicy
    from rlinf_lite.models.registry import build_policy, load_policy, policy_class, register_policy
    from rlinf_lite.registry import UnknownPolicyError


__all__ = [
    "NOISE_KEY",
    "ActionOutput",
    "CheckpointFormatError",
    "MLPGaussianPolicy",
    "Mode",
    "Policy",
    "PolicyOutput",
    "UnknownPolicyError",
    "build_policy",
    "check_policy",
    "load_policy",
    "policy_class",
    "register_policy",
]

__getattr__ = lazy_names(
    __name__,
    {
        "base": ["NOISE_KEY", "ActionOutput", "CheckpointFormatError", "Mode", "Policy", "PolicyOutput"],
        "check": ["check_policy"],
        "mlp.policy": ["MLPGaussianPolicy"],
        "registry": ["UnknownPolicyError", "build_policy", "load_policy", "policy_class", "register_policy"],
    },
)
