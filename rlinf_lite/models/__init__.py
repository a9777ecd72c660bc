"""Policies: backbone, action head, value head and checkpoint format.

Names are loaded when first used, so that a policy's config (`vla.config`) can be read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_lite.models.base import NOISE_KEY, ActionOutput, CheckpointFormatError, Mode, Policy, PolicyOutput
    from rlinf_lite.models.check import check_policy
    from rlinf_lite.models.mlp import MLPGaussianPolicy
    from rlinf_lite.models.registry import UnknownPolicyError, build_policy, load_policy, policy_class, register_policy

_MODULES = {
    "base": ["NOISE_KEY", "ActionOutput", "CheckpointFormatError", "Mode", "Policy", "PolicyOutput"],
    "check": ["check_policy"],
    "mlp": ["MLPGaussianPolicy"],
    "registry": ["UnknownPolicyError", "build_policy", "load_policy", "policy_class", "register_policy"],
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
