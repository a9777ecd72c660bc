"""The sections of off-policy runs: `off_policy` and `replay`."""

from __future__ import annotations

from typing import Literal

from rlinf_lite.cards import Float, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, UnitFloat
from rlinf_lite.registry import OFF_POLICY


class OffPolicyConfig(Section):
    """Off-policy actor-critic learning, of runs with `runner.task_type: off_policy`. The policy learns by
    `actor.optim`, critics and temperature by the same with its `value_lr`."""

    algorithm: str = OFF_POLICY.default
    """Losses of actor and critics: sac (with demonstrations in `replay.shares` it is RLPD), td3_bc (sac with imitation
    and conservative values), or `pkg.module:losses`."""
    updates_per_step: PositiveInt = 1
    """Updates of critics per runner step; a step plays env.train.num_envs x rollout.num_chunks decisions."""
    actor_interval: PositiveInt = 1
    """Updates of critics per update of actor and temperature."""
    random_steps: NonNegativeInt = 0
    """Number of first runner steps in which actions are drawn uniformly, and nothing trains."""
    gamma: UnitFloat = 0.99
    """Discount per env step."""
    tau: UnitFloat = 0.005
    """How far target critics move towards the critics in an update."""
    num_critics: PositiveInt = 2
    """Critics; RLPD has 10."""
    target_subset: PositiveInt = 2
    """Target critics, drawn in each update, whose smallest value is the target's."""
    hidden_sizes: list[PositiveInt] = [256, 256]
    """Widths of the critics' hidden layers."""
    layer_norm: bool = False
    """LayerNorm in critics, which RLPD needs."""
    actor_value: Literal["min", "mean"] = "min"
    """What the actor maximises: the smallest value of all critics, as in SAC, or their mean, as in RLPD."""
    entropy_in_target: bool = True
    """Whether values contain the policy's entropy."""
    temperature: PositiveFloat = 1.0
    """Weight of the entropy at the beginning."""
    learn_temperature: bool = True
    """Adapt the weight, so that the entropy stays at `target_entropy`."""
    target_entropy: Float | None = None
    """null: minus the number of actions in a chunk, over all dimensions."""
    bc_coef: NonNegativeFloat = 0.5
    """td3_bc: weight of imitation in the actor's loss, of demonstrations and successes."""
    cql_coef: NonNegativeFloat = 0.5
    """td3_bc: weight of conservative Q-learning in the critics' loss."""
    cql_temperature: PositiveFloat = 1.0
    """td3_bc: temperature of conservative Q-learning."""


class ReplayConfig(Section):
    """The replay buffer of an off-policy run, on disk in the run's directory (docs/off_policy.md)."""

    capacity: PositiveInt = 1_000_000
    """Newest decisions of all environments that batches are drawn from."""
    min_size: PositiveInt = 1000
    """Number of played transitions from which on updates begin."""
    shares: dict[Literal["online", "successes", "failures", "demonstrations"], UnitFloat] = {"online": 1.0}
    """Shares of a batch by pool. online: all that was played; successes, failures: of episodes that ended so;
    demonstrations: those that `data` names, as in a run of imitation. The share of an empty pool goes to the others."""
