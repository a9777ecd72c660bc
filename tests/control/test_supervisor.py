"""After a recovery every group serves again, those too that a failed wait has aborted."""

import os
import signal

import pytest

from rlinf_lite.config import load_config
from rlinf_lite.control import supervise
from rlinf_lite.scheduler import WorkerDiedError, WorkerError, wait_all
from tests.control.conftest import SUPERVISED
from tests.runners.conftest import SMALL_PENDULUM
from tests.scheduler.talkers import Replaceable, Talker


@pytest.fixture
def supervised(cluster, tmp_path):
    """Two pairs of groups, of which one feeds the other, and their supervisor."""
    cfg = load_config("embodiment/gym_pendulum_ppo_mlp", [*SMALL_PENDULUM, *SUPERVISED, "control.hang_timeout_s=2"])
    with supervise(cfg, cluster) as supervisor:
        with cluster.launching():
            one = Replaceable.create_group().launch(cluster, "0", name="one")
            groups = [one, *(Talker.create_group().launch(cluster, "0", name=x) for x in ("two", "left", "right"))]
        one, two, left, right = groups
        two.init(one.known()).wait()
        right.init(left.known()).wait()
        supervisor.begin(str(tmp_path), 0, 10)
        supervisor._send_heartbeat()
        yield supervisor, groups
        for group in groups:
            group.shutdown()


def check_talks(left, right):
    left.greet("right", 0).wait()
    assert right.hear("left", 0).wait(10) == ["from left[0]"]


def test_who_was_aborted_but_not_touched_serves_again(supervised):
    supervisor, (one, _, left, right) = supervised
    waiting = right.hear("left", 0)
    os.kill(one.members[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"one\[0\]") as error:
        wait_all(one.known(), waiting)
    steps = []
    decision = supervisor.recover(error.value, lambda decision: steps.append(decision) or 0)
    assert decision.ranks == {"one": [0]} and decision.touched == ["one", "two"] and steps == [decision]
    check_talks(left, right)


def test_giving_up_is_got_over_but_not_for_ever(supervised):
    supervisor, (_, _, left, right) = supervised
    for count in range(4):
        right.abort("a test")
        with pytest.raises(WorkerError, match="gave up waiting") as error:
            right.hear("left", 0).wait(10)
        if count < 3:
            assert not supervisor.recover(error.value, lambda _: 0).ranks
            check_talks(left, right)
    with pytest.raises(WorkerError, match="gave up waiting"):
        supervisor.recover(error.value, lambda _: 0)
    supervisor.progress(1)
    supervisor.recover(error.value, lambda _: 0)
    check_talks(left, right)


def test_the_same_exception_in_the_same_step_is_raised_at_once(supervised, caplog):
    supervisor, (one, *_) = supervised

    def fail(text):
        with pytest.raises(WorkerError) as error:
            one.stumble(text).wait()
        return error.value

    assert supervisor.recover(fail("row 3"), lambda _: 0).ranks == {"one": [0]}
    assert "row 3" in caplog.text and "talkers.py:" in caplog.text and "Traceback" not in caplog.text
    again = fail("row 5")
    with pytest.raises(WorkerError, match="row 5") as error:
        supervisor.recover(again, lambda _: 0)
    assert error.value is again and "talkers.py" in again.origin
    supervisor.progress(1)
    assert supervisor.recover(fail("row 5"), lambda _: 0).ranks == {"one": [0]}


def test_who_was_killed_because_it_hung_is_said_to(supervised):
    one = supervised[1][0]
    with pytest.raises(WorkerDiedError) as error:
        one.doze(60).wait(30)
    assert "ended by the watchdog, because it hung: doze has made no progress for" in str(error.value)
    assert "control.hang_timeout_s: 2" in str(error.value) and "out-of-memory" not in str(error.value)
    assert "talkers.py:" in str(error.value).splitlines()[0] and " in doze, from " in str(error.value).splitlines()[0]
    assert " in doze" in error.value.log_tail and "most recent call first" in error.value.log_tail
