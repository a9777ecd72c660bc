import gc
import logging
import os
import signal
import sys
import time
from typing import Any

import pytest

from rlinf_lite.scheduler import Cluster, Worker, WorkerDiedError, WorkerError, WorkerGroup, wait_all


class Mortal(Worker):
    def work(self, seconds: float) -> int:
        print(f"{self.name} {self.rank} works", flush=True)
        time.sleep(seconds)
        return self.rank

    def exit(self, code: int) -> None:
        print("about to leave", file=sys.stderr, flush=True)
        sys.exit(code)

    def listen(self, group: str) -> Any:
        return self.recv(group, 0)

    def say(self, value: Any, group: str) -> None:
        self.send(value, group, 0)


class Stillborn(Worker):
    def __init__(self) -> None:
        print("my last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def group(cluster: Cluster) -> Any:
    running = Mortal.create_group().launch(cluster, "0:0-1", name="mortal")
    yield running
    running.shutdown()


def kill(group: WorkerGroup, rank: int) -> float:
    os.kill(group.members[rank].pid, signal.SIGKILL)
    return time.monotonic()


def test_killed_during_a_call(group: WorkerGroup) -> None:
    handle = group.work(60)
    time.sleep(0.5)
    killed = kill(group, 1)
    with pytest.raises(WorkerDiedError) as error:
        handle.wait()
    assert time.monotonic() - killed < 15
    assert (error.value.group, error.value.rank) == ("mortal", 1)
    text = str(error.value)
    assert text.startswith("mortal[1] on node 0 (127.0.0.1), pid ") and "killed by a signal" in text
    assert "mortal 1 works" in error.value.log_tail and "mortal 0 works" not in error.value.log_tail


def test_killed_while_idle(group: WorkerGroup) -> None:
    assert group.work(0).wait() == [0, 1]
    kill(group, 0)
    with pytest.raises(WorkerDiedError, match=r"mortal\[0\]"):
        group.work(0).wait(10)
    assert group.execute_on(1).work(0).wait() == [1]


def test_killed_while_others_wait_for_it(cluster: Cluster, group: WorkerGroup) -> None:
    """The dead worker has no running call, and the others would wait for its message forever."""
    other = Mortal.create_group().launch(cluster, "1", name="other")
    idle, blocked = group.work(0), other.listen("mortal")
    idle.wait()
    killed = kill(group, 0)
    with pytest.raises(WorkerDiedError, match=r"mortal\[0\]"):
        wait_all(idle, blocked)
    assert time.monotonic() - killed < 15
    with pytest.raises(WorkerError, match=r"gave up waiting for mortal\[0\]: mortal\[0\] on node 0"):
        blocked.wait(10)
    other.shutdown()


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_failed_call_ends_a_wait_for_another(cluster: Cluster, group: WorkerGroup, how: str) -> None:
    """A script may wait for one handle after the other."""
    other = Mortal.create_group().launch(cluster, "1", name="other")
    blocked = other.listen("mortal")
    failing = group.execute_on(1).work("long" if how == "raises" else 60)
    if how == "dies":
        kill(group, 1)
    started, kind = time.monotonic(), WorkerError if how == "raises" else WorkerDiedError
    with pytest.raises(kind, match=r"mortal\[\d\]"):
        blocked.wait(30)
    assert time.monotonic() - started < 15
    with pytest.raises(kind, match=r"mortal\[\d\]"):
        failing.wait()
    group.execute_on(0).say("late", "other").wait()
    assert blocked.wait(10) == ["late"], "it was said once"
    other.shutdown()


def test_calls_that_were_given_up_end_no_wait(cluster: Cluster, group: WorkerGroup) -> None:
    other = Mortal.create_group().launch(cluster, "1", name="other")
    aborted, dropped = other.listen("mortal"), group.execute_on(0).work("dropped")
    del dropped
    other.abort("a test")
    assert group.execute_on(1).work(3).wait() == [1]
    with pytest.raises(WorkerError, match="gave up"):
        aborted.wait()
    other.shutdown()


@pytest.mark.parametrize("by", ["an abort", "the error of a call before"])
def test_what_was_given_up_is_not_printed(cluster: Cluster, group: WorkerGroup, by: str) -> None:
    """Ray prints errors that are not fetched, such as those of an interrupted run's rollouts."""
    printed: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: printed.append(record.getMessage())
    log = logging.getLogger("ray._private.worker")
    log.addHandler(handler)
    other = Mortal.create_group().launch(cluster, "1", name="other")
    try:
        if by == "an abort":
            calls = [other.listen("mortal")]
            other.abort("a test")
        else:
            failing, *calls = other.work("now"), other.work("later")
            with pytest.raises(WorkerError, match="TypeError"):
                failing.wait()
        time.sleep(1)  # `done` would fetch the error
        calls.clear()
        gc.collect()
        time.sleep(0.5)
    finally:
        log.removeHandler(handler)
        other.shutdown()
    assert printed == []


def test_exit_codes_are_true(group: WorkerGroup) -> None:
    with pytest.raises(WorkerDiedError, match="code 3") as error:
        group.execute_on(1).exit(3).wait()
    assert "about to leave" in error.value.log_tail


def test_death_in_the_constructor(cluster: Cluster) -> None:
    with pytest.raises(WorkerDiedError, match=r"stillborn\[0\]") as error:
        Stillborn.create_group().launch(cluster, "0", name="stillborn")
    assert "my last words" in error.value.log_tail


def test_a_relaunched_group_is_found_under_its_name(cluster: Cluster) -> None:
    listener = Mortal.create_group().launch(cluster, "0", name="listener")
    speaker = Mortal.create_group().launch(cluster, "1", name="speaker")
    speaker.say(1, "listener").wait()
    assert listener.listen("speaker").wait() == [1]
    listener.shutdown()
    with pytest.raises(WorkerError, match="PeerError"):
        speaker.say(2, "listener").wait()
    listener = Mortal.create_group().launch(cluster, "0", name="listener")
    speaker.say(3, "listener").wait()
    assert listener.listen("speaker").wait() == [3]
    for group in (listener, speaker):
        group.shutdown()
