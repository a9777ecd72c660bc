"""Policies: backbone, action head, value head and checkpoint format.

Names are loaded when first used, so that a policy's config (`vla.config`) can be read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_lite.lazy import lazy_names

if TYPE_CHECKING:
    from rlinf_lite.envs.observations import ObservationError as ObservationError
    from rlinf_lite.models.acting import ActionQueue as ActionQueue
    from rlinf_lite.models.base import NOISE_KEY as NOISE_KEY
    from rlinf_lite.models.base import ActionOutput as ActionOutput
    from rlinf_lite.models.base import CheckpointFormatError as CheckpointFormatError
    from rlinf_lite.models.base import Mode as Mode
    from rlinf_lite.models.base import Policy as Policy
    from rlinf_lite.models.base import PolicyInputs as PolicyInputs
    from rlinf_lite.models.base import PolicyOutput as PolicyOutput
    from rlinf_lite.models.base import UnknownModeError as UnknownModeError
    from rlinf_lite.models.base import row_noise_keys as row_noise_keys
    from rlinf_lite.models.bases import GaussianPolicy as GaussianPolicy
    from rlinf_lite.models.bases import NetworkPolicy as NetworkPolicy
    from rlinf_lite.models.bases import TokenPolicy as TokenPolicy
    from rlinf_lite.models.bases import VelocityPolicy as VelocityPolicy
    from rlinf_lite.models.check import check_policy as check_policy
    from rlinf_lite.models.flow.sampler import Sampler as Sampler
    from rlinf_lite.models.heads import CategoricalTokens as CategoricalTokens
    from rlinf_lite.models.heads import Gaussian as Gaussian
    from rlinf_lite.models.mlp.policy import MLPGaussianPolicy as MLPGaussianPolicy
    from rlinf_lite.models.registry import build_policy as build_policy
    from rlinf_lite.models.registry import load_policy as load_policy
    from rlinf_lite.models.registry import policy_class as policy_class
    from rlinf_lite.models.registry import register_policy as register_policy
    from rlinf_lite.models.sampling import normal_noise as normal_noise
    from rlinf_lite.models.sampling import uniform_noise as uniform_noise
    from rlinf_lite.registry import UnknownPolicyError as UnknownPolicyError


__getattr__ = lazy_names(
    __name__,
    {
        "acting": ["ActionQueue"],
        "base": [
            "NOISE_KEY",
            "ActionOutput",
            "CheckpointFormatError",
            "Mode",
            "ObservationError",
            "Policy",
            "PolicyInputs",
            "PolicyOutput",
            "UnknownModeError",
            "row_noise_keys",
        ],
        "bases": ["GaussianPolicy", "NetworkPolicy", "TokenPolicy", "VelocityPolicy"],
        "check": ["check_policy"],
        "flow.sampler": ["Sampler"],
        "heads": ["CategoricalTokens", "Gaussian"],
        "mlp.policy": ["MLPGaussianPolicy"],
        "registry": ["UnknownPolicyError", "build_policy", "load_policy", "policy_class", "register_policy"],
        "sampling": ["normal_noise", "uniform_noise"],
    },
)
