import os
import pickle
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from rlinf_lite.control.context import master_name
from rlinf_lite.jobs import BaseTrainer, RLJobBuilder, trainer_invocation
from rlinf_lite.jobs.spec import JobSpec, place_roles
from rlinf_lite.jobs.trainer import InvocationResult, InvocationTimeoutError, RoleGroup
from rlinf_lite.scheduler import CallTimeoutError, Cluster, Handle, SchedulerError, WorkerDiedError, WorkerError
from rlinf_lite.scheduler.context import RAY_NAMESPACE
from tests.jobs.workloads import Actor, Trainer

HERE = "tests.jobs.workloads"


@pytest.fixture(scope="module")
def job() -> JobSpec:
    builder = RLJobBuilder().device_per_node(4).config({"a": 1}).trainer(HERE, "Trainer")
    builder.actor(HERE, "Actor").total(2).per_node(2).rollout(HERE, "Rollout").share(0.5).total(2).per_node(2)
    return replace(builder.with_collocation("actor", "rollout").build(), name="demo")


@pytest.fixture(scope="module")
def actors(cluster: Cluster, job: JobSpec) -> Iterator[RoleGroup]:
    group = Actor.create_group({"a": 1}, job).launch(cluster, "0-1:0-1", name="actor")
    yield RoleGroup(group)
    group.shutdown()


@pytest.fixture
def mortals(cluster: Cluster, job: JobSpec) -> Iterator[Any]:
    group = Actor.create_group({"a": 1}, job).launch(cluster, "2:0-2", name="mortal")
    yield group
    group.shutdown()


def test_all_ranks_and_their_results(actors: RoleGroup) -> None:
    assert actors.echo("x", plus=1) == [(0, "x", 1), (1, "x", 1)]
    assert actors.registered() == [0, 1]


def test_lists_are_split(actors: RoleGroup) -> None:
    assert actors.echo(["a", "b"], plus=[1, 2]) == [(0, "a", 1), (1, "b", 2)]
    assert actors.echo(["a", "b", "c"], plus=("x", "y")) == [(rank, ["a", "b", "c"], ("x", "y")) for rank in (0, 1)]
    assert actors.whole(["a", "b"]) == [["a", "b"]] * 2
    assert actors[1].echo(["a"], plus=["a", "b"]) == [(1, "a", ["a", "b"])]


def test_large_arguments_are_stored_once(actors: RoleGroup) -> None:
    assert actors.is_shared(np.zeros(100_000)) == [True, True]


def test_rank_zero_alone(actors: RoleGroup) -> None:
    assert actors.first(["a", "b"]) == (0, ["a", "b"])
    assert actors[1].first(3) == (1, 3)


def test_references(actors: RoleGroup) -> None:
    handles = actors.start(["a", "b"])
    assert all(isinstance(handle, Handle) for handle in handles)
    assert [handle.wait() for handle in handles] == [(0, "a"), (1, "b")]
    assert actors.echo(actors.start("x")) == [(0, (0, "x"), 0), (1, (1, "x"), 0)]
    assert actors.start_first().wait() == 0


def test_functions_before_and_after(actors: RoleGroup) -> None:
    assert actors.summed(3, plus=[1, 2]) == 15
    assert actors.text() == "0"


def test_what_a_function_before_returns_is_the_argument(actors: RoleGroup) -> None:
    assert actors.at_least_zero(-5) == [(0, 0), (1, 0)] and actors.at_least_zero(3) == [(0, 3), (1, 3)]
    assert actors.at_least_zero([-5, 3]) == [(0, 0), (1, 3)]
    pair = (1, {"a": 2})  # no arguments, which are a tuple and a dict
    assert actors[0].passed_on(pair) == [pair]
    with pytest.raises(TypeError, match=r"pre_func=nothing\): it returned None\. Return the method's argument"):
        actors.without_argument(1)
    with pytest.raises(TypeError, match=r"it returned a \(list, dict\)\. Return \(tuple\(arguments\), keywords\)"):
        actors.ambiguous(1)


def test_async(actors: RoleGroup) -> None:
    in_time = actors.nap(0.1)
    assert in_time == InvocationResult({0: 0, 1: 1}) == [0, 1]
    assert (in_time.results, in_time.missing) == ({0: 0, 1: 1}, [])


def test_async_takes_what_is_ready_and_says_who_is_late(actors: RoleGroup, caplog: pytest.LogCaptureFixture) -> None:
    for seconds, ready, late in (([2.0, 0.0], {1: 1}, [0]), (2.0, {}, [0, 1])):
        result = actors.nap(seconds)
        copied = pickle.loads(pickle.dumps(result))
        for found in (result, copied):
            assert (list(found), found.results, found.missing) == (list(ready.values()), ready, late)
        names = ", ".join(f"actor[{rank}].nap" for rank in late)
        assert f"not done: {names}" in caplog.text and "their results are dropped" in caplog.text
        assert actors.echo(1) == [(0, 1, 0), (1, 1, 0)]  # late calls end, and their ranks go on


def test_only_async_calls_are_limited_where_no_timeout_is_given() -> None:
    assert trainer_invocation().limit_s is None and trainer_invocation(blocking=False).limit_s is None
    assert trainer_invocation(is_async=True).limit_s == 10
    assert trainer_invocation(is_async=True, timeout=None).limit_s is None
    assert trainer_invocation(timeout=3).limit_s == 3 == trainer_invocation(is_async=True, timeout=3).limit_s


def test_late_ranks_are_named_and_the_results_of_others_kept(actors: RoleGroup) -> None:
    with pytest.raises(InvocationTimeoutError, match=r"done: actor\[1\]\.short \(1 of 2 calls are done\)") as error:
        actors.short([0.0, 2.0])
    assert isinstance(error.value, CallTimeoutError)
    assert (error.value.results, error.value.missing) == ({0: 0}, [1])
    copied = pickle.loads(pickle.dumps(error.value))
    assert (str(copied), copied.results, copied.missing) == (str(error.value), {0: 0}, [1])
    assert actors[1].echo(1) == [(1, 1, 0)]  # the late call ends, and its rank goes on


def test_views(actors: RoleGroup) -> None:
    assert (len(actors), actors.world_size, len(actors[1]), actors[-1].world_size) == (2, 2, 1, 1)
    assert [view.echo(1) for view in actors] == [[(0, 1, 0)], [(1, 1, 0)]]
    assert repr(actors) == "RoleGroup(actor, ranks 0, 1)"
    with pytest.raises(IndexError):
        actors[2]


def test_unknown_methods(actors: RoleGroup) -> None:
    with pytest.raises(AttributeError, match=r"actor: its workers have no public method 'ecko'\. Did you mean echo\?"):
        actors.ecko(1)


def test_an_exception_in_a_worker(actors: RoleGroup, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"actor\[1\].flaky raised ValueError: the first time"):
        actors.flaky(str(tmp_path), 1)


def test_a_killed_worker_raises_in_time(mortals: Any) -> None:
    os.kill(mortals.members[1].pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"mortal\[1\]"):
        RoleGroup(mortals).summed(1)
    assert time.monotonic() - started < 20


def test_a_worker_that_dies_is_reported_to_recover(mortals: Any) -> None:
    asked: list[SchedulerError] = []

    def recover(error: SchedulerError) -> bool:
        asked.append(error)
        return False

    with pytest.raises(WorkerDiedError, match=r"mortal\[2\]") as error:
        RoleGroup(mortals, recover).die(2)
    assert asked == [error.value]


@pytest.mark.parametrize("died", [(2,), (0, 2)])
def test_replaced_workers_alone_are_called_again(mortals: Any, tmp_path: Path, died: tuple[int, ...]) -> None:
    asked: list[int] = []

    def recover(error: SchedulerError) -> bool:
        assert isinstance(error, WorkerDiedError)
        asked.append(error.rank)
        time.sleep(0.5)  # the others answer
        mortals.restart(*died)
        return True

    group = RoleGroup(mortals, recover)
    group.init(["a", "b", "c"])
    assert group.die_once(str(tmp_path), *died) == [(0, "a", 1), (1, "b", 1), (2, "c", 1)]
    assert len(asked) == 1 and asked[0] in died
    assert [calls for _, _, calls in group.die_once(str(tmp_path))] == [2, 2, 2]


def test_only_the_failed_rank_is_called_again(actors: RoleGroup, tmp_path: Path) -> None:
    asked: list[SchedulerError] = []

    def recover(error: SchedulerError) -> bool:
        asked.append(error)
        return True

    assert RoleGroup(actors._group, recover).flaky([str(tmp_path), str(tmp_path)], 1) == [0, 11]
    assert [(type(error), getattr(error, "rank", None)) for error in asked] == [(WorkerError, 1)]
    assert (tmp_path / "0").read_text() == "." and (tmp_path / "1").read_text() == ".."


def test_what_a_call_raises_twice_at_the_same_place_is_raised(actors: RoleGroup) -> None:
    asked: list[SchedulerError] = []
    with pytest.raises(WorkerError):
        RoleGroup(actors._group, lambda error: not asked.append(error))[1].echo()
    assert len(asked) == 1


def test_late_ranks_are_called_again_where_recover_replaced_them(actors: RoleGroup, tmp_path: Path) -> None:
    asked: list[Any] = []

    def recover(error: SchedulerError) -> bool:
        asked.append(error)
        time.sleep(1)
        return True

    assert RoleGroup(actors._group, recover).slow_once(str(tmp_path), 1) in ([0, 1], [0, -1])
    assert [error.missing for error in asked] == [[1]]


def test_workers_know_their_job(actors: RoleGroup) -> None:
    devices = (("actor", "rollout"), True, False)
    for rank, identity in enumerate(actors.identity()):
        assert identity == (f"actor[{rank}]", rank, {"a": 1}, [True] + [False] * 4, devices, "127.0.0.1", True)


def test_the_master_can_be_asked(actors: RoleGroup) -> None:
    class Master:
        def answer(self) -> str:
            return "here"

    master: Any = ray.remote(Master).options(name=master_name("demo"), namespace=RAY_NAMESPACE, num_cpus=0).remote()
    assert actors.ask_master() == ["here"] * 2
    ray.kill(master)


def test_a_trainer_has_its_groups(actors: RoleGroup, job: JobSpec) -> None:
    trainer: BaseTrainer = Trainer({"actor": actors, "rollout": actors}, {"a": 1}, job, restart_count=2)
    assert trainer.RG_ACTOR is actors and trainer.RG_ROLLOUT is trainer.role_group("rollout")
    assert trainer.actors[1].echo(1) == [(1, 1, 0)] and len(trainer.rollouts) == 2
    assert (trainer.references, trainer.rewards, trainer.critics) == ([], [], [])
    shares = [trainer.get_workload_resource(role)["accelerator"] for role in ("actor", "rollout")]
    assert shares == [1.0, 0.5]
    assert (trainer.restart_count, trainer.is_recoverable(), trainer.step) == (2, False, 0)
    trainer.fit()
    assert trainer.step == 3
    with pytest.raises(AttributeError, match=r"no attribute 'RL_ACTOR'"):
        _ = trainer.RL_ACTOR
    with pytest.raises(AttributeError, match=r"no 'critic' \(its roles: actor, rollout\); add \.critic\("):
        _ = trainer.RG_CRITIC
    with pytest.raises(AttributeError, match=r"add \.role\('sim', \.\.\.\) to its builder"):
        trainer.role_group("sim")


def test_roles_run_where_they_are_placed(cluster: Cluster, job: JobSpec) -> None:
    builder = RLJobBuilder().device_per_node(4).config({"a": 1}).trainer(HERE, "Trainer").actor(HERE, "Actor")
    placed = place_roles(builder.total(2).per_node(2).share(0.5).build())
    group = Actor.create_group({}, job).launch(cluster, placed["actor"], name="placed")
    assert RoleGroup(group).echo(1) == [(0, 1, 0), (1, 1, 0)]
    group.shutdown()
    with pytest.raises(SchedulerError, match="'placed' is not running"):
        RoleGroup(group).first(1)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"timeout": True}, TypeError, "timeout=True"),
        ({"timeout": "5"}, TypeError, "timeout='5'"),
        ({"timeout": -1}, ValueError, "timeout=-1"),
        ({"timeout": float("nan")}, ValueError, "timeout=nan"),
        ({"target": "RANK1"}, ValueError, "target='RANK1'"),
        ({"blocking": print}, TypeError, r"write @trainer_invocation\(\)"),
        ({"blocking": False, "is_async": True}, ValueError, "is_async=True"),
        ({"blocking": False, "post_func": sum}, ValueError, "post_func"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        trainer_invocation(**options)


def test_the_method_itself_is_unchanged() -> None:
    def method(self: Any) -> int:
        return 1

    assert trainer_invocation(target="RANK0")(method) is method
