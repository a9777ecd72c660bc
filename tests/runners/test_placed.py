"""`cluster.component_placement: auto`: steps are the run's own wherever they are tried; the fastest place is kept."""

import json
import os
import shlex
import signal
import time
from html import unescape
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.embodiment import train_embodied_agent
from examples.math import train_math
from rlinf_lite.config import load_config
from rlinf_lite.config.checks import possible
from rlinf_lite.config.explain import yaml_text
from rlinf_lite.config.names import fused_roles
from rlinf_lite.control import supervise
from rlinf_lite.data.problems import open_problems
from rlinf_lite.preview import placements
from rlinf_lite.preview.placements import placement_text
from rlinf_lite.report import write_report
from rlinf_lite.runners import (
    AsyncEmbodiedRunner,
    EmbodiedRunner,
    ReasoningRunner,
    claim_run,
    placed,
    run_placed,
    stopping,
)
from rlinf_lite.scheduler import Cluster, HybridComponentPlacement, PlacementError, SchedulerError
from rlinf_lite.workers import EnvWorker
from rlinf_lite.workers.reasoning import launch_roles
from tests.runners.conftest import SMALL_MATH, SMALL_PENDULUM, WORKERS, read_metrics


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    """Processes, which are what is tested here."""
    return ray_cluster


NAME = "gym_pendulum_ppo_mlp"
AUTO = ["cluster.component_placement=auto", "runner.max_steps=12", "runner.save_interval=100"]


class SlowAlone(EnvWorker):
    """A simulator of which one process takes long, as if each had a GPU of its own."""

    def interact(self, step=None):
        with self.timer("step"):  # in a span, by which costs are known
            time.sleep(0.6 / self.world_size)
        return super().interact(step)


class SlowAtTheEnd(EnvWorker):
    """So that the last of three placements is not the fastest."""

    def interact(self, step=None):
        time.sleep(0.5 * (step is not None and step >= 6))
        return super().interact(step)


class FailsInTwos(SlowAlone):
    def interact(self, step=None):
        if self.world_size == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().interact(step)


class CannotBeBuiltInTwos(SlowAlone):
    def init(self, layout):
        if self.world_size == 2:
            raise RuntimeError("out of memory")
        return super().init(layout)


class TooLargeUnfused(EnvWorker):
    """As where two copies of the weights are too many, as a second step shows."""

    def interact(self, step=None):
        if self.cfg.cluster.fuse is None and step != 0:
            raise RuntimeError("out of memory")
        return super().interact(step)


class FailsInTwosAndOnceLater(FailsInTwos):
    def interact(self, step=None):
        later = Path(self.cfg.runner.logger.log_path) / "has failed"
        if step == 11 and not later.exists():
            later.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().interact(step)


@pytest.fixture
def train(cluster, tmp_path):
    """`train(*overrides)`: a whole run, as the example does it."""

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
                return run_placed(cfg, claim, supervisor, run)
            finally:
                for processes in list(cluster.processes):
                    cluster.end(processes)

    return train


def choice(result):
    """Of all placements those that were run, and the others."""
    found = json.loads((result.run_dir / "placement.json").read_text())
    ran = [one for one in found if one["outcome"] in ("kept", "tried", "failed")]
    return ran, [one for one in found if one not in ran]


def last_event(result):
    return json.loads((result.run_dir / "events.jsonl").read_text().splitlines()[-1])["event"]


def weights(result):
    return load_file(result.checkpoint / "policy" / "model.safetensors")


def test_going_on_with_other_groups_changes_no_bit(train, monkeypatch):
    """From one runner to the next, on the same slots."""
    fixed = ["cluster.component_placement={actor: '0', rollout: '0', env: '0'}", "runner.val_check_interval=4"]

    def in_parts(cfg, claim, supervisor, run):
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


def test_steps_of_the_search_are_steps_of_the_run(train, capsys):
    """Every number is that of a run that never moved, up to how sums over fewer rows round."""
    one_slot = ["cluster.num_gpus_per_node=1", "env.num_threads=1", "runner.val_check_interval=5"]
    searched = train(*one_slot)
    still = train(*one_slot, "cluster.component_placement={actor: '0', rollout: '0', env: '0'}", name="still")
    lines, others = read_metrics(searched.run_dir), read_metrics(still.run_dir)
    assert [line["step"] for line in lines if "time/step" in line] == list(range(1, 13))
    returns = [[summary.total.return_mean for summary in result.evals] for result in (searched, still)]
    assert len(returns[0]) == 4 and returns[0] == pytest.approx(returns[1], abs=1e-3)
    same = ("train/actor/policy_loss", "rollout/returns_mean", "env/num_steps")
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys()
        assert [line.get(name, 0) for name in same] == pytest.approx([other.get(name, 0) for name in same], abs=1e-4)
    for one, other in zip(weights(searched).values(), weights(still).values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)

    tried, others = choice(searched)
    assert len(tried) == 3 and all(one["measured_s"] > 0 for one in tried)
    assert [one["predicted_s"] for one in tried].count(None) == 1
    assert len(others) >= 5 and all(one["predicted_s"] > 0 and one["outcome"] == "not tried" for one in others)
    assert len({(one["placement"], one["fuse"], one["stages"]) for one in [*tried, *others]}) == 3 + len(others)
    assert {one["fuse"] for one in others} == {None, "actor,rollout"}
    fastest = min(tried, key=lambda one: one["measured_s"])
    assert [one for one in tried if one["outcome"] == "kept"] == [fastest]
    shown = capsys.readouterr().out
    overrides = shlex.split(next(line for line in shown.splitlines() if "  kept: " in line))[1:]
    again = load_config("embodiment/gym_pendulum_ppo_mlp", [*SMALL_PENDULUM, *overrides])  # as one would type them
    assert yaml_text(again.cluster.component_placement) == fastest["placement"]
    assert again.cluster.fuse == fastest["fuse"]
    kept = load_config(searched.run_dir / "config.yaml")
    assert (
        "auto" not in kept.cluster.component_placement.values() and kept.rollout.pipeline_stage_num == fastest["stages"]
    )
    page = write_report(searched.run_dir).read_text()
    assert "<h2>Placement</h2>" in page and all(one["placement"] in unescape(page) for one in [*tried, *others])
    assert f"3 of {3 + len(others)} placements were measured" in page and page.count("<td>not tried") == len(others)
    events = [json.loads(line)["event"] for line in (searched.run_dir / "events.jsonl").read_text().splitlines()]
    assert "detected" not in events  # that workers ended is no failure


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


def test_ctrl_c_while_a_later_placement_is_launched_stops_the_run(train, monkeypatch):
    """There is something to go on from, which the last lines say."""
    launch, launched = Cluster.launch, []

    def launch_and_stop(cluster, *args, **groups):
        launched.append(launch(cluster, *args, **groups))
        if len(launched) == 2:
            ctrl_c()
        return launched[-1]

    monkeypatch.setattr(Cluster, "launch", launch_and_stop)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts by `&` ignores it
    try:
        result = train("cluster.num_gpus_per_node=1", "runner.val_check_interval=3")
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.interrupted and result.completed_steps == 3 and result.checkpoint.name == "step_000003"
    shown = result.describe()
    assert shown.startswith("stopped after 3 of 12 steps") and "  go on: " in shown and len(result.evals) == 1
    assert last_event(result) == "stopped"


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


def test_the_fastest_place_is_found(train):
    """Two simulators take half as long as one. Where the run begins, with all roles on both slots, there are two; with
    one it would take 0.3 s longer."""
    result = train(env=SlowAlone)
    tried, _ = choice(result)
    kept = load_config(result.run_dir / "config.yaml")
    assert len(HybridComponentPlacement(kept).get_strategy("env").processes) == 2, tried
    assert result.completed_steps == 12


@pytest.mark.parametrize("env", [FailsInTwos, CannotBeBuiltInTwos, FailsInTwosAndOnceLater])
def test_a_placement_that_fails_is_out(train, env):
    """It costs nothing but itself: what failed there does not count towards the limits of what comes after."""
    result = train("cluster.num_gpus_per_node=1", "control.max_restarts=1", "control.backoff_s=0", env=env)
    tried, _ = choice(result)
    assert result.completed_steps == 12 and [one["outcome"] for one in tried].count("failed") >= 1
    kept = load_config(result.run_dir / "config.yaml")
    assert len(HybridComponentPlacement(kept).get_strategy("env").processes) == 1, tried
    assert (result.run_dir.parent / "has failed").exists() == (env is FailsInTwosAndOnceLater)


def test_where_the_first_one_does_not_start_another_is_tried(train):
    result = train("cluster.num_gpus_per_node=1", "runner.max_steps=7", env=TooLargeUnfused)
    tried, _ = choice(result)
    assert {one["outcome"] for one in tried if one["fuse"] is None} == {"failed"}
    assert load_config(result.run_dir / "config.yaml").cluster.fuse == "actor,rollout"
    assert result.completed_steps == 7
    assert [line["step"] for line in read_metrics(result.run_dir) if "time/step" in line] == list(range(1, 8))


class Mistaken(EnvWorker):
    def init(self, layout):
        raise RuntimeError("a mistake of the environment's author")


def test_other_failures_end_the_run_at_once(train, capsys):
    with pytest.raises(SchedulerError, match="a mistake of the environment's author"):
        train("cluster.num_gpus_per_node=1", env=Mistaken)
    assert capsys.readouterr().out.count("placement: trying") == 1


def test_nothing_is_launched_where_nothing_fits(train, monkeypatch, capsys):
    monkeypatch.setattr(placed, "room_for", lambda accelerator: 2**20)
    with pytest.raises(PlacementError, match=r"has 1\.0 MiB of memory free, less than any placement takes"):
        train("cluster.num_gpus_per_node=1")
    assert "placement: trying" not in capsys.readouterr().out
    monkeypatch.setattr(placements, "room_for", lambda accelerator: 2**20)
    monkeypatch.setattr(Cluster, "from_config", lambda *_: pytest.fail("a cluster was started"))
    for script, name in ((train_embodied_agent, "gym_pendulum_ppo_mlp"), (train_math, "math/math_arithmetic_grpo")):
        with pytest.raises(PlacementError, match="Lower "):
            script.train(load_config(name, ["cluster.component_placement=auto"]))


def test_the_search_is_over_within_ten_steps_whatever_the_critics_warm_up(train):
    result = train("cluster.num_gpus_per_node=1", "algorithm.critic_warmup_steps=11", "runner.max_steps=10")
    tried, _ = choice(result)
    assert result.completed_steps == 10 and len([one for one in tried if one["measured_s"]]) == 3


def test_steps_in_which_a_critic_trains_alone_count_as_if_the_actor_did_too(tmp_path):
    cfg = load_config("math/math_arithmetic_ppo", ["algorithm.critic_warmup_steps=2"])
    lines = [{"step": step, "time/step": 3.0, "time/training": 1.0} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = placed._steps_since(tmp_path, 1, cfg)
    assert [line["time/step"] for line in found] == [4.0, 3.0]
    assert [line["time/training"] for line in found] == [2.0, 1.0]
    in_simulators = load_config("gym_pendulum_ppo_mlp", ["algorithm.critic_warmup_steps=2"])  # one network for both
    assert [line["time/step"] for line in placed._steps_since(tmp_path, 1, in_simulators)] == [3.0, 3.0]


def test_virtual_slots_are_searched(train):
    """Up to twelve processes, in turn on the cores that there are."""
    four = ["cluster.num_gpus_per_node=4", "env.train.num_envs=16", "env.eval.num_envs=16", "runner.max_steps=10"]
    result = train(*four, "actor.strategy=replicated", "runner.phase_timeout_s=300")
    tried, others = choice(result)
    assert result.completed_steps == 10 and len(tried) == 3
    assert len(tried) + len(others) == len(possible(load_config(NAME, [*SMALL_PENDULUM, *AUTO, *four]))) > 6
    assert all(one["measured_s"] > 0 for one in tried)
    assert min(tried, key=lambda one: one["measured_s"])["outcome"] == "kept"


def test_checkpoints_of_the_search_are_not_in_the_way(train):
    """Of a run that is resumed and keeps two, those from before stay until it writes its own."""
    one_slot = ["cluster.num_gpus_per_node=1", "runner.keep_checkpoints=2", "runner.save_interval=2"]
    first = train(*one_slot, "cluster.component_placement={actor: '0', rollout: '0', env: '0'}", "runner.max_steps=4")
    kept = sorted(path.name for path in first.checkpoint.parent.glob("step_*"))
    assert kept == ["step_000002", "step_000004"]
    more = train(*one_slot, f"runner.resume={first.run_dir}", "runner.max_steps=16", "runner.save_interval=100")
    names = sorted(path.name for path in more.checkpoint.parent.glob("step_*"))
    assert more.completed_steps == 16 and names == ["step_000013", "step_000016"]


def test_a_short_run_ends_while_it_is_still_trying(train, capsys):
    result = train("cluster.num_gpus_per_node=1", "runner.max_steps=4")
    assert result.completed_steps == result.total_steps == 4 and result.report is not None
    assert not (result.run_dir / "placement.json").exists()
    assert "nothing was compared: the run has ended within the 9 steps of the search" in capsys.readouterr().out


def test_a_run_no_longer_than_its_search_says_what_was_measured(train, capsys):
    """The fastest is where it would go on."""
    result = train("cluster.num_gpus_per_node=1", "runner.max_steps=9", env=SlowAtTheEnd)
    tried, _ = choice(result)
    assert result.completed_steps == 9 and len(tried) == 3 and all(one["measured_s"] > 0 for one in tried)
    kept = min(tried, key=lambda one: one["measured_s"])
    shown = capsys.readouterr().out
    assert kept["outcome"] == "kept" and shown.count("placement: trying") == 3 and "  kept: " in shown
    saved = load_config(result.run_dir / "config.yaml")
    assert placement_text(saved) == kept["placement"] and saved.rollout.pipeline_stage_num == kept["stages"]
    assert "<h2>Placement</h2>" in result.report.read_text()


def test_asynchronous_runs_search_too(train):
    stale = ["runner.mode=async", "runner.max_staleness=1", "algorithm.correction.kind=decoupled"]
    result = train(*stale, "cluster.num_gpus_per_node=1", runner_class=AsyncEmbodiedRunner)
    steps = [line for line in read_metrics(result.run_dir) if "time/step" in line]
    assert len(steps) == 12 and max(line["async/staleness_max"] for line in steps) <= 1
    tried, others = choice(result)
    assert len(tried) == 3 and {one["fuse"] for one in [*tried, *others]} == {None}  # acting goes on beside training


def test_language_models_search_too(cluster, tmp_path, capsys):
    """With a supervised stage before, a reference, and a critic that goes first: every number is that of a run that
    never moved, up to how sums over fewer rows round. A config's own `cluster.fuse` is one of those tried."""
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
                return run_placed(cfg, claim, None, run)
            finally:
                for processes in list(cluster.processes):
                    cluster.end(processes)

    searched, still = train("searched", "cluster.component_placement=auto"), train("still")
    lines, others = read_metrics(searched.run_dir), read_metrics(still.run_dir)
    assert [line["step"] for line in lines if "time/step" in line] == list(range(1, 12))
    same = ("rollout/all_rewards", "rollout/generated_tokens", "train/actor/policy_loss", "train/critic/value_loss")
    assert any("train/critic/value_loss" in line for line in lines)
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys()
        assert [line.get(name, 0) for name in same] == pytest.approx([other.get(name, 0) for name in same], abs=1e-4)
    for one, other in zip(weights(searched).values(), weights(still).values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)

    tried, not_tried = choice(searched)
    assert len(tried) == 3 and {one["fuse"] for one in tried} == {None, "actor,rollout,reference,critic"}
    assert not_tried and all(one["predicted_s"] > 0 for one in not_tried)
    kept = next(one for one in tried if one["outcome"] == "kept")
    shown = capsys.readouterr().out
    overrides = shlex.split(next(line for line in shown.splitlines() if "  kept: " in line))[1:]
    again = load_config("math/math_arithmetic_grpo", [*SMALL_MATH, *ours, *overrides])
    assert ",".join(fused_roles(again)) == (kept["fuse"] or "")
    assert placement_text(again) == kept["placement"]
    assert placement_text(load_config(searched.run_dir / "config.yaml")) == kept["placement"]


def test_imitation_has_nothing_to_choose():
    with pytest.raises(ValueError, match="in imitation there is nothing to choose by"):
        load_config("tabletop_sft_mlp", ["cluster.component_placement=auto"])


def test_what_no_placement_mends_is_said_as_ever():
    with pytest.raises(ValueError, match="micro_batch_size") as error:
        load_config("gym_pendulum_ppo_mlp", ["cluster.component_placement=auto", "actor.micro_batch_size=0"])
    assert "component_placement" not in str(error.value)
