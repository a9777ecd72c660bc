"""`cluster.component_placement: auto`: each trial's steps are steps of the run, and the fastest placement is kept."""

import json
import os
import shlex
import signal
from html import unescape

import pytest
import torch
from safetensors.torch import load_file

from rlinf_lite.config import load_config
from rlinf_lite.config.names import fused_roles
from rlinf_lite.control import supervise
from rlinf_lite.data.problems import open_problems
from rlinf_lite.preview.placements import check_room
from rlinf_lite.report import write_report
from rlinf_lite.runners import (
    AsyncEmbodiedRunner,
    EmbodiedRunner,
    ReasoningRunner,
    RunResult,
    claim_run,
    placed,
    run_placed,
    stopping,
)
from rlinf_lite.runners.checkpoints import CheckpointStore, read_state
from rlinf_lite.scheduler import HybridComponentPlacement
from rlinf_lite.workers import EnvWorker
from rlinf_lite.workers.reasoning import launch_roles
from tests.runners.conftest import SMALL_MATH, SMALL_PENDULUM, WORKERS, read_metrics

pytestmark = pytest.mark.processes


NAME = "gym_pendulum_ppo_mlp"
AUTO = ["cluster.component_placement=auto", "runner.max_steps=12", "runner.save_interval=100"]


class FailsUnfusedAndInTwos(EnvWorker):
    """Two copies of the weights are too large, as a second step shows; and so are two simulators."""

    def interact(self, step=None):
        if self.cfg.cluster.fuse is None and step != 0:
            raise RuntimeError("out of memory")
        if self.world_size == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().interact(step)


@pytest.fixture
def train(cluster, tmp_path):
    """`train(*overrides)` does a whole run, as in the example."""

    def train(*overrides, name="run", env=EnvWorker, runner_class=EmbodiedRunner):
        paths = [f"runner.logger.log_path={tmp_path / name}"]
        cfg = load_config(NAME, [*SMALL_PENDULUM, *AUTO, *paths, *overrides])
        with claim_run(cfg) as claim, supervise(cfg, cluster) as supervisor:

            def run(cfg, until=None):
                placement = HybridComponentPlacement(cfg)
                workers = {**WORKERS, "env": env}
                groups = cluster.launch(
                    placement, **{role: worker.create_group(cfg) for role, worker in workers.items()}
                )
                runner = runner_class(cfg=cfg, **groups, supervisor=supervisor, claim=claim)
                runner.init_workers()
                return runner.run(until)

            try:
                return run_placed(cfg, claim, supervisor, run, check_room(cfg))
            finally:
                for processes in list(cluster.processes):
                    cluster.end(processes)

    return train


def choice(result):
    return json.loads((result.run_dir / "placement.json").read_text())


def last_event(result):
    return json.loads((result.run_dir / "events.jsonl").read_text().splitlines()[-1])["event"]


def weights(result):
    return load_file(result.checkpoint / "policy" / "model.safetensors")


@pytest.mark.slow
def test_going_on_with_other_groups_changes_no_bit(train, monkeypatch):
    """From one runner to the next, on the same slots."""
    fixed = ["cluster.component_placement={actor: '0', rollout: '0', env: '0'}", "runner.val_check_interval=4"]

    def in_parts(cfg, claim, supervisor, run, trials):
        paused = []
        for until in (4, 9):
            paused.append(run(cfg, until))
            placed._end_groups(supervisor)
        assert [result.completed_steps for result in paused] == [4, 9] and not paused[1].report
        return run(cfg, None)

    still = train(*fixed)
    monkeypatch.setattr(f"{__name__}.run_placed", in_parts)
    moved = train(*fixed, name="moved")
    assert weights(moved).keys() == weights(still).keys()
    assert all(torch.equal(one, weights(still)[name]) for name, one in weights(moved).items())
    logged = [
        [line["rollout/returns_mean"] for line in read_metrics(r.run_dir) if "time/step" in line]
        for r in (moved, still)
    ]
    assert logged[0] == logged[1] and len(logged[0]) == 12


@pytest.mark.slow
def test_steps_of_the_trials_are_steps_of_the_run(train, capsys):
    """Every result is that of a run with one placement, up to rounding of sums over fewer rows."""
    one_slot = [
        "cluster.num_gpus_per_node=1",
        "env.num_threads=1",
        "runner.val_check_interval=5",
        "runner.max_steps=14",
    ]
    moved = train(*one_slot)
    shown = capsys.readouterr().out
    still = train(*one_slot, "cluster.component_placement={actor: '0', rollout: '0', env: '0'}", name="still")
    lines, others = read_metrics(moved.run_dir), read_metrics(still.run_dir)
    assert [line["step"] for line in lines if "time/step" in line] == list(range(1, 15))
    returns = [[summary.total.return_mean for summary in result.evals] for result in (moved, still)]
    assert len(returns[0]) == 4 and returns[0] == pytest.approx(returns[1], abs=1e-3)
    same = ("train/actor/policy_loss", "rollout/returns_mean", "env/num_steps")
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys()
        assert [line.get(name, 0) for name in same] == pytest.approx([other.get(name, 0) for name in same], abs=1e-4)
    for one, other in zip(weights(moved).values(), weights(still).values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)

    tried = choice(moved)
    assert len(tried) == shown.count("placement: trying") == 4 and all(one["per_s"] > 0 for one in tried)
    [kept] = [one for one in tried if one["outcome"] == "kept"]
    assert kept["per_s"] == max(one["per_s"] for one in tried) and f"  kept: {kept['overrides']}" in shown
    saved, again = load_config(moved.run_dir / "config.yaml"), load_config(NAME, shlex.split(kept["overrides"]))
    assert saved.cluster.component_placement == again.cluster.component_placement
    assert saved.cluster.fuse == again.cluster.fuse
    assert saved.rollout.pipeline_stage_num == again.rollout.pipeline_stage_num
    page = write_report(moved.run_dir).read_text()
    assert "<h2>Placement</h2>" in page and all(one["overrides"] in unescape(page) for one in tried)
    events = [json.loads(line)["event"] for line in (moved.run_dir / "events.jsonl").read_text().splitlines()]
    assert "detected" not in events  # the end of workers is no failure here


@pytest.mark.parametrize("fastest", [0, 1, 2, 3])
def test_the_placement_whose_steps_are_fastest_is_kept(tmp_path, fastest):
    """Without workers. The first step of each trial, and steps of the trials before, do not count."""
    one_slot = ["cluster.num_gpus_per_node=1", "runner.max_steps=14", f"runner.logger.log_path={tmp_path}"]
    cfg = load_config(NAME, [*SMALL_PENDULUM, *AUTO, *one_slot])
    trials = check_room(cfg)
    rates = [10.0, 20.0, 30.0, 20.0]
    rates[fastest] = 40.0
    assert len(trials) == len(rates)
    launched = []

    def run(where, until):
        launched.append(where)
        first = 0 if claim.resume_from is None else read_state(claim.resume_from)["completed_steps"]
        last, rate = until or cfg.runner.max_steps, rates[len(launched) - 1] if until else 0.0
        with (claim.log_dir / "metrics.jsonl").open("a") as file:
            for step in range(first + 1, last + 1):
                per_s = 90.0 - 10 * len(launched) if step == first + 1 else rate - (step == first + 2)
                file.write(json.dumps({"step": step, "time/step": 1.0, "perf/env_steps_per_s": per_s}) + "\n")
        state = json.dumps({"completed_steps": last})
        store = CheckpointStore(claim.checkpoint_dir, 10)
        saved = store.write(last, lambda partial: (partial / "training_state" / "runner.json").write_text(state))
        claim.resume_from = saved.resolve()
        return RunResult(last, False, claim.log_dir, saved, cfg.runner.max_steps, [], None)

    with claim_run(cfg) as claim:
        result = run_placed(cfg, claim, None, run, trials)
    assert result.completed_steps == 14 and launched[:4] == [one.placed for one in trials]
    assert launched[4:] == [trials[fastest].placed]
    found = choice(result)
    assert [one["per_s"] for one in found] == rates
    assert [one["outcome"] for one in found] == ["kept" if i == fastest else "tried" for i in range(4)]


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_while_a_placement_pauses_stops_the_run(train, monkeypatch, capsys):
    save = EmbodiedRunner.save_checkpoint

    def save_and_stop(runner):
        save(runner)
        ctrl_c()

    monkeypatch.setattr(EmbodiedRunner, "save_checkpoint", save_and_stop)
    result = train("cluster.num_gpus_per_node=1")
    assert result.interrupted and result.completed_steps == 3 and result.checkpoint.name == "step_000003"
    assert capsys.readouterr().out.count("placement: trying") == 1 and last_event(result) == "stopped"


@pytest.mark.slow
def test_a_second_ctrl_c_ends_the_run_wherever_it_is(train, monkeypatch):
    run_step = EmbodiedRunner.run_step

    def stop_twice_in_the_second_placement(runner, step):
        run_step(runner, step)
        if step == 3:
            ctrl_c()
            ctrl_c()

    monkeypatch.setattr(EmbodiedRunner, "run_step", stop_twice_in_the_second_placement)
    monkeypatch.setattr(stopping, "SAME_REQUEST_S", -1.0)
    with pytest.raises(KeyboardInterrupt):
        train("cluster.num_gpus_per_node=1")


@pytest.mark.slow
def test_a_placement_that_fails_is_out(train):
    """Only this placement is lost: its failures do not count towards the limits of later ones."""
    limits = ["control.max_restarts=1", "control.backoff_s=0", "runner.max_steps=9"]
    result = train("cluster.num_gpus_per_node=1", *limits, env=FailsUnfusedAndInTwos)
    assert [one["outcome"] == "failed" for one in choice(result)] == [True, False, False, True]
    assert load_config(result.run_dir / "config.yaml").cluster.fuse == "actor,rollout"
    assert result.completed_steps == 9
    assert [line["step"] for line in read_metrics(result.run_dir) if "time/step" in line] == list(range(1, 10))


@pytest.mark.slow
def test_an_asynchronous_run_that_ends_within_its_trials_says_what_was_measured(train, capsys):
    """A resumed run would use the fastest placement. Acting and training run at the same time, so they share no
    process."""
    stale = ["runner.mode=async", "runner.max_staleness=1", "algorithm.correction.kind=decoupled"]
    four = ["cluster.num_gpus_per_node=4", "env.train.num_envs=16", "actor.strategy=replicated"]
    result = train(*stale, *four, "runner.max_steps=8", runner_class=AsyncEmbodiedRunner)
    steps = [line for line in read_metrics(result.run_dir) if "time/step" in line]
    assert len(steps) == result.completed_steps == 8 and max(line["async/staleness_max"] for line in steps) <= 1
    found = choice(result)
    assert all("cluster.fuse=null" in one["overrides"] for one in found)
    tried = [one for one in found if one["per_s"]]
    kept = max(tried, key=lambda one: one["per_s"])
    shown = capsys.readouterr().out
    assert len(tried) == shown.count("placement: trying") == 3 < len(found)
    assert kept["outcome"] == "kept" and f"  kept: {kept['overrides']}" in shown
    saved = load_config(result.run_dir / "config.yaml")
    again = load_config(NAME, [*stale, *four, *shlex.split(kept["overrides"])])
    assert saved.cluster.component_placement == again.cluster.component_placement
    assert "<h2>Placement</h2>" in result.report.read_text()


@pytest.mark.slow
def test_language_models_try_too(cluster, tmp_path, capsys):
    """With supervised training, a reference, and a critic that trains first: every result is that of a run with one
    placement, up to rounding of sums over fewer rows. The config's own `cluster.fuse` is among the trials."""
    ours = [
        "runner.max_steps=11",
        "runner.save_interval=100",
        "algorithm.adv_type=gae",
        "sft.num_steps=2",
        "actor.strategy=replicated",
    ]
    ours += ["algorithm.kl={place: loss, coef: 0.1}", "algorithm.critic_warmup_steps=2", "actor.optim.lr=1e-4"]

    def train(name, *overrides):
        paths = [f"runner.logger.log_path={tmp_path / name}"]
        cfg = load_config("math/math_arithmetic_grpo", [*SMALL_MATH, *paths, *ours, *overrides])
        problems = open_problems(cfg)
        with claim_run(cfg) as claim:

            def run(cfg, until=None):
                roles = launch_roles(cfg, cluster, HybridComponentPlacement(cfg))
                runner = ReasoningRunner(cfg, problems, **roles, claim=claim)
                runner.init_workers()
                return runner.run(until)

            try:
                return run_placed(cfg, claim, None, run, check_room(cfg))
            finally:
                for processes in list(cluster.processes):
                    cluster.end(processes)

    moved, still = train("moved", "cluster.component_placement=auto"), train("still")
    lines, others = read_metrics(moved.run_dir), read_metrics(still.run_dir)
    assert [line["step"] for line in lines if "time/step" in line] == list(range(1, 12))
    same = ("rollout/all_rewards", "rollout/generated_tokens", "train/actor/policy_loss", "train/critic/value_loss")
    assert any("train/critic/value_loss" in line for line in lines)
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys()
        assert [line.get(name, 0) for name in same] == pytest.approx([other.get(name, 0) for name in same], abs=1e-4)
    for one, other in zip(weights(moved).values(), weights(still).values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)

    tried = choice(moved)
    assert [one["per_s"] > 0 for one in tried] == [True, True]
    assert {("cluster.fuse=null" in one["overrides"]) for one in tried} == {True, False}
    kept = next(one for one in tried if one["outcome"] == "kept")
    again = load_config("math/math_arithmetic_grpo", [*SMALL_MATH, *ours, *shlex.split(kept["overrides"])])
    saved = load_config(moved.run_dir / "config.yaml")
    assert saved.cluster.component_placement == again.cluster.component_placement
    assert fused_roles(saved) == fused_roles(again)
