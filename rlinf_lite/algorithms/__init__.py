"""Advantages, losses, KL and aggregation: pure functions on tensors, one registry each."""

from rlinf_lite.algorithms.advantages import (
    advantage_names,
    compute_advantages,
    filter_groups,
    gae,
    grpo,
    needs_values,
    register_advantage,
    reinforce_plus_plus,
)
from rlinf_lite.algorithms.levels import Level, entropy_at_level, expand_to_level, sum_to_level
from rlinf_lite.algorithms.losses import (
    actor_critic_loss,
    aggregate_loss,
    kl_penalty,
    loss_denominator,
    policy_loss,
    policy_loss_names,
    ppo,
    register_policy_loss,
    value_loss,
)
from rlinf_lite.algorithms.masked import explained_variance, masked_mean, masked_moments, masked_var, whiten
from rlinf_lite.algorithms.records import (
    AdvantageInputs,
    AdvantageOutputs,
    AllReduce,
    InputError,
    LossInputs,
    LossOutputs,
)
from rlinf_lite.algorithms.registry import UnknownAlgorithmError

__all__ = [
    "AdvantageInputs",
    "AdvantageOutputs",
    "AllReduce",
    "InputError",
    "Level",
    "LossInputs",
    "LossOutputs",
    "UnknownAlgorithmError",
    "actor_critic_loss",
    "advantage_names",
    "aggregate_loss",
    "compute_advantages",
    "entropy_at_level",
    "expand_to_level",
    "explained_variance",
    "filter_groups",
    "gae",
    "grpo",
    "kl_penalty",
    "loss_denominator",
    "masked_mean",
    "masked_moments",
    "masked_var",
    "needs_values",
    "policy_loss",
    "policy_loss_names",
    "ppo",
    "register_advantage",
    "register_policy_loss",
    "reinforce_plus_plus",
    "sum_to_level",
    "value_loss",
    "whiten",
]
