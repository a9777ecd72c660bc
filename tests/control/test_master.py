"""Whom the master ends as hung, and when it ends nobody: in one process, without Ray."""

import time
from types import SimpleNamespace

import pytest

from rlinf_lite.config.schema import ControlConfig
from rlinf_lite.control import master
from rlinf_lite.control.context import JobContext, Stage, WorkerRecord
from rlinf_lite.control.diagnosis import Finding
from rlinf_lite.scheduler.heartbeat import Beat

RECORD = WorkerRecord("actor", 1, 1, "node 0", "id", "group")
OTHER = WorkerRecord("rollout", 0, 2, "node 0", "id", "worker")
LIMIT_S = 0.5
STUCK = Beat("actor", 1, 1, "sync_model_to_rollout", None, 1000.0, 0.0, (), 0, 0)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """`start(again)` gives the master of a running job with a worker that has been stuck for long, and the processes
    that it has ended so far. `again`: Ray has started the master again."""
    monkeypatch.setattr(master.JobMaster, "_watch", lambda self: None)

    def start(again):
        ended = []

        def run_on(node, function, pid, *args):
            if function is master.end_process:
                ended.append(pid)

        monkeypatch.setattr(master, "run_on", run_on)
        context = SimpleNamespace(was_current_actor_reconstructed=again)
        monkeypatch.setattr(master.ray, "get_runtime_context", lambda: context)
        backend = tmp_path / "backend"
        workers = {record.name: record for record in (RECORD, OTHER)}
        running = JobContext("job", str(tmp_path), Stage.RUNNING, workers=workers)
        master.open_backend(str(backend)).save("job", running.to_json())
        made = master.JobMaster("job", ControlConfig(backend=str(backend), hang_timeout_s=LIMIT_S), None)
        if not again:  # who is not started again begins with an empty context
            made._context.workers.update(workers)
            made._context.move_to(Stage.RUNNING)
        made._handles[RECORD.name] = None
        made.beat([STUCK])
        return made, ended

    return start


def test_a_stuck_worker_is_ended(start):
    found, ended = start(again=False)
    found._find_hung()
    assert ended == [RECORD.pid]
    said = [found.trainer_beat(1, [])["stuck"] for _ in range(2)]  # the first comes when it has been ended already
    assert "actor[1]: sync_model_to_rollout" in said[0] and not said[1]


def test_nobody_is_right_after_a_recovery_that_no_look_has_seen(start):
    found, ended = start(again=False)
    found.failed("failure", [], [Finding("raised", "rollout", 0, "it fell over")], None)
    found.recovered("failure", True, 0)
    ended_once_the_limit_has_passed(found, ended)


def test_nobody_is_by_a_master_that_has_just_started_again(start):
    """Another rank may have waited until then, and its next beat is not there yet."""
    found, ended = start(again=True)
    ended_once_the_limit_has_passed(found, ended)


def ended_once_the_limit_has_passed(found, ended):
    found._find_hung()
    assert ended == []
    time.sleep(LIMIT_S)
    found._find_hung()
    assert ended == [RECORD.pid]
