import dataclasses
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from rlinf_lite.jobs import JobSpecError, RLJobBuilder
from rlinf_lite.jobs.spec import JobSpec
from rlinf_lite.jobs.trainer_host import load_classes

HERE = "tests.jobs.workloads"


def example() -> RLJobBuilder:
    return (
        RLJobBuilder()
        .node_num(3)
        .device_per_node(2)
        .device_type("GPU")
        .config({"c1": "v1"})
        .global_env({"e0": "v0"})
        .trainer(HERE, "Trainer")
        .actor(HERE, "Actor").total(2).per_node(1).env({"e1": "v1"})
        .rollout(HERE, "Rollout").total(2).per_node(1)
        .reference(HERE, "Rollout")
        .reward(HERE, "Rollout")
        .critic(HERE, "Rollout").share(0.5)
        .with_collocation("actor", "rollout")
    )  # fmt: skip


def problems(builder: RLJobBuilder) -> list[str]:
    with pytest.raises(JobSpecError) as error:
        builder.build()
    return error.value.problems


def test_the_example() -> None:
    spec = example().build()
    assert (spec.num_nodes, spec.devices_per_node, spec.device_type) == (3, 2, "GPU")
    assert (spec.config, spec.env, spec.collocations) == ({"c1": "v1"}, {"e0": "v0"}, (("actor", "rollout"),))
    assert dataclasses.asdict(spec.trainer) == {
        "role": "trainer", "module": HERE, "cls": "Trainer", "total": 1, "per_node": 1, "share": 1.0, "env": {}
    }  # fmt: skip
    assert [role.role for role in spec.roles] == ["actor", "rollout", "reference", "reward", "critic"]
    assert (spec.role("actor").total, spec.role("actor").env, spec.role("critic").share) == (2, {"e1": "v1"}, 0.5)
    assert spec.collocated("rollout") == ("actor", "rollout") and spec.collocated("critic") == ("critic",)


def test_a_spec_is_json() -> None:
    spec = example().build()
    assert json.loads(json.dumps(dataclasses.asdict(spec)))["roles"][0]["cls"] == "Actor"


def test_a_job_keeps_nothing_of_its_builder() -> None:
    config: dict[str, Any] = {"lr": [1]}
    job = example().config(config).build()
    config["lr"].append(2)
    assert job.config == {"lr": [1]}


def test_any_role_and_all_collocated() -> None:
    builder = RLJobBuilder().config({"a": 1}).trainer("m", "T").with_collocation_all().actor("m", "A")
    spec = builder.role("sim", "m", "S").share(1 / 3).device_type("CPU").build()
    assert spec.collocations == (("actor", "sim"),) and spec.device_type == "CPU"


def bare() -> RLJobBuilder:
    """One actor on one device."""
    return RLJobBuilder().config({"a": 1}).trainer("m", "T").actor("m", "A")


COUNT = ": not an integer of at least 1. Give a count, such as 1."
SHARE = ": neither an integer of at least 1 nor 1/integer. Write 2 for two devices per worker, 1/2 for two workers per "
CONFIG = " Give the dict that trainer and workers read, such as {'lr': 0.001}."
TOGETHER = ".with_collocation('actor', 'rollout')"


def two() -> RLJobBuilder:
    """An actor and a rollout, with room for both."""
    return bare().device_per_node(4).rollout("m", "R")


REFUSED: dict[str, tuple[Callable[[], RLJobBuilder], str]] = {
    "no trainer": (
        lambda: RLJobBuilder().config({"a": 1}).actor("m", "A"),
        ".trainer(module, cls): missing. Add .trainer('my.module', 'MyTrainer').",
    ),
    "no actor": (
        lambda: RLJobBuilder().config({"a": 1}).trainer("m", "T").rollout("m", "R"),
        ".actor(module, cls): missing. Add .actor('my.module', 'MyActor').",
    ),
    "no nodes": (lambda: bare().node_num(0), ".node_num(0)" + COUNT),
    "a node and a half": (lambda: bare().node_num(1.5), ".node_num(1.5)" + COUNT),
    "no devices": (lambda: bare().device_per_node(0), ".device_per_node(0)" + COUNT),
    "true devices": (lambda: bare().device_per_node(True), ".device_per_node(True)" + COUNT),
    "no workers": (lambda: bare().total(0), ".actor(...).total(0)" + COUNT),
    "workers as text": (lambda: bare().total("2"), ".actor(...).total('2')" + COUNT),
    "true workers": (lambda: bare().total(True), ".actor(...).total(True)" + COUNT),
    "none per node": (lambda: bare().per_node(-1), ".actor(...).per_node(-1)" + COUNT),
    "none per node of a role": (
        lambda: bare().role("sim", "m", "S").per_node(0),
        ".role('sim', ...).per_node(0)" + COUNT,
    ),
    "no config": (
        lambda: RLJobBuilder().trainer("m", "T").actor("m", "A"),
        ".config({}): empty, or not given." + CONFIG,
    ),
    "empty config": (lambda: bare().config({}), ".config({}): empty, or not given." + CONFIG),
    "config is a list": (lambda: bare().config([1]), ".config([1]): a list, not a dict." + CONFIG),
    "config is not JSON": (
        lambda: bare().config({"a": object}),
        ".config(...): cannot be written as JSON (Object of type type is not JSON serializable). Use numbers, ",
    ),
    "global env is not a dict": (
        lambda: bare().global_env("A=1"),
        ".global_env('A=1'): a str, not a dict. Write {'NAME': 'value'}.",
    ),
    "global env with a number": (
        lambda: bare().global_env({"A": 1, "B": "b"}),  # type: ignore[dict-item]
        ".global_env({'A': 1}): names and values must be strings. Write {'A': '1'}.",
    ),
    "env is not a dict": (
        lambda: bare().env([("A", "1")]),
        ".actor(...).env([('A', '1')]): a list, not a dict.",
    ),
    "env with a numbered name": (
        lambda: bare().env({1: "x"}),  # type: ignore[dict-item]
        ".actor(...).env({1: 'x'}): names and values must be strings. Write {'1': 'x'}.",
    ),
    "env before any role": (
        lambda: RLJobBuilder().env({"A": "1"}),
        ".env({'A': '1'}): no role was named before it. Put it after .actor(...).",
    ),
    "total before any role": (lambda: RLJobBuilder().total(2), ".total(2): no role was named before it."),
    "total of a trainer": (
        lambda: RLJobBuilder().trainer("m", "T").total(2),
        ".trainer(...).total(2): a job has one trainer, on no device. Put it after a role.",
    ),
    "collocation with an unknown role": (
        lambda: two().with_collocation("actor", "rolout"),
        ".with_collocation('actor', 'rolout'): the job has no role 'rolout' (its roles: actor, rollout). Add or",
    ),
    "collocation of a list": (
        lambda: two().with_collocation(["actor", "rollout"]),
        """.with_collocation("['actor', 'rollout']"): the job has no role "['actor', 'rollout']" (its roles""",
    ),
    "collocated with itself": (
        lambda: two().with_collocation("actor", "actor"),
        ".with_collocation('actor', 'actor'): 'actor' is collocated already. Name each role once, in one call.",
    ),
    "collocated twice": (
        lambda: two().reward("m", "R").with_collocation("actor", "rollout").with_collocation("reward", "actor"),
        ".with_collocation('reward', 'actor'): 'actor' is collocated already. Name each role once, in one call.",
    ),
    "collocated, and all": (
        lambda: two().with_collocation("actor", "rollout").with_collocation_all(),
        ".with_collocation_all(): 'actor', 'rollout' is collocated already.",
    ),
    "collocated alone": (
        lambda: two().with_collocation("actor"),
        ".with_collocation('actor'): 1 role(s) share nothing. Name at least two.",
    ),
    "all of one collocated": (
        lambda: bare().with_collocation_all(),
        ".with_collocation_all(): 1 role(s) share nothing. Name at least two.",
    ),
    "collocated with unequal per_node": (
        lambda: two().total(2).per_node(2).with_collocation("actor", "rollout"),
        f"{TOGETHER}: per_node differs (actor 1, rollout 2). Give these roles the same .per_node.",
    ),
    "a role twice": (lambda: bare().actor("m", "B"), ".actor(...): 'actor' is named 2 times. Keep one call."),
    "a trainer twice": (lambda: bare().trainer("m", "B"), ".trainer(...): 'trainer' is named 2 times. Keep one call."),
    "total over the nodes": (
        lambda: bare().node_num(2).device_per_node(8).total(5).per_node(2),
        ".actor(...).total(5): 2 per node on 2 node(s) are 4 at most. Set .per_node(3), or raise .node_num.",
    ),
    "share of nothing": (lambda: bare().share(0), ".actor(...).share(0)" + SHARE),
    "negative share": (lambda: bare().share(-1), ".actor(...).share(-1)" + SHARE),
    "share 1.5": (lambda: bare().share(1.5), ".actor(...).share(1.5)" + SHARE),
    "share 0.4": (lambda: bare().share(0.4), ".actor(...).share(0.4)" + SHARE),
    "share true": (lambda: bare().share(True), ".actor(...).share(True)" + SHARE),
    "share nan": (lambda: bare().share(float("nan")), ".actor(...).share(nan)" + SHARE),
    "share of almost nothing": (lambda: bare().share(5e-324), ".actor(...).share(5e-324)" + SHARE),
    "share as text": (lambda: bare().share("1/2"), ".actor(...).share('1/2')" + SHARE),
    "unknown device type": (
        lambda: bare().device_type("gpu"),
        ".device_type('gpu'): unknown. Write 'GPU', or 'CPU' for virtual devices.",
    ),
    "no module": (lambda: bare().rollout("", "R"), ".rollout(...): '' is not a module. Give it as a string."),
    "a class itself": (lambda: bare().rollout("m", JobSpec), "is not a class. Give it as a string."),
    "a role without a name": (lambda: bare().role(" ", "m", "C"), ".role(' ', ...): ' ' is not a role name."),
    "a job too small": (
        lambda: bare().rollout("m", "R").reward("m", "R").node_num(2),
        ".node_num(2).device_per_node(1): the job has 2 devices, its roles need 3 (actor 1, rollout 1, reward 1).",
    ),
    "a job too small for what is collocated": (
        lambda: bare().rollout("m", "R").reward("m", "R").with_collocation("actor", "rollout"),
        "the job has 1 devices, its roles need 2 (actor+rollout 1, reward 1). Raise these, lower total or share",
    ),
    "a node too small": (
        lambda: bare().node_num(4).total(2).per_node(2),
        ".actor(...).per_node(2).share(1): needs 2 devices on a node, a node has 1. Lower per_node or share, or raise ",
    ),
    "devices on the wrong nodes": (
        lambda: bare().node_num(2).device_per_node(2).total(2).rollout("m", "R").total(2).per_node(2),
        ".actor(...): actor needs 1, 1 devices on 2 node(s); the other roles leave 0, 2 free, by node. Change",
    ),
}  # fmt: skip

SEVERAL = ("env before any role", "total before any role", "total of a trainer", "collocation of a list")
"""Cases with other problems too."""


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make, expected = REFUSED[case]
    found = problems(make())
    assert any(expected in problem for problem in found), found
    assert len(found) == 1 or case in SEVERAL


def test_all_problems_at_once() -> None:
    builder = RLJobBuilder().node_num(0).device_type("TPU").actor("m", "A").share(1.5).env({"A": 1})  # type: ignore[dict-item]
    found = problems(builder.with_collocation("actor", "critic"))
    calls = [
        ".node_num",
        ".actor(...).share",
        ".with_collocation",
        ".trainer",
        ".device_type",
        ".config",
        ".actor(...).env",
    ]
    assert [problem.startswith(call) for problem, call in zip(found, calls, strict=True)] == [True] * 7, found


def test_devices_are_counted_whatever_else_is_wrong() -> None:
    found = problems(RLJobBuilder().env({}).actor("m", "A").rollout("m", "R").env(3))
    assert len(found) == 4  # the first env is misplaced: nothing is counted
    found = problems(RLJobBuilder().actor("m", "A").rollout("m", "R").env(3))
    assert len(found) == 4 and "its roles need 2" in found[-1]


def test_the_error_reads_as_a_list_and_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(JobSpecError(["a: b. c", "d: e. f"])))
    assert isinstance(error, ValueError) and str(error) == "job: 2 problems\n  - a: b. c\n  - d: e. f"


def test_load_classes() -> None:
    classes = load_classes(example().build())
    assert [cls.__name__ for cls in classes.values()] == ["Trainer", "Actor", *["Rollout"] * 4]
    assert list(classes) == ["trainer", "actor", "rollout", "reference", "reward", "critic"]


def test_load_classes_says_all_that_is_wrong(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_workloads.py").write_text("raise RuntimeError('no licence')")
    (tmp_path / "exiting_workloads.py").write_text("import sys; sys.exit()")
    monkeypatch.syspath_prepend(tmp_path)
    builder = RLJobBuilder().config({"a": 1}).device_per_node(8).trainer(HERE, "Rollout")
    builder.actor("no.such.module", "Actor").rollout(HERE, "Rolout").reference(HERE, "NotAWorker")
    builder.reward("broken_workloads", "R").critic(HERE, "THRESHOLD")
    with pytest.raises(JobSpecError) as error:
        builder.role("sim", HERE, "Trainer").role("out", "exiting_workloads", "W").role("own", "__main__", "Own")
        load_classes(builder.device_per_node(10).build())
    trainer, actor, rollout, reference, reward, critic, sim, out, own = error.value.problems
    assert trainer == (
        f".trainer(...): {HERE}.Rollout is not a subclass of BaseTrainer. "
        "Derive it from rlinf_lite.jobs.trainer.BaseTrainer."
    )
    assert actor == (
        ".actor(...): no.such.module:Actor cannot be imported: No module named 'no': is its folder on PYTHONPATH?"
    )
    assert rollout == f".rollout(...): {HERE} has no 'Rolout'. Did you mean Rollout?"
    assert reference.startswith(f".reference(...): {HERE}.NotAWorker is not a subclass of Worker. Derive it from ")
    assert reward == ".reward(...): broken_workloads:R cannot be imported: RuntimeError: no licence"
    assert critic.startswith(f".critic(...): {HERE}.THRESHOLD is not a subclass of Worker.")
    assert sim.startswith(f".role('sim', ...): {HERE}.Trainer is not a subclass of Worker.")
    assert out == ".role('out', ...): exiting_workloads:W cannot be imported: SystemExit: "
    assert own == (
        ".role('own', ...): the module '__main__' is this script, which the job's processes do not run. Put Own into a "
        "module of its own, and name that."
    )


def test_a_trainer_that_is_not_finished() -> None:
    spec = bare().trainer(HERE, "HalfTrainer")
    spec._drafts = [draft for draft in spec._drafts if draft.cls != "T"]
    with pytest.raises(JobSpecError, match=r"HalfTrainer is abstract\. Define fit\."):
        load_classes(spec.build())
