"""Acting with the actor's own weights, in its process: `cluster.fuse=actor,rollout`."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlinf_lite.config import load_config
from rlinf_lite.config.plan import plan_of
from rlinf_lite.control import supervise
from rlinf_lite.preview.memory import estimate
from rlinf_lite.runners import EmbodiedRunner
from rlinf_lite.scheduler import HybridComponentPlacement
from tests.control.conftest import events
from tests.control.test_runs import hurt_within
from tests.runners.conftest import SMALL_PENDULUM, WORKERS, read_metrics
from tests.runners.test_both_runtimes import tensors

pytestmark = pytest.mark.processes


FUSED = "cluster.fuse='actor,rollout'"
SPREADS = {
    "one of each": "{actor: '0', rollout: '0', env: '0'}",
    "two that have the whole": "{actor: 0-1, rollout: 0-1, env: '0'}",
    "two that have shards": "{actor: 0-1, rollout: 0-1, env: 0-1}",
}


@pytest.fixture
def train(cluster, tmp_path):
    def train(*overrides, name, before=lambda runner: None):
        paths = [f"runner.logger.log_path={tmp_path / name}"]
        cfg = load_config("gym_pendulum_ppo_mlp", [*SMALL_PENDULUM, *paths, "runner.save_interval=100", *overrides])
        with supervise(cfg, cluster) as supervisor:
            groups = cluster.launch(
                HybridComponentPlacement(cfg), **{role: worker.create_group(cfg) for role, worker in WORKERS.items()}
            )
            try:
                runner = EmbodiedRunner(cfg=cfg, **groups, supervisor=supervisor)
                runner.init_workers()
                before(runner)
                pids = {role: [member.pid for member in group.members] for role, group in groups.items()}
                return runner.run(), pids
            finally:
                for group in groups.values():
                    group.shutdown()

    return train


def weights(result):
    return load_file(result.checkpoint / "policy" / "model.safetensors")


@pytest.mark.parametrize("spread", ["one of each", *(pytest.param(x, marks=pytest.mark.slow) for x in [*SPREADS][1:])])
def test_every_number_is_that_of_processes_apart(train, spread):
    sharded = "shards" in spread
    ours = [f"cluster.component_placement={SPREADS[spread]}", "runner.val_check_interval=2"]
    ours.append(f"actor.strategy={'fsdp' if sharded else 'replicated'}")
    apart, pids = train(*ours, name="apart")
    assert not {*pids["actor"]} & {*pids["rollout"]}
    fused, pids = train(*ours, FUSED, name="fused")
    assert pids["actor"] == pids["rollout"] and not {*pids["env"]} & {*pids["actor"]}
    one, other = tensors(apart, 3), tensors(fused, 3)
    assert one == other and {Path(file).parent.name for file, _ in one} >= {"policy", "shards"}
    lines, others = read_metrics(apart.run_dir), read_metrics(fused.run_dir)
    for name in ("rollout/returns_mean", "train/actor/policy_loss", "eval/return", "train/actor/ratio_max"):
        assert [line.get(name) for line in lines] == [line.get(name) for line in others]
    assert [e.total for e in apart.evals] == [e.total for e in fused.evals]


@pytest.mark.slow
def test_a_kill_takes_both_and_costs_nothing(train):
    more = ["runner.max_steps=8", "control.snapshot_interval=1", "control.backoff_s=0.1", "actor.strategy=replicated"]
    more.append(f"cluster.component_placement={SPREADS['two that have the whole']}")
    undisturbed, _ = train(*more, FUSED, name="undisturbed")

    def hurt(runner):
        hurt_within(runner, "_train", {3: ("rollout", 1), 6: ("env", 0)})

    recovered, _ = train(*more, FUSED, name="hurt", before=hurt)
    failed = [set(event["failed"]) for event in events(recovered.run_dir, "recovered")]
    assert failed == [{"actor[1]", "rollout[1]"}, {"env[0]"}] or failed == [{"rollout[1]"}, {"env[0]"}], failed
    one, other = weights(undisturbed), weights(recovered)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_preview_counts_the_weights_once():
    together = "cluster.component_placement={actor: '0', rollout: '0', env: '0'}"
    apart = estimate(plan_of(load_config("tabletop_ppo_vla", [together])))
    fused = estimate(plan_of(load_config("tabletop_ppo_vla", [together, FUSED])))
    assert set(fused.processes) == {"env", "actor+rollout"} and not fused.ranks["rollout"].held
    saved = apart.ranks["rollout"].held["weights"] + apart.ranks["actor"].host["weight sync"]
    interpreter = apart.ranks["rollout"].host["interpreter"]
    assert apart.node_host_bytes - fused.node_host_bytes >= saved + interpreter


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("cluster.fuse='actor,env'", "there is no role 'env' that could share"),
        ("runner.mode=async", "one of them generates while the others train"),
        ("cluster.component_placement={actor: '0', rollout: '0:0-1', env: '0'}", "different places"),
    ],
)
def test_what_cannot_share_is_refused(override, problem):
    with pytest.raises(ValueError, match=problem):
        load_config("tabletop_ppo_vla", [FUSED, "algorithm.correction.kind=decoupled", override])


def test_runs_without_roles_that_share_are_refused():
    with pytest.raises(ValueError, match=r"roles of runner\.task_type: sft share no process"):
        load_config("tabletop_sft_vla", [FUSED])
    with pytest.raises(ValueError, match=r"roles of runner\.task_type: off_policy share no process"):
        load_config("gym_pendulum_sac_mlp", [FUSED])
