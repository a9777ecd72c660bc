"""Crashed, hung, slow, out of memory and lost workers are told apart, each with its evidence."""

import os
import time
from dataclasses import replace

import pytest

from rlinf_lite.control.context import WorkerRecord
from rlinf_lite.control.diagnosis import DiagnosisManager, explain_error, innermost_frames
from rlinf_lite.scheduler.heartbeat import Activity, Beat, Heartbeat

PID = os.getpid()
RECORD = WorkerRecord("env", 1, PID, "node 0 (127.0.0.1)", "id", "worker")
BEAT = Beat("env", 1, PID, "interact", None, 0.0, 0.0, (), 2**30, 7)


@pytest.fixture
def diagnosis():
    return DiagnosisManager(hang_timeout_s=10.0, slow_factor=2.0)


def test_a_worker_that_comes_on_is_fine(diagnosis):
    diagnosis.record([replace(BEAT, stuck_s=9.0)], 100.0)
    assert diagnosis.find_hung(RECORD, 100.5) is None


def test_stuck_in_a_method(diagnosis):
    diagnosis.record([replace(BEAT, stuck_s=10.5)], 100.0)
    found = diagnosis.find_hung(RECORD, 100.2)
    assert found is not None and (found.kind, found.worker) == ("hung", "env[1]")
    assert found.evidence == (
        "interact has made no progress for 10.7 s, and waits for no message (control.hang_timeout_s: 10)"
    )


@pytest.mark.parametrize("change", [{"waiting_for": "any rank of rollout"}, {"doing": None}, {"pid": PID + 1}])
def test_waiting_idle_and_replaced_workers_do_not_hang(diagnosis, change):
    diagnosis.record([replace(BEAT, stuck_s=1000.0, **change)], 100.0)
    assert diagnosis.find_hung(RECORD, 100.2) is None


def test_a_rank_that_others_hold_up_does_not_hang(diagnosis):
    waiting = replace(BEAT, rank=0, waiting_for="rollout[0]")
    diagnosis.record([replace(BEAT, stuck_s=1000.0), waiting], 100.0)
    assert diagnosis.find_hung(RECORD, 100.2) is None
    diagnosis.record([replace(waiting, waiting_for=None)], 100.3)  # the other's beat is from before
    assert diagnosis.find_hung(RECORD, 100.4) is None
    diagnosis.record([replace(BEAT, stuck_s=1010.0)], 110.0)
    assert diagnosis.find_hung(RECORD, 110.1) is not None


def test_silent(diagnosis):
    diagnosis.record([replace(BEAT, waiting_for="rollout[0]")], 100.0)
    assert diagnosis.find_hung(RECORD, 109.0) is None
    found = diagnosis.find_hung(RECORD, 110.5)
    assert found is not None and found.kind == "hung"
    assert "no heartbeat for 10.5 s" in found.evidence and f"(pid {PID}) is in state" in found.evidence


def test_a_worker_is_not_silent_before_it_could_speak(diagnosis):
    assert diagnosis.find_hung(RECORD, 5000.0) is None
    assert diagnosis.find_hung(RECORD, 5009.0) is None
    assert diagnosis.find_hung(RECORD, 5011.0) is not None


def test_nobody_hangs_where_the_machine_was_suspended(diagnosis, monkeypatch):
    diagnosis.record([BEAT])
    diagnosis.forget(replace(RECORD, rank=0))
    later = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: later)  # the monotonic clock stood still
    assert diagnosis.find_hung(RECORD) is None and diagnosis.find_hung(replace(RECORD, rank=0)) is None


def test_nobody_hangs_where_all_were_stopped(diagnosis):
    diagnosis.notice_pause(99.0)
    diagnosis.record([replace(BEAT, stuck_s=9.0)], 100.0)
    for now in (100.0, 3700.0, 3701.0):
        diagnosis.notice_pause(now)
        assert diagnosis.find_hung(RECORD, now) is None
    diagnosis.record([replace(BEAT, stuck_s=3610.0)], 3702.0)
    assert diagnosis.find_hung(RECORD, 3702.0) is None
    for now in range(3702, 3712):
        diagnosis.notice_pause(now)
    assert diagnosis.find_hung(RECORD, 3711.0) is not None


def test_who_does_what_is_said_where_nobody_comes_on(diagnosis):
    """Half of the hang limit is 5 s."""
    waiting = Beat("rollout", 0, PID, "generate", "env[1]", 0.0, 0.0, (), 0, 0)
    others = [replace(BEAT, rank=rank) for rank in range(2, 12)]
    names = ["env[1]", "rollout[0]", *(f"env[{beat.rank}]" for beat in others), "actor[0]"]

    def said(seconds, since):
        lines = {}
        for now in map(float, seconds):
            diagnosis.record([replace(beat, stuck_s=now - since) for beat in (BEAT, waiting, *others)], now)
            lines[now] = diagnosis.describe_stall(names, now)
        return {now: line for now, line in lines.items() if line}

    first = said(range(101, 130), 100.0)
    assert list(first) == [105, 110, 120]
    assert first[105] == (
        "no worker has made progress for 5 s (control.hang_timeout_s: 10): env[1], env[2], env[3], env[4], env[5], "
        "env[6], env[7], env[8] and 3 more: interact; rollout[0]: generate, waits for env[1]"
    )
    assert list(said(range(131, 140), 130.0)) == [135], "progress was made"


def test_nothing_is_said_of_idle_workers_nor_while_a_failure_is_dealt_with(diagnosis):
    idle, names = replace(BEAT, rank=0, doing=None, stuck_s=100.0), ["env[0]", "env[1]", "actor[0]"]
    diagnosis.record([idle, replace(idle, rank=1)], 200.0)
    assert not diagnosis.describe_stall(names, 201.0)
    diagnosis.record([idle, replace(BEAT, stuck_s=7.0)], 207.0)
    diagnosis.find_hung(replace(RECORD, group="actor", rank=0), 207.0)  # it is looked at, and has sent nothing yet
    diagnosis.restart_hang_limit(207.0)
    assert not diagnosis.describe_stall(names, 208.0)
    diagnosis.record([idle], 213.0)
    assert diagnosis.describe_stall(names, 214.0).endswith(
        ": env[1], actor[0]: no heartbeat (stopped, or in code that holds Python's lock)"
    )


def test_where_it_stood():
    other, mine = 'Thread 0x7f (most recent call first):\n  File "b.py", line 1 in run\n', "it says\n"
    main = "".join(f'  File "/my dir/{name}.py", line {line} in f\n' for line, name in enumerate("acegi", 3))
    log = f"{mine}{other}\nCurrent thread 0x7e (most recent call first):\n{main}"
    assert innermost_frames(log) == "/my dir/a.py:3 in f, from /my dir/c.py:4 in f, from /my dir/e.py:5 in f"
    assert innermost_frames(mine) == innermost_frames("") == innermost_frames(main) == ""


def test_slow(diagnosis):
    records = [replace(RECORD, rank=rank) for rank in range(3)]
    for second in range(61):
        shares = (0.2, 0.9, 0.3)
        diagnosis.record(
            [replace(BEAT, rank=r, busy_s=share * second) for r, share in enumerate(shares)], 100.0 + second
        )
    found = diagnosis.find_slow(records, 160.0)
    assert [(finding.kind, finding.rank) for finding in found] == [("slow", 1)]
    assert found[0].evidence == "computes 90% of the time, the other ranks of env 25%"
    assert diagnosis.find_slow(records, 161.0) == [], "said once"


def test_a_group_that_is_busy_all_over_has_no_slow_rank(diagnosis):
    for second in range(61):
        diagnosis.record([replace(BEAT, rank=rank, busy_s=0.9 * second) for rank in range(2)], 100.0 + second)
    assert diagnosis.find_slow([replace(RECORD, rank=rank) for rank in range(2)], 160.0) == []


@pytest.mark.parametrize(
    "reason, node_alive, oom_kills, kind, evidence",
    [
        (
            "connection error code 2",
            True,
            7,
            "crashed",
            "connection error code 2; last seen in interact; it had 1024 MiB",
        ),
        ("connection error code 2", True, None, "crashed", "connection error code 2"),
        ("connection error code 2", True, 8, "out_of_memory", "the kernel's out-of-memory killer struck its node"),
        ("the node was running low on memory", True, 7, "out_of_memory", "Ray killed it for want of memory"),
        ("unknown", False, None, "node_lost", "Ray has lost its node node 0 (127.0.0.1); last seen in interact"),
    ],
)
def test_why_a_worker_died(diagnosis, reason, node_alive, oom_kills, kind, evidence):
    diagnosis.record([BEAT], 100.0)
    found = diagnosis.explain_death(RECORD, reason, node_alive, oom_kills)
    assert found.kind == kind and found.evidence.startswith(evidence)


@pytest.mark.parametrize(
    "summary, kind",
    [("OutOfMemoryError: CUDA", "out_of_memory"), ("MemoryError", "out_of_memory"), ("ValueError: no", "raised")],
)
def test_what_a_worker_raised(summary, kind):
    assert explain_error("env", 1, summary).kind == kind


def test_heartbeats_say_what_a_worker_does():
    activity, told = Activity(), []
    heart = Heartbeat([("env", 0, activity)], told.append, beat_s=1000)
    idle = heart.beats()[0]
    assert idle.doing is None and idle.pid == PID and idle.memory_bytes > 2**20 and idle.sent_to == ()
    with activity.method("interact"):
        activity.sent_to.add("rollout")
        assert heart.beats()[0].doing == "interact"
        with activity.waiting("rollout[0]"):
            assert heart.beats()[0].waiting_for == "rollout[0]"
        busy = heart.beats()[0]
        assert busy.waiting_for is None and busy.sent_to == ("rollout",) and busy.stuck_s < 1
    assert heart.beats()[0].doing is None and heart.beats()[0].busy_s > 0
