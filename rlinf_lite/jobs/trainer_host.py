"""The process of a job's trainer: it starts and owns the workers, and runs the trainer."""

from __future__ import annotations

import inspect
import os
import traceback
from contextlib import suppress

from rlinf_lite.control.context import Outcome, Stage
from rlinf_lite.control.supervisor import JobFailedError, Supervisor
from rlinf_lite.jobs.ported import CONFIG_ARGUMENTS, FOREIGN_ARGUMENTS
from rlinf_lite.jobs.spec import JobSpec, JobSpecError, RoleSpec, place_roles
from rlinf_lite.jobs.trainer import BaseTrainer, RoleGroup
from rlinf_lite.jobs.workload import BaseWorkload
from rlinf_lite.registry import MAIN, PartError, import_part
from rlinf_lite.scheduler import Cluster, SchedulerError, Worker, WorkerGroup
from rlinf_lite.scheduler.host import process_and_logs
from rlinf_lite.scheduler.ray_private import class_in_actor


class TrainerHost:
    """The Ray actor of the trainer's process; the workers end with it.

    `restarts`: the number of the trainer's restarts so far. `failure`: the id of the failure that this process recovers
    from, or None.
    """

    def __init__(self, job: JobSpec, restarts: int, failure: str | None) -> None:
        self._job, self._restarts, self._failure = job, restarts, failure
        self._start_trainer_again = False
        self._outcome: Outcome | None = None

    def outcome(self) -> Outcome | None:
        """The outcome of the job; None while it runs. The call fails once the process is gone."""
        return self._outcome

    def log_paths(self) -> list[str]:
        """The files that this process prints to."""
        return process_and_logs()[1]

    def run(self, directory: str, timeout_s: float) -> None:
        """Run the whole job. `directory`: for its events; `timeout_s`: for `init` of a new worker."""
        os.environ.update(self._job.env | self._job.trainer.env)
        kind = "cuda" if self._job.device_type == "GPU" else "cpu"
        stage, reason = Stage.FINISHED, ""
        supervisor: Supervisor | None = None
        try:
            with Cluster(self._job.num_nodes, self._job.devices_per_node, kind) as cluster:
                supervisor = Supervisor(self._job.name, cluster, timeout_s)
                classes = load_classes(self._job)
                groups = self._launch(cluster, classes)
                supervisor.begin(directory, 0, 0, self._restarts)
                if self._failure is not None:
                    supervisor.recovered(self._failure)
                self._train(classes["trainer"], groups, supervisor)
        except Exception as error:  # a user's trainer may raise anything: the job ends, and the log gets the traceback
            traceback.print_exc()
            stage, reason = Stage.FAILED, f"{type(error).__name__}: {error}"
            if not isinstance(error, SchedulerError | JobSpecError):  # their messages already name the place
                frame = traceback.extract_tb(error.__traceback__)[-1]
                reason += f" (at {frame.filename}:{frame.lineno}, in {frame.name})"
        if supervisor is None:
            self._outcome = stage, reason, None
        else:
            supervisor.finish(stage, reason)
            self._outcome = supervisor.outcome(stage, reason)  # in case the master did not receive it

    def _launch(self, cluster: Cluster, classes: dict[str, type]) -> dict[str, WorkerGroup]:
        placed, config = place_roles(self._job), self._job.user_config()
        groups = {}
        with cluster.launching():
            for role in self._job.roles:
                cls = classes[role.role]
                args = (config, self._job) if issubclass(cls, BaseWorkload) else (config,)
                group: WorkerGroup = cls.create_group(*args)  # type: ignore[attr-defined]
                env = self._job.env | role.env
                groups[role.role] = group.launch(cluster, placed[role.role], name=role.role, env_vars=env)
        return groups

    def _train(self, cls: type, workers: dict[str, WorkerGroup], supervisor: Supervisor) -> None:
        def recover(error: SchedulerError) -> bool:
            """True if only workers were replaced, so that the call can be repeated; else the trainer restarts."""
            decision = supervisor.recover(error, lambda _: 0, same_step=False)
            self._start_trainer_again = decision.level != "worker"
            return not self._start_trainer_again

        groups = {name: RoleGroup(group, recover) for name, group in workers.items()}
        while True:
            trainer: BaseTrainer = cls(groups, self._job.user_config(), self._job, self._restarts)
            trainer.supervisor, self._start_trainer_again = supervisor, False
            try:
                trainer.init()
                trainer.fit()
                return
            except JobFailedError:
                raise
            except Exception as error:  # a user's trainer may raise anything
                if not self._start_trainer_again:
                    if not trainer.is_recoverable():
                        raise
                    traceback.print_exc()
                    supervisor.trainer_raised(error)
                self._restarts += 1


def load_classes(job: JobSpec) -> dict[str, type]:
    """The classes of the trainer (under "trainer") and of all roles. Raises one JobSpecError for all refused
    classes."""
    wanted: list[tuple[RoleSpec, type]] = [(job.trainer, BaseTrainer), *((role, Worker) for role in job.roles)]
    loaded, problems = {}, []
    for spec, base in wanted:
        try:
            loaded[spec.role] = _load(spec, base)
        except JobSpecError as error:
            problems += error.problems
    if problems:
        raise JobSpecError(problems)
    return loaded


def _load(spec: RoleSpec, base: type) -> type:
    if spec.module == MAIN:
        text = f"the module {MAIN!r} is this script, which the job's processes do not run"
        raise JobSpecError([f"{spec.call}: {text}. Put {spec.cls} into a module of its own, and name that."])
    try:
        found = class_in_actor(import_part(f"{spec.module}:{spec.cls}", spec.call))
    except PartError as error:
        raise JobSpecError([str(error)]) from error
    where = f"{spec.call}: {spec.module}.{spec.cls}"
    if not isinstance(found, type) or not issubclass(found, base):
        fix = f"Derive it from {base.__module__}.{base.__name__}."
        raise JobSpecError([f"{where} is not a subclass of {base.__name__}. {fix}"])
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))  # type: ignore[attr-defined]
        raise JobSpecError([f"{where} is abstract. Define {missing}."])
    _check_constructor(where, found)
    return found


def _check_constructor(where: str, cls: type) -> None:
    """Raise JobSpecError for a constructor that does not accept the arguments it is called with, or has them in another
    order. Otherwise that would be an error in every worker, or no error at all."""
    given, passed_on = ["config"], ""
    if issubclass(cls, BaseTrainer | BaseWorkload):
        given = ["config", "job"] if issubclass(cls, BaseWorkload) else ["groups", "config", "job", "restart_count"]
        passed_on = ", ".join(given)
    signature = inspect.signature(cls)
    names = [name for name, one in signature.parameters.items() if one.kind <= one.POSITIONAL_OR_KEYWORD]
    meant = ["config" if name in CONFIG_ARGUMENTS else name for name in names]
    misplaced = any(name in given and name != its for name, its in zip(meant, given, strict=False))
    with suppress(TypeError):
        signature.bind(*given)
        if not misplaced and not FOREIGN_ARGUMENTS & set(names):
            return
    body = f"super().__init__({passed_on})" if passed_on else "self.config = config"
    advice = f"Write: def __init__(self, {', '.join(given)}): {body}" + (", or leave it out." if passed_on else ".")
    raise JobSpecError([f"{where}.__init__{signature} is called with ({', '.join(given)}). {advice}"])
