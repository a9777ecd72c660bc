"""With learning rate 0 nothing is clipped: acting and training give each action the same probability.

Every policy, every estimator; fp32.
"""

import pytest

from tests.runners.conftest import SMALL_PENDULUM, read_metrics
from tests.runners.test_flow_runs import PPO as SMALL_TABLETOP

ZERO = ["actor.optim.lr=0", "runner.max_steps=2", "algorithm.update_epochs=2", "algorithm.critic_warmup_steps=0"]
TABLETOP = [*SMALL_TABLETOP, "cluster.component_placement={actor: '0', rollout: '0', env: '0'}"]
WHOLE = ["env.train.auto_reset=false", "rollout.num_chunks=null", "algorithm.group_size=2"]


def check(run_dir):
    for line in read_metrics(run_dir):
        assert line["rollout/logprob_drift"] < 1e-5
        assert line["train/actor/clip_fraction"] == 0 and abs(line["train/actor/approx_kl_k3"]) < 1e-8
        assert line["train/actor/ratio_max"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    "config, overrides",
    {
        "tokens": ("tabletop_ppo_vla", []),
        "tokens, per action, grpo": ("tabletop_grpo_vla", ["algorithm.logprob_type=action_level", *WHOLE]),
        "pi0": ("tabletop_ppo_flow", ["model.options.keep_prefix=false", "model.options.trainable=all"]),
        "pi0, flow_noise": ("tabletop_ppo_flow_noise", []),
        "pi0.5, per action": ("tabletop_ppo_flow", ["model.id=pi05", "algorithm.logprob_type=action_level"]),
        "smolvla, grpo": ("tabletop_grpo_flow", ["model.id=smolvla", "algorithm.filter_groups=false", *WHOLE]),
    }.values(),
)
def test_every_policy(start, config, overrides):
    fresh = ["rollout.model_dir=null"] if "flow" in config else []
    more = [*ZERO, "actor.optim.value_lr=0", *fresh, *overrides]
    check(start(*more, config=config, small=TABLETOP).run().run_dir)


@pytest.mark.parametrize("recomputes", [True, False])
def test_who_acted_is_compared_where_log_probabilities_are_computed_again(start, recomputes):
    """Also without a correction. If nothing is recomputed there is nothing to compare, and no metric."""
    more = [*ZERO, "actor.optim.value_lr=0", f"algorithm.recompute_logprobs={str(recomputes).lower()}"]
    for line in read_metrics(start(*more, small=SMALL_PENDULUM).run().run_dir):
        assert ("train/actor/effective_sample_size" in line) == recomputes
        assert line.get("train/actor/effective_sample_size", 1) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    "estimator", ["gae", "grpo", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_every_estimator_of_robots(start, estimator):
    groups = [] if estimator == "gae" else [*WHOLE, "algorithm.group_size=4"]
    more = [*ZERO, "actor.optim.value_lr=0", f"algorithm.adv_type={estimator}", *groups]
    check(start(*more, small=SMALL_PENDULUM).run().run_dir)


@pytest.mark.parametrize(
    "estimator", ["gae", "grpo", "rloo", "opo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_every_estimator_of_language_models(start_reasoning, estimator):
    check(start_reasoning(*ZERO, f"algorithm.adv_type={estimator}").run().run_dir)
