"""Off-policy actor-critic losses: functions from critics' values and log-probabilities to one loss per transition.

A transition is a chunk of at most C env steps: R, the sum of gamma^i r_i over its h executed steps, and a discount of
gamma^h for the value behind it, which is 0 where the episode terminated (a time limit is no termination).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlinf_lite.cards import OffPolicyNeeds
from rlinf_lite.registry import OFF_POLICY

if TYPE_CHECKING:
    from rlinf_lite.config.off_policy import OffPolicyConfig


@dataclass
class CriticInputs:
    """What a critic's loss reads, of b transitions and M critics; all but `q` and `q_policy` without gradients."""

    q: Tensor
    """Values [M, b] of the transitions' own actions."""
    rewards: Tensor
    """R [b]."""
    discounts: Tensor
    """[b], 0 behind a termination."""
    next_q: Tensor
    """Values [M', b] of the policy's actions in the following observation, by M' of the target critics."""
    next_logprobs: Tensor
    """Log-probabilities [b] of those actions."""
    temperature: Tensor
    """The weight of the entropy, a scalar."""
    q_policy: Callable[[], Tensor]
    """Values [M, b] of the policy's actions in the transitions' observations, computed when called."""


@dataclass
class ActorInputs:
    """What an actor's loss reads, of b transitions and M critics."""

    logprobs: Tensor
    """Log-probabilities [b] of the policy's actions in the transitions' observations."""
    q: Tensor
    """Values [M, b] of those actions, with gradients through the actions."""
    temperature: Tensor
    """The weight of the entropy, a scalar without gradients."""
    imitation: Tensor | None = None
    """The policy's imitation loss on the same transitions, a scalar; only for losses that need it."""


Loss = tuple[Tensor, dict[str, Tensor]]
"""One loss per transition [b], and metrics per transition [b]."""


@dataclass(frozen=True)
class OffPolicyLosses:
    """An algorithm: its two losses."""

    critic: Callable[[CriticInputs, OffPolicyConfig], Loss]
    actor: Callable[[ActorInputs, OffPolicyConfig], Loss]


def register_off_policy(
    name: str, imitation: bool = False, unread: tuple[str, ...] = ()
) -> Callable[[OffPolicyLosses], OffPolicyLosses]:
    """A function that makes losses available as `off_policy.algorithm: <name>`, and records whether they need the
    policy's imitation loss. `unread`: keys of `off_policy` that have no effect on them."""
    return OFF_POLICY.register(name, OffPolicyNeeds(imitation, unread))


def td_target(inputs: CriticInputs, with_entropy: bool) -> Tensor:
    """R + discount * (min of the target critics' values - temperature * log-probability) [b]; the second term only
    `with_entropy` (Haarnoja et al. 2018, arXiv:1812.05905; without it as RLPD's code has it)."""
    following = inputs.next_q.min(dim=0).values
    if with_entropy:
        following = following - inputs.temperature * inputs.next_logprobs
    return inputs.rewards + inputs.discounts * following


def sac_critic(inputs: CriticInputs, cfg: OffPolicyConfig) -> Loss:
    """The mean over critics of (Q_j - y)^2, with y of `td_target`. Metrics: `critic_loss`, `q_mean`, `target_mean`."""
    target = td_target(inputs, cfg.entropy_in_target)
    loss = (inputs.q - target).square().mean(dim=0)
    return loss, {"critic_loss": loss.detach(), "q_mean": inputs.q.detach().mean(dim=0), "target_mean": target}


def sac_actor(inputs: ActorInputs, cfg: OffPolicyConfig) -> Loss:
    """temperature * log-probability - Q, with the critics' minimum or mean (`off_policy.actor_value`). Metrics:
    `actor_loss`, `entropy`."""
    q = inputs.q.min(dim=0).values if cfg.actor_value == "min" else inputs.q.mean(dim=0)
    loss = inputs.temperature * inputs.logprobs - q
    return loss, {"actor_loss": loss.detach(), "entropy": -inputs.logprobs.detach()}


def td3_bc_critic(inputs: CriticInputs, cfg: OffPolicyConfig) -> Loss:
    """As `sac_critic`, plus `cql_coef` times conservative Q-learning (Kumar et al. 2020, arXiv:2006.04779) in
    verl-vla's form: the mean over critics of T logsumexp([Q(s, a), Q(s, pi)] / T) - Q(s, a). Metric besides, where
    `cql_coef` is above 0: `cql`."""
    loss, metrics = sac_critic(inputs, cfg)
    if not cfg.cql_coef:
        return loss, metrics
    temperature = cfg.cql_temperature
    both = torch.stack([inputs.q, inputs.q_policy()]) / temperature
    cql = (temperature * both.logsumexp(dim=0) - inputs.q).mean(dim=0)
    return loss + cfg.cql_coef * cql, {**metrics, "cql": cql.detach()}


def td3_bc_actor(inputs: ActorInputs, cfg: OffPolicyConfig) -> Loss:
    """As `sac_actor`, plus `bc_coef` times the policy's imitation loss (Fujimoto and Gu 2021, arXiv:2106.06860, in
    verl-vla's form). Metric besides: `imitation_loss`."""
    assert inputs.imitation is not None
    loss, metrics = sac_actor(inputs, cfg)
    imitation = inputs.imitation.expand(len(loss))
    return loss + cfg.bc_coef * imitation, {**metrics, "imitation_loss": imitation.detach()}


def temperature_loss(log_temperature: Tensor, logprobs: Tensor, target_entropy: float) -> Tensor:
    """-log temperature * (log-probability + target entropy) [b], by which the temperature rises while the policy's
    entropy is below the target, as in Stable-Baselines3."""
    return -log_temperature * (logprobs + target_entropy).detach()


sac = OffPolicyLosses(sac_critic, sac_actor)
"""Soft actor-critic; with `replay.shares` of demonstrations it is RLPD (Ball et al. 2023, arXiv:2302.02948)."""
td3_bc = OffPolicyLosses(td3_bc_critic, td3_bc_actor)
"""SAC's losses, with imitation for the actor and conservative values for the critics."""
