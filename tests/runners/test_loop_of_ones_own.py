"""The loop that a guide to RLinf writes out, without a runner's bookkeeping: calls go on from the last ones."""

import pytest

from rlinf_lite.config import load_config
from rlinf_lite.runners import EmbodiedRunner
from rlinf_lite.scheduler import HybridComponentPlacement, WorkerError, wait_all
from tests.runners.conftest import SMALL_PENDULUM, WORKERS

NUM_STEPS = 3


@pytest.mark.parametrize("auto_reset", [True, False])
def test_calls_without_arguments_do_what_those_of_the_runner_do(cluster, tmp_path, auto_reset):
    paths = [f"runner.logger.log_path={tmp_path}"]
    options = ["actor.optim.lr_scheduler=linear", f"env.train.auto_reset={auto_reset}", f"runner.max_steps={NUM_STEPS}"]
    options += [] if auto_reset else ["env.train.max_episode_steps=8"]  # a step plays whole episodes
    cfg = load_config("embodiment/gym_pendulum_ppo_mlp", [*SMALL_PENDULUM, *paths, *options])
    placement = HybridComponentPlacement(cfg)
    groups = cluster.launch(placement, **{name: worker.create_group(cfg) for name, worker in WORKERS.items()})
    env, rollout, actor = groups["env"], groups["rollout"], groups["actor"]

    def train(numbered):
        EmbodiedRunner(cfg=cfg, **groups).init_workers()
        for step in range(NUM_STEPS):
            number = (step,) if numbered else ()
            wait_all(rollout.sync_model_from_actor(*number), actor.sync_model_to_rollout(), timeout_s=60)
            played, _, _ = wait_all(
                env.interact(*number), rollout.generate(), actor.recv_rollout_batch(), timeout_s=60, what="rollouts"
            )
            returns = [record.return_ for result in played for record in result["episodes"]]
            advantages = actor.compute_advantages_and_returns().wait(60)[0]
            yield returns, advantages, actor.run_training(*number).wait(60)[0]["metrics"]

    assert list(train(numbered=False)) == list(train(numbered=True))
    with pytest.raises(WorkerError, match=f"expects weights 0, actor sent {NUM_STEPS}"):
        wait_all(rollout.sync_model_from_actor(0), actor.sync_model_to_rollout(), timeout_s=60)
    for group in groups.values():
        group.shutdown()
