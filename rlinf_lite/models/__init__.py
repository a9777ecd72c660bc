"""Policies: backbone, action head, value head and checkpoint format."""

from rlinf_lite.models.base import NOISE_KEY, ActionOutput, CheckpointFormatError, Mode, Policy, PolicyOutput
from rlinf_lite.models.mlp import MLPGaussianPolicy
from rlinf_lite.models.registry import UnknownPolicyError, build_policy, load_policy, policy_class, register_policy

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
    "load_policy",
    "policy_class",
    "register_policy",
]
