"""Code as users of DLRover have it: names, configs of OmegaConf, classes behind `@ray.remote`, constructors."""

from typing import Any

import pytest
import ray
from omegaconf import OmegaConf

from rlinf_lite.jobs import BaseTrainer, BaseWorkload, JobSpecError, RLJobBuilder, RLRoleType
from rlinf_lite.jobs.spec import JobSpec
from rlinf_lite.jobs.trainer import RoleGroup
from rlinf_lite.jobs.trainer_host import load_classes
from rlinf_lite.scheduler import Cluster, Worker, WorkerError

HERE = __name__


@ray.remote
class Actor(BaseWorkload):
    def __init__(self, config: Any, job: JobSpec) -> None:
        super().__init__(config, job)
        self._config = config
        self.calls = 0

    def about(self, value: Any = None) -> Any:
        self.calls += 1
        return self.name, self.rank, self._config.optim.lr, value, self.calls

    def roles(self) -> Any:
        is_actor = self.role == RLRoleType.ACTOR == RLRoleType.ACTOR.name
        together = self.is_actor_or_rollout_device_collocation(), self.has_device_collocation(), self.is_ref_role()
        return is_actor, self.get_device_collocation(), together

    def fail(self) -> None:
        raise ValueError("no such batch")


@ray.remote(num_gpus=1)
class Trainer(BaseTrainer):
    def init(self) -> None: ...
    def fit(self) -> None: ...


class Bare(Worker):
    def __init__(self, config: Any) -> None:
        self.config = config


def test_a_job_as_it_is_written_there(cluster: Cluster) -> None:
    config = OmegaConf.create({"optim": {"lr": 0.5, "half": "${optim.lr}"}})
    builder = RLJobBuilder().device_per_node(4).config(config).trainer(HERE, "Trainer")
    builder.actor(HERE, "Actor").total(2).per_node(2).rollout(HERE, "Actor").total(2).per_node(2).role(
        "UDF_1", HERE, "Bare"
    )
    spec = builder.with_collocation(RLRoleType.ACTOR, RLRoleType.ROLLOUT).build()
    assert spec.config == {"optim": {"lr": 0.5, "half": 0.5}} and type(spec.config["optim"]) is dict
    classes = load_classes(spec)
    workers = classes["actor"].create_group(spec.user_config(), spec)
    actors = RoleGroup(workers.launch(cluster, "0-1:0-1", name="actor"))
    trainer = classes["trainer"]({"actor": actors, "UDF_1": actors}, spec.user_config(), spec)

    assert actors.about() == [("actor[0]", 0, 0.5, None, 1), ("actor[1]", 1, 0.5, None, 1)]
    assert actors.roles() == [(True, "actor,rollout", (True, True, False))] * 2
    assert trainer.config.optim.lr == trainer._config.optim.lr == 0.5
    assert (actors.role, actors.world_size, actors[0].world_size) == ("actor", 2, 1)
    assert trainer.get_role_groups() == ["RG_ACTOR", "RG_UDF_1"]
    assert trainer.RG_ACTOR is trainer.RG_UDF_1 is trainer.role_group(RLRoleType.ACTOR) is trainer.role_group("ACTOR")
    assert trainer.get_workload_resource(RLRoleType.ACTOR) == {"accelerator": 1.0}

    handles = trainer.actor_handles[RLRoleType.ACTOR]
    assert len(handles) == len(trainer.get_actor_handles("ACTOR")) == 2 and trainer.get_actor_handles("CRITIC") == []
    first = handles[0].about.remote(1)
    second = trainer.actors[1].about.remote(first)  # which Ray fetches
    assert ray.get(second) == ("actor[1]", 1, 0.5, ("actor[0]", 0, 0.5, 1, 2), 2)
    assert ray.get(actors.about.remote())[1][-1] == 3
    with pytest.raises(TypeError, match=r"stays with the trainer: .* self\.send\(value, 'actor', rank\)"):
        handles[0].about.remote(trainer.actors[1])
    with pytest.raises(ValueError, match="no such batch"):
        try:
            ray.get(handles[0].fail.remote())
        except WorkerError as error:
            assert (error.group, error.rank) == ("actor", 0)
            raise error.__cause__ or ValueError(str(error)) from None


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"a": "${b}"}, r"\.config\(\.\.\.\): a: Interpolation key 'b' not found\. Set it, or correct the reference\."),
        ({"a": {"b": "???"}}, r"\.config\(\.\.\.\): a\.b: Missing mandatory value: b\. Set it,"),
        ([1], r"\.config\(\[1\]\): a list, not a dict"),
    ],
)
def test_configs_that_omegaconf_cannot_resolve(config: Any, problem: str) -> None:
    builder = RLJobBuilder().config(OmegaConf.create(config)).trainer(HERE, "Trainer").actor(HERE, "Actor")
    with pytest.raises(JobSpecError, match=problem):
        builder.build()


def test_options_of_submit_that_mean_something_else_here() -> None:
    job = RLJobBuilder().config({"a": 1}).trainer(HERE, "Trainer").actor(HERE, "Actor").build()
    with pytest.raises(JobSpecError) as error:
        job.submit(job_name="demo", master_cpu=4, job_max_restart=10)
    cpu, restarts = error.value.problems
    assert cpu == "submit(master_cpu=4): the master takes no CPU of Ray's. Leave it out"
    assert restarts.startswith("submit(job_max_restart=10): write control=ControlConfig(max_job_restarts=...)")


class TheirWorkload(BaseWorkload):
    def __init__(self, master_handle: Any, config: Any) -> None:
        super().__init__(master_handle, config)


class TurnedRound(BaseWorkload):
    def __init__(self, job: Any, config: Any) -> None:
        super().__init__(config, job)


class TheirTrainer(BaseTrainer):
    def __init__(self, handles: Any, classes: Any, config: Any) -> None:
        super().__init__(handles, classes, config)

    def init(self) -> None: ...
    def fit(self) -> None: ...


class TheirOwnNames(BaseWorkload):
    def __init__(self, master: Any, cfg: Any) -> None:
        super().__init__(master, cfg)


class ShortTrainer(TheirTrainer):
    def __init__(self, groups: Any, config: Any, job: Any) -> None:
        BaseTrainer.__init__(self, groups, config, job)


class AnyTrainer(TheirTrainer):
    def __init__(self, *args: Any) -> None:
        BaseTrainer.__init__(self, *args)


class OwnNames(BaseWorkload):
    def __init__(self, cfg: Any, about: Any, more: int = 0) -> None:
        super().__init__(cfg, about)


class NoConstructor(Worker): ...


WORKLOAD = "is called with (config, job). Write: def __init__(self, config, job): super().__init__(config, job), or "
TRAINER = "is called with (groups, config, job, restart_count). Write: def __init__(self, groups, config, job, "


@pytest.mark.parametrize(
    ("trainer", "actor", "problem"),
    [
        ("Trainer", "TheirWorkload", f".actor(...): {HERE}.TheirWorkload.__init__(master_handle: Any, config: Any)"),
        ("Trainer", "TheirWorkload", WORKLOAD),
        ("Trainer", "TurnedRound", WORKLOAD),
        ("Trainer", "TheirOwnNames", WORKLOAD),
        (
            "Trainer",
            "NoConstructor",
            "is called with (config). Write: def __init__(self, config): self.config = config.",
        ),
        ("TheirTrainer", "Actor", f".trainer(...): {HERE}.TheirTrainer.__init__(handles: Any, classes: Any, config"),
        ("TheirTrainer", "Actor", TRAINER),
        ("ShortTrainer", "Actor", TRAINER),
    ],
)
def test_constructors_that_take_something_else(trainer: str, actor: str, problem: str) -> None:
    spec = RLJobBuilder().config({"a": 1}).trainer(HERE, trainer).actor(HERE, actor).build()
    with pytest.raises(JobSpecError) as error:
        load_classes(spec)
    assert len(error.value.problems) == 1 and problem in error.value.problems[0].replace("'", ""), error.value


def test_constructors_that_fit() -> None:
    builder = RLJobBuilder().device_per_node(2).config({"a": 1}).trainer(HERE, "AnyTrainer").actor(HERE, "OwnNames")
    load_classes(builder.role("bare", HERE, "Bare").build())
