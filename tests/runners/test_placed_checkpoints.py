"""Which checkpoints a search for a placement begins from, and which it leaves: no groups, no Ray."""

import json
import shutil

import pytest

from rlinf_lite.config import load_config
from rlinf_lite.runners import placed
from rlinf_lite.runners.checkpoints import CheckpointStore, read_state
from rlinf_lite.runners.run_paths import RunClaim
from rlinf_lite.runners.stopping import RunResult
from rlinf_lite.scheduler import WorkerDiedError

TOTAL = 100


@pytest.fixture
def store(tmp_path):
    (tmp_path / "run").mkdir()
    return CheckpointStore(tmp_path / "run", 100)


def write(store, step):
    return store.write(step, lambda path: path.joinpath("training_state", "runner.json").write_text(state(step)))


def state(step):
    return json.dumps({"completed_steps": step, "run": "run"})


@pytest.fixture
def search(tmp_path, store, monkeypatch):
    """`search(resumed)`: the steps that each placement began with. `dies`: the first, before it begins."""
    monkeypatch.setattr(placed, "room_for", lambda kind: None)
    cfg = load_config("gym_pendulum_ppo_mlp", ["cluster.component_placement=auto", "runner.save_interval=50"])

    def search(resumed, dies=False):
        claim, begun = RunClaim(store.root.parent, store.root.parent, resumed.resolve()), []

        def run(_, until):
            done = read_state(claim.resume_from)["completed_steps"]
            begun.append(done)
            if dies and len(begun) == 1:
                raise WorkerDiedError("actor", 0, "node 0", "killed (out of memory)", "")
            store.go_on_from(done, claim.resume_from)
            with (store.root.parent / "metrics.jsonl").open("a") as log:
                for step in range(done + 1, min(until or TOTAL, TOTAL) + 1):
                    line = {"time/training": 0.5, "time/generate_rollouts": 0.4, "time/sync_weights": 0.01}
                    log.write(json.dumps({"step": step, "time/step": 1.0, **line}) + "\n")
            if until is not None:
                claim.resume_from = write(store, until).resolve()
            return RunResult(until or TOTAL, False, store.root.parent, store.newest(), TOTAL, [], None)

        assert placed.run_placed(cfg, claim, None, run).completed_steps == TOTAL
        return begun

    return search


def test_what_a_run_is_resumed_from_stays_there(tmp_path, search):
    backup = write(CheckpointStore(tmp_path / "backup", 100), 37)
    assert search(backup) == [37, 40, 43, 46]
    assert backup.is_dir()


def test_steps_are_those_of_its_state_whatever_its_name(tmp_path, store, search):
    copy = tmp_path / "best_20260101"
    shutil.move(write(store, 40), copy)
    assert search(copy) == [40, 43, 46, 49] and copy.is_dir()


def test_a_placement_that_dies_before_it_begins_leaves_the_others_where_they_began(store, search):
    write(store, 20)
    write(store, 40)  # which is not gone on from
    assert search(store.root / "step_000020", dies=True) == [20, 20, 23, 26]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], [7, 8, 9]),
        (["runner.mode=async", "runner.max_staleness=1", "algorithm.correction.kind=decoupled"], [7, 9]),
    ],
)
def test_steps_that_had_less_to_do_do_not_count(tmp_path, settings, expected):
    """Where an asynchronous run has evaluated, the next step's rollouts are there; where all groups were dropped,
    nothing trained."""
    cfg = load_config("gym_pendulum_ppo_mlp", [*settings, "runner.val_check_interval=7"])
    lines = [{"step": step, "time/step": 1.0, "time/training": 0.5} for step in (6, 7, 8, 9)]
    lines.append({"step": 10, "time/step": 0.1})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [line["step"] for line in placed._steps_since(tmp_path, 6, cfg)] == expected
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines[-1]))
    assert [line["step"] for line in placed._steps_since(tmp_path, 6, cfg)] == [10]
