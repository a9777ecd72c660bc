"""A run that is stopped at any point and resumed ends with the weights of an uninterrupted run, bit for bit.

The points are those at which the driver waits for workers. Runs of one kind use the same workers one after the other.
"""

import errno
import json
import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from rlinf_lite.config import load_config
from rlinf_lite.data.problems import open_problems
from rlinf_lite.runners import (
    CheckpointError,
    EmbodiedRunner,
    OffPolicyRunner,
    ReasoningRunner,
    SFTRunner,
    base,
    full_disk,
    stopping,
)
from rlinf_lite.runners.full_disk import DiskFullError
from rlinf_lite.scheduler import HybridComponentPlacement, SchedulerError, WorkerError, segments
from rlinf_lite.workers.reasoning import launch_roles
from tests.conftest import SharedCluster
from tests.runners.conftest import OFF_POLICY_WORKERS, SMALL_MATH, SMALL_PENDULUM, SMALL_SAC, WORKERS
from tests.runners.test_sft import SMALL as SMALL_SFT

PENDULUM = [
    *SMALL_PENDULUM,
    "runner.max_steps=2",
    "runner.save_interval=1",
    "runner.val_check_interval=2",
    "env.eval.num_episodes=4",
    "algorithm.update_epochs=1",
]
OFF_POLICY = [*SMALL_SAC, "runner.max_steps=4", "runner.save_interval=2", "env.eval.num_episodes=4"]
IMITATION = [*SMALL_SFT, "runner.max_steps=3", "runner.save_interval=2", "data.num_episodes=16"]
MATH = [
    *SMALL_MATH,
    "runner.save_interval=1",
    "runner.val_check_interval=2",
    "sft.num_steps=3",
    "algorithm.adv_type=gae",
    "algorithm.kl={place: loss, coef: 0.1, kind: k3}",
    "actor.global_batch_size=16",
]


class Runs:
    """Runs of one kind, one after the other, on the same groups."""

    def __init__(self, cluster, config, overrides, runner_class, root):
        self.config, self.overrides, self.runner_class, self.root = config, overrides, runner_class, root
        cfg = self.load("nowhere")
        placement = HybridComponentPlacement(cfg)
        if runner_class is ReasoningRunner:
            self.groups = launch_roles(cfg, cluster, placement)
        else:
            workers = OFF_POLICY_WORKERS if runner_class is OffPolicyRunner else WORKERS
            groups = {name: worker.create_group(cfg) for name, worker in workers.items()}
            self.groups = cluster.launch(placement, **groups)

    def load(self, name, *more):
        always = ["runner.report=false", "control.snapshot_interval=1"]
        paths = [f"runner.logger.log_path={self.root / name}"]
        return load_config(self.config, [*self.overrides, *paths, *always, *more])

    def start(self, name, *more, **arguments):
        cfg = self.load(name, *more)
        for group in self.groups.values():
            group.abort("another run begins")  # leftovers of a stopped run
            group.clear_abort()
        problems = [open_problems(cfg)] if self.runner_class is ReasoningRunner else []
        runner = self.runner_class(cfg, *problems, **self.groups, **arguments)
        runner.init_workers()
        return runner

    def end(self):
        for group in self.groups.values():
            group.shutdown()


KINDS = {
    "embodied": ("embodiment/gym_pendulum_ppo_mlp", PENDULUM, EmbodiedRunner),
    "imitation": ("embodiment/tabletop_sft_mlp", IMITATION, SFTRunner),
    "off-policy": ("embodiment/gym_pendulum_sac_mlp", OFF_POLICY, OffPolicyRunner),
    "language": ("math/math_arithmetic_grpo", MATH, ReasoningRunner),
}


ON_RAY = [pytest.param(f"{kind}, on Ray", marks=(pytest.mark.processes, pytest.mark.slow)) for kind in KINDS]


@pytest.fixture(scope="module", params=["embodied", *ON_RAY])
def runs(request, short_ray_tmp, tmp_path_factory):
    kind, _, on_ray = request.param.partition(", ")
    cluster = SharedCluster.of("ray" if on_ray else "local")
    runs = Runs(cluster, *KINDS[kind], tmp_path_factory.mktemp(kind))
    yield runs
    runs.end()
    SharedCluster.end_groups()


class Points:
    """Records what a run waits for, and calls a function at the n-th wait for one thing."""

    def __init__(self, monkeypatch):
        self._wait_all = stopping.wait_all
        monkeypatch.setattr(stopping, "wait_all", self._wait)
        self.at(None, None)

    def at(self, point, act):
        self.seen, self._point, self._act = [], point, act

    def _wait(self, *handles, what, **arguments):
        self.seen.append((what, sum(what == other for other, _ in self.seen)))
        if self.seen[-1] == self._point:
            self._act()
        return self._wait_all(*handles, what=what, **arguments)


@pytest.fixture
def points(monkeypatch):
    return Points(monkeypatch)


@pytest.fixture
def undisturbed(runs, points):
    """The weights at the end of a run, and its waits."""
    if not hasattr(runs, "whole"):
        runner = runs.start("whole")
        points.at(None, None)
        runs.whole = weights(runner.run()), list(points.seen)
    return runs.whole


def one_of_each(waits):
    """The last wait of each kind, and also the first wait of the first kind and of updates."""
    last = {what: (what, nth) for what, nth in waits}
    return sorted({waits[0], ("training", 0), *last.values()}, key=waits.index)


def trained_before(waits, point):
    return sum(what == "training" for what, _ in waits[: waits.index(point)])


def weights(result):
    return load_file(result.checkpoint / "policy" / "model.safetensors")


def assert_equal(got, expected, where):
    assert got.keys() == expected.keys()
    different = [name for name in got if not torch.equal(got[name], expected[name])]
    assert not different, f"{where}: {different}"


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("runs", [*KINDS, *ON_RAY], indirect=True)
def test_stopped_at_every_kind_of_wait_and_resumed(runs, points, undisturbed):
    expected, waits = undisturbed
    for point in one_of_each(waits):
        name = f"soft-{waits.index(point)}"
        runner = runs.start(name)
        points.at(point, ctrl_c)
        stopped = runner.run()
        saved = json.loads((stopped.checkpoint / "training_state" / "runner.json").read_text())
        assert stopped.interrupted or stopped.completed_steps == runner.total_steps, point
        assert saved["completed_steps"] == stopped.completed_steps, point
        assert stopped.completed_steps >= trained_before(waits, point), f"{point}: a completed step is lost"
        points.at(None, None)
        resumed = runs.start(name, "runner.resume=auto").run()
        assert resumed.run_dir == stopped.run_dir and not resumed.interrupted, point
        assert_equal(weights(resumed), expected, point)


def test_stopped_in_the_middle_of_updates_too_long_to_wait_for(runs, points, undisturbed, monkeypatch):
    """The snapshot is saved, not the state of the workers, which are in an update."""
    expected, waits = undisturbed
    for point in [point for point in one_of_each(waits) if point[0] in ("training", "supervised training")]:
        name = f"long-{waits.index(point)}"
        with monkeypatch.context() as patched:
            patched.setattr(base, "STOP_TIMEOUT_S", 0.0)
            patched.setattr("rlinf_lite.runners.reasoning.STOP_TIMEOUT_S", 0.0)
            runner = runs.start(name, "runner.save_interval=-1")
            points.at(point, ctrl_c)
            stopped = runner.run()
        assert stopped.interrupted and stopped.completed_steps == trained_before(waits, point), point
        points.at(None, None)
        assert_equal(weights(runs.start(name, "runner.resume=auto").run()), expected, point)


def test_a_second_ctrl_c_stops_at_once_and_leaves_what_was_there(runs, points, undisturbed, monkeypatch):
    """A killed driver leaves the same files."""
    monkeypatch.setattr(stopping, "SAME_REQUEST_S", 0.0)

    def twice():
        ctrl_c()
        time.sleep(0.01)
        ctrl_c()

    expected, waits = undisturbed
    for point in one_of_each(waits)[1::3]:
        name = f"hard-{waits.index(point)}"
        runner = runs.start(name)
        points.at(point, twice)
        with pytest.raises(KeyboardInterrupt):
            runner.run()
        points.at(None, None)
        assert_equal(weights(runs.start(name, "runner.resume=auto").run()), expected, point)


class RecoversUntilCtrlC:
    """A supervisor whose recovery takes so long that the user stops the run."""

    recovered = False

    def begin(self, directory, step, total_steps): ...

    def progress(self, step): ...

    def recover(self, error, restore):
        ctrl_c()
        time.sleep(300)
        self.recovered = True

    def metrics(self):
        return {}

    def interrupted(self, step):
        self.stopped_after = step


def test_stopped_during_a_recovery(runs, points, undisturbed):
    expected = undisturbed[0]

    def fail():
        raise SchedulerError("a worker has died")

    supervisor = RecoversUntilCtrlC()
    runner = runs.start("recovery", supervisor=supervisor)
    last = runner.total_steps - 1
    points.at(("training", last), fail)
    stopped = runner.run()
    assert not supervisor.recovered, "the run waited for the whole recovery"
    assert stopped.interrupted and stopped.completed_steps == last == supervisor.stopped_after
    points.at(None, None)
    assert_equal(weights(runs.start("recovery", "runner.resume=auto").run()), expected, "stopped during a recovery")


def test_a_run_that_fails_leaves_its_last_completed_step(runs, points, undisturbed):
    expected = undisturbed[0]

    def fail():
        raise CheckpointError("the disk is full")

    runner = runs.start("failed", "runner.save_interval=-1")
    last = runner.total_steps - 1
    points.at(("training", last), fail)
    with pytest.raises(CheckpointError, match="the disk is full"):
        runner.run()
    points.at(None, None)
    resumed = runs.start("failed", "runner.resume=auto")
    assert resumed.completed_steps == last
    assert_equal(weights(resumed.run()), expected, "failed")


@pytest.mark.parametrize("runs", ["language"], indirect=True)
def test_snapshots_of_the_supervised_stage_come_as_often_as_configured(runs, points):
    """Updates end while the run pauses for one, which must not make it one that is not due any more."""
    runner = runs.start("supervised", "sft.num_steps=6", "control.snapshot_interval=2", "runner.max_steps=1")
    points.at(None, None)
    runner.run()
    waits = [what for what, _ in points.seen]
    supervised = waits[: waits.index("the starting policy to be written")]
    assert supervised.count("supervised training") == 6 and supervised.count("checkpoint") >= 2


def no_room():
    error = OSError(errno.ENOSPC, "No space left on device")
    raise WorkerError("actor", 0, "save_checkpoint", f"OSError: {error}", "Traceback ...") from error


def test_a_snapshot_that_finds_no_room_is_done_without(runs, points, undisturbed):
    runner = runs.start("no-room")
    first = next(nth for nth, (what, _) in enumerate(undisturbed[1]) if what == "training")
    snapshots = sum(what == "checkpoint" for what, _ in undisturbed[1][:first])
    points.at(("checkpoint", snapshots), no_room)  # of the first step
    result = runner.run()
    assert result.completed_steps == runner.total_steps
    assert_equal(weights(result), undisturbed[0], "without snapshots")


def test_a_full_disk_is_waited_for(runs, points, undisturbed, caplog):
    runner = runs.start("full-disk", "control.snapshot_interval=0")
    points.at(("checkpoint", 0), no_room)
    assert_equal(weights(runner.run()), undisturbed[0], "on a full disk")
    [said] = [record.getMessage() for record in caplog.records if "is full" in record.getMessage()]
    for part in (f"{runner.store.root} needs", "is kept in memory", f"train {runner.run_dir}"):
        assert part in said


def fills_up(runner, monkeypatch, num_times, at=None):
    """The first tries to write a checkpoint find no room; Ctrl-C comes at try `at`."""
    monkeypatch.setattr(full_disk, "RETRY_S", 0.01)
    write, tries = runner.store.write, []

    def full(step, save):
        tries.append(step)
        if len(tries) == at:
            ctrl_c()
        if len(tries) <= num_times:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(step, save)

    monkeypatch.setattr(runner.store, "write", full)
    return tries


def test_ctrl_c_on_a_full_disk_keeps_the_last_completed_step_until_there_is_room(
    runs, points, undisturbed, monkeypatch, caplog
):
    runner = runs.start("full-stopped", "control.snapshot_interval=1000")  # of step 0 alone
    tries = fills_up(runner, monkeypatch, 4, at=2)
    stopped = runner.run()
    assert stopped.interrupted and len(tries) == 5 and stopped.completed_steps == tries[0]
    assert any("Ctrl-C again ends without it" in record.getMessage() for record in caplog.records)
    resumed = runs.start("full-stopped", "runner.resume=auto")
    assert resumed.completed_steps == tries[0]
    assert_equal(weights(resumed.run()), undisturbed[0], "stopped on a full disk")


def test_a_disk_that_stays_full_ends_a_run_in_one_line(runs, points, monkeypatch):
    runner = runs.start("full-for-good")
    fills_up(runner, monkeypatch, 10**6)
    runner.states.disk._limit_s = 0.05
    with pytest.raises(
        DiskFullError, match=r"the disk is full: .*bytes are free.*No checkpoint was saved: fix the problem"
    ) as ended:
        runner.run()
    assert "\n" not in str(ended.value) and ended.value.__suppress_context__


@pytest.mark.parametrize("runs", ["embodied"], indirect=True)
def test_a_run_that_fails_saves_the_steps_since_its_last_snapshot(runs, points, undisturbed, tmp_path):
    """The remaining workers have these steps; full shared memory is no failure that a restart could repair."""
    runner = runs.start("full-memory", "control.snapshot_interval=1000", "runner.save_interval=-1")
    last = runner.total_steps - 1
    full = segments.no_room(str(tmp_path / "messages"), "a message", 2**20)

    def fail():
        raise WorkerError("actor", 0, "update", "SharedMemoryFullError: ...", "Traceback ...") from full

    runner.supervisor = RecoversUntilCtrlC()
    points.at(("advantages", last), fail)
    with pytest.raises(WorkerError):
        runner.run()
    assert not runner.supervisor.recovered
    points.at(None, None)
    resumed = runs.start("full-memory", "runner.resume=auto")
    assert resumed.completed_steps == last
    assert_equal(weights(resumed.run()), undisturbed[0], "after shared memory was full")
