"""The same seed gives the same losses, however the run is spread over workers and stages."""

import pytest

from tests.runners.conftest import read_metrics

LOSSES = ("train/actor/policy_loss", "train/critic/value_loss", "train/actor/approx_kl_k3", "rollout/returns_mean")

pytestmark = pytest.mark.processes

SPREADS = {
    "one of each": [],
    "two env workers and two actors, two stages": [
        "cluster.component_placement={actor: 0-1, rollout: '0', env: 0-1}",
        "rollout.pipeline_stage_num=2",
    ],
    "two rollout workers for one env worker, small micro-batches": [
        "cluster.component_placement={actor: 0-1, rollout: 0-1, env: '0'}",
        "actor.micro_batch_size=4",
    ],
}


@pytest.fixture(scope="module")
def curves():
    return {}


@pytest.mark.parametrize("spread", SPREADS)
def test_losses_do_not_depend_on_the_placement(start, curves, spread):
    result = start(*SPREADS[spread]).run()
    curves[spread] = read_metrics(result.run_dir)
    assert len(curves[spread]) == 3
    for own, reference in zip(curves[spread], curves["one of each"], strict=True):
        assert [own[name] for name in LOSSES] == pytest.approx([reference[name] for name in LOSSES], abs=1e-4)


def test_groups_may_lie_in_several_stages_and_with_several_actors(start):
    grpo = ["algorithm={adv_type: grpo, loss_type: ppo, group_size: 8, value_coef: 0, update_epochs: 2}"]
    grpo += ["env.train.auto_reset=false", "rollout.num_chunks=10"]
    grpo += ["actor.global_batch_size=20", "actor.micro_batch_size=10"]
    curves = []
    for spread in ("one of each", "two env workers and two actors, two stages"):
        curves.append(read_metrics(start(*grpo, *SPREADS[spread]).run().run_dir))
        start.stop()
    for own, reference in zip(*curves, strict=True):
        for name in ("train/actor/policy_loss", "train/actor/approx_kl_k3", "rollout/advantages_max"):
            assert own[name] == pytest.approx(reference[name], abs=1e-4), name
    assert curves[0][0]["rollout/advantages_max"] > 0


def test_losses_depend_on_the_seed(start, curves):
    other = read_metrics(start("runner.seed=1").run().run_dir)
    assert abs(other[0]["train/critic/value_loss"] - curves["one of each"][0]["train/critic/value_loss"]) > 1e-3


def test_the_first_pass_has_ratio_one(start):
    result = start("algorithm.update_epochs=1", "actor.global_batch_size=64", "runner.max_steps=2").run()
    for line in read_metrics(result.run_dir):
        assert line["train/actor/ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert line["train/actor/approx_kl_k3"] == pytest.approx(0.0, abs=1e-9)
