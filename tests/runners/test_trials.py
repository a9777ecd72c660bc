"""The sequence of trials of `cluster.component_placement: auto`, without groups and without Ray."""

import json
import shlex
import shutil

import pytest

from examples.embodiment import train_embodied_agent
from examples.math import train_math
from rlinf_lite.config import load_config
from rlinf_lite.config.checks import possible
from rlinf_lite.preview import placements
from rlinf_lite.preview.memory import Estimate
from rlinf_lite.preview.placements import check_room
from rlinf_lite.runners import placed
from rlinf_lite.runners.checkpoints import CheckpointStore, read_state
from rlinf_lite.runners.run_paths import RunClaim
from rlinf_lite.runners.stopping import RunResult, StoppedAtOnce
from rlinf_lite.scheduler import Cluster, PlacementError, SchedulerError, WorkerDiedError

AUTO = ["cluster.component_placement=auto", "cluster.num_gpus_per_node=4", "cluster.accelerator=cpu"]
MATH = [*AUTO, "data.num_prompts=40", "actor.global_batch_size=320"]
TOTAL = 100


@pytest.fixture
def store(tmp_path):
    (tmp_path / "run").mkdir()
    return CheckpointStore(tmp_path / "run", 100)


def write(store, step):
    state = json.dumps({"completed_steps": step, "run": "run"})
    return store.write(step, lambda path: path.joinpath("training_state", "runner.json").write_text(state))


@pytest.fixture
def trials(store, monkeypatch):
    """`trials(...)`: the result of a run whose launches do nothing but log a throughput of `rates[launch]`, and raise
    `failures[launch]` before they begin. `trials.begun` are the steps that each launch began with. A process takes a
    GiB."""

    def estimate(plan):
        shared = plan.size("rollout") * (plan.config.cluster.fuse is not None)
        return Estimate(node_host_bytes=2**30 * (sum(map(len, plan.placements.values())) - shared))

    monkeypatch.setattr("rlinf_lite.preview.memory.estimate", estimate)
    monkeypatch.setattr(placements, "free_host_bytes", lambda: 2**40)

    def trials(*overrides, name="gym_pendulum_ppo_mlp", resumed=None, total=TOTAL, rates=(), failures=None):
        cfg = load_config(name, [*(MATH if "math" in name else AUTO), "runner.save_interval=50", *overrides])
        claim = RunClaim(store.root.parent, store.root.parent, resumed and resumed.resolve())
        trials.begun, trials.configs = [], []

        def run(config, until):
            start = claim.resume_from
            done, launch = 0 if start is None else read_state(start)["completed_steps"], len(trials.begun)
            trials.begun.append(done)
            trials.configs.append(config)
            if failures and launch in failures:
                raise failures[launch]
            store.go_on_from(done, start)
            rate = rates[launch] if launch < len(rates) else 1.0
            with (store.root.parent / "metrics.jsonl").open("a") as log:
                for step in range(done + 1, min(until or total, total) + 1):
                    line = {"perf/env_steps_per_s": rate, "perf/tokens_per_s": rate, "time/training": 0.5}
                    log.write(json.dumps({"step": step, "time/step": 1.0, **line}) + "\n")
            if until is not None and until < total:
                claim.resume_from = write(store, until).resolve()
            return RunResult(min(until or total, total), False, store.root.parent, store.newest(), total, [], None)

        return placed.run_placed(cfg, claim, None, run, check_room(cfg))

    return trials


def choice(store):
    return json.loads((store.root.parent / "placement.json").read_text())


def test_each_placement_is_tried_and_the_fastest_is_kept(store, trials, capsys):
    assert trials(rates=[3.0, 1.0, 5.0, 2.0, 4.0, 4.5]).completed_steps == TOTAL
    assert trials.begun == [0, 3, 6, 9, 12, 15, 18]
    cfg = load_config("gym_pendulum_ppo_mlp", [*AUTO, "runner.save_interval=50"])
    assert trials.configs == [*possible(cfg), possible(cfg)[2]]
    assert [one["outcome"] for one in choice(store)] == ["tried", "tried", "kept", "tried", "tried", "tried"]
    assert [one["per_s"] for one in choice(store)] == [3.0, 1.0, 5.0, 2.0, 4.0, 4.5]
    shown = capsys.readouterr().out
    overrides = shlex.split(next(line for line in shown.splitlines() if "  kept: " in line))[1:]
    assert shlex.join(overrides) == choice(store)[2]["overrides"]
    again = load_config("gym_pendulum_ppo_mlp", [*AUTO[1:], "runner.save_interval=50", *overrides])  # as one types them
    assert again == trials.configs[2]


def test_a_step_of_a_placement_that_has_been_slow_once_counts_as_its_fastest(tmp_path):
    cfg = load_config("gym_pendulum_ppo_mlp")
    lines = [{"step": step, "time/step": 1.0, "perf/env_steps_per_s": step % 3} for step in (4, 5, 6)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert placed._throughput(tmp_path, 4, cfg) == 2
    assert placed._throughput(tmp_path, 5, cfg) == 0 and placed._throughput(tmp_path, 6, cfg) is None


@pytest.mark.parametrize(
    ("settings", "fastest"),
    [([], 8), (["runner.mode=async", "runner.max_staleness=1", "algorithm.correction.kind=decoupled"], 7)],
)
def test_steps_that_had_less_to_do_do_not_count(tmp_path, settings, fastest):
    """After an evaluation of an asynchronous run the next step's rollouts exist already; if all groups were dropped,
    nothing trained."""
    cfg = load_config("gym_pendulum_ppo_mlp", [*settings, "runner.val_check_interval=7"])
    trained = {"time/step": 1.0, "time/training": 0.5}
    lines = [{"step": step, "perf/env_steps_per_s": step, **trained} for step in (6, 7, 8)]
    lines.append({"step": 9, "perf/env_steps_per_s": 9, "time/step": 0.1})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert placed._throughput(tmp_path, 6, cfg) == fastest
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines[-1]))
    assert placed._throughput(tmp_path, 6, cfg) == 9


def test_what_a_run_is_resumed_from_stays_there(tmp_path, store, trials):
    backup = write(CheckpointStore(tmp_path / "backup", 100), 37)
    trials(resumed=backup)
    assert trials.begun == [37, 40, 43, 46, 49, 52, 55]
    assert backup.is_dir()
    assert [path.name for path in store.steps()] == ["step_000055"]  # the others were for the trials alone


def test_steps_are_those_of_its_state_whatever_its_name(tmp_path, store, trials):
    copy = tmp_path / "best_20260101"
    shutil.move(write(store, 40), copy)
    trials(resumed=copy)
    assert trials.begun[:2] == [40, 43] and copy.is_dir()


def test_checkpoints_that_a_run_without_trials_writes_stay(store, trials):
    write(store, 2)
    trials("runner.save_interval=4", resumed=write(store, 5))
    assert [path.name for path in store.steps()] == [
        "step_000002",
        "step_000005",
        "step_000008",
        "step_000020",
        "step_000023",
    ]


def test_language_models_are_compared_once_the_actor_trains(trials):
    trials("algorithm.adv_type=gae", "algorithm.critic_warmup_steps=7", name="math/math_arithmetic_grpo")
    assert trials.begun[:3] == [0, 10, 13]
    trials("algorithm.critic_warmup_steps=7")  # in simulators one network does both
    assert trials.begun[:3] == [0, 3, 6]


DIED = WorkerDiedError("actor", 0, "node 0", "killed (out of memory)", "")


def test_a_placement_that_dies_before_it_begins_leaves_the_others_where_they_began(store, trials):
    write(store, 20)
    write(store, 40)  # no run goes on from it
    trials(resumed=store.root / "step_000020", failures={0: DIED, 2: SchedulerError("no GPU")})
    assert trials.begun == [20, 20, 23, 23, 26, 29, 32]
    assert [one["outcome"] for one in choice(store)] == ["failed", "kept", "failed", "tried", "tried", "tried"]


def test_a_mistake_that_is_not_of_memory_ends_the_run_at_once(trials):
    with pytest.raises(SchedulerError, match="a mistake of the environment's author"):
        trials(failures={0: SchedulerError("a mistake of the environment's author")})
    assert trials.begun == [0]


def test_where_all_fail_the_last_failure_is_raised(trials):
    with pytest.raises(WorkerDiedError, match="out of memory"):
        trials(failures=dict.fromkeys(range(6), DIED))
    assert trials.begun == [0] * 6


def test_ctrl_c_while_a_later_placement_is_launched_stops_the_run(trials):
    """There is a checkpoint to go on from, and the last lines name it."""
    result = trials(failures={1: KeyboardInterrupt()})
    assert result.interrupted and result.completed_steps == 3 and result.checkpoint.name == "step_000003"
    assert result.describe().startswith("stopped after 3 of 100 steps") and "  go on: " in result.describe()
    for failures in ({0: KeyboardInterrupt()}, {1: StoppedAtOnce()}):
        with pytest.raises(KeyboardInterrupt):
            trials(failures=failures)


def test_a_short_run_ends_while_it_is_still_trying(store, trials, capsys):
    result = trials(total=3)
    assert result.completed_steps == result.total_steps == 3 and trials.begun == [0]
    assert not (store.root.parent / "placement.json").exists()
    assert "nothing was compared: the run has ended within its first trials" in capsys.readouterr().out


def test_only_what_fits_is_tried(store, trials, monkeypatch):
    monkeypatch.setattr(placements, "free_host_bytes", lambda: 6 * 2**30)  # of 12, 8, 8, 8, 4 and 4 processes
    trials()
    assert [one["outcome"] for one in choice(store)] == [*["too large"] * 4, "kept", "tried"]
    assert [one["needed_bytes"] // 2**30 for one in choice(store)] == [12, 8, 8, 8, 4, 4]
    assert trials.begun == [0, 3, 6]


def test_nothing_is_launched_where_nothing_fits(trials, monkeypatch):
    monkeypatch.setattr(placements, "free_host_bytes", lambda: 2**20)
    with pytest.raises(PlacementError, match=r"no placement fits into this machine's free memory, 1\.0 MiB"):
        trials()
    assert trials.begun == []
    monkeypatch.setattr(Cluster, "from_config", lambda *_: pytest.fail("a cluster was started"))
    for script, name in ((train_embodied_agent, "gym_pendulum_ppo_mlp"), (train_math, "math/math_arithmetic_grpo")):
        with pytest.raises(PlacementError, match="Lower "):
            script.train(load_config(name, AUTO[:1]))
