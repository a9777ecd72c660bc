"""The choice among several saved states when a run recovers or resumes; only files, without workers."""

import errno
import json
from types import SimpleNamespace
from typing import Any

from rlinf_lite.runners import ReasoningRunner, checkpoints
from rlinf_lite.runners.checkpoints import CheckpointStore
from rlinf_lite.runners.saved_states import SavedStates
from rlinf_lite.runners.stopping import StopRequest


def save(store, step, **state):
    partial = store.begin(step)
    (partial / "training_state" / "runner.json").write_text(json.dumps({"completed_steps": step, **state}))
    return store.commit(step, partial)


def newest_state(store, snapshots):
    states = SavedStates(store, store.root, StopRequest(0.0), dict, print, [], [])
    states.open(snapshots, resumed_from=None, say=print)
    return states.newest()


def test_a_snapshot_goes_before_a_checkpoint_of_the_same_step(tmp_path):
    """The checkpoint may be from inside supervised training, which the resumed run has completed since then."""
    store, snapshots = CheckpointStore(tmp_path / "run", 3), CheckpointStore(tmp_path / "memory", 1, durable=False)
    save(store, 0, supervised_updates=1)
    complete = save(snapshots, 0, supervised_updates=4)
    assert newest_state(store, snapshots) == complete
    newer = save(store, 1, supervised_updates=4)
    assert newest_state(store, snapshots) == newer


def test_a_checkpoint_of_the_same_step_from_another_history_is_put_aside(tmp_path):
    store = CheckpointStore(tmp_path, 5)
    save(store, 2)
    abandoned = save(store, 4, history="first")
    store.go_on_from(2)
    superseded = store.root / "superseded" / abandoned.name
    save(store, 4, history="second")
    moved = store.go_on_from(4, resumed=superseded)
    assert [path.name for path in store.steps()] == ["step_000002"] and len(moved) == 1
    histories = [json.loads((path / "training_state" / "runner.json").read_text()) for path in (superseded, moved[0])]
    assert [state["history"] for state in histories] == ["first", "second"]


def test_a_snapshot_without_room_says_where_how_much_and_how_to_get_more(tmp_path, monkeypatch):
    here = SimpleNamespace(shm_dir=str(tmp_path), node_id="here")
    monkeypatch.setattr("rlinf_lite.runners.checkpoints.get_context", lambda: here)
    snapshots = checkpoints.Snapshots("auto", 1_000_000, ["here"])

    def write(directory):
        monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda path: SimpleNamespace(total=2**26, free=2**20))
        raise OSError(errno.ENOSPC, "No space left on device")

    snapshots.take(1, write)
    assert snapshots.newest() is None and not snapshots.due(2)
    for part in (str(tmp_path), "11.4 MiB", "1.0 of 64.0 MiB are free", "--shm-size"):
        assert part in snapshots.why_none


def test_evaluations_of_steps_that_are_taken_back_are_no_results(tmp_path):
    runner = ReasoningRunner.__new__(ReasoningRunner)
    runner.completed_steps, runner._secured_step, runner._trained_groups = 10, 10, []
    evals: Any = {0: "of 0", 5: "of 5", 10: "of 10"}
    runner._evals, runner.states = evals, SimpleNamespace(newest=lambda: None)
    runner.logger = SimpleNamespace(rewind=lambda step: None)
    runner._load = lambda path: setattr(runner, "completed_steps", 5)
    assert runner._restore({}, in_update=True) == 5
    assert list(runner._evals) == [0, 5]
