"""The process of a built job's trainer: launches the workers, owns them, runs the trainer, starts it again where it
can; and how the job's master starts that process and hears of its end."""

from __future__ import annotations

import importlib
import inspect
import os
import threading
import traceback
from contextlib import suppress
from typing import Any

import ray

from rlinf_lite.control.context import Outcome, Stage, master_name
from rlinf_lite.control.failover import Decision
from rlinf_lite.control.supervisor import JobFailedError, Supervisor
from rlinf_lite.jobs.ported import CONFIG_ARGUMENTS, FOREIGN_ARGUMENTS, without_ray_remote
from rlinf_lite.jobs.spec import JobSpec, JobSpecError, RoleSpec, place_roles
from rlinf_lite.jobs.trainer import BaseTrainer, RoleGroup
from rlinf_lite.jobs.workload import BaseWorkload, JobInfo
from rlinf_lite.registry import MAIN, did_you_mean
from rlinf_lite.scheduler import Cluster, SchedulerError, Worker, WorkerGroup
from rlinf_lite.scheduler.context import RAY_NAMESPACE
from rlinf_lite.scheduler.host import process_and_logs
from rlinf_lite.scheduler.nodes import detached_actor


class TrainerHost:
    """What Ray runs: the workers belong to this process and end with it."""

    def __init__(self, job: str, spec: JobSpec, restarts: int, failure: str | None) -> None:
        self._job, self._spec, self._restarts, self._failure = job, spec, restarts, failure
        self._trainer: BaseTrainer | None = None
        self._supervisor: Supervisor | None = None
        self._start_trainer_again = False
        self._outcome: Outcome | None = None

    def outcome(self) -> Outcome | None:
        """How the job ended; None while it runs. Answers while the process lives."""
        return self._outcome

    def log_paths(self) -> list[str]:
        return process_and_logs()[1]

    def run(self, directory: str, timeout_s: float) -> None:
        """The whole life of the job in this process."""
        os.environ.update(self._spec.env | self._spec.trainer.env)
        kind = "cuda" if self._spec.device_type == "GPU" else "cpu"
        stage, reason = Stage.FINISHED, ""
        try:
            # plain workers: what a job's classes import is not known, and need not be torch
            with Cluster(self._spec.num_nodes, self._spec.devices_per_node, kind, forked_workers=False) as cluster:
                self._supervisor = Supervisor(self._job, cluster, timeout_s)
                classes = load_classes(self._spec)
                job = JobInfo.of(self._spec, self._job, master_name(self._job))
                groups = self._launch(cluster, classes, job)
                self._supervisor.begin(directory, 0, 0, self._restarts)
                if self._failure is not None:
                    self._supervisor.recovered(self._failure)
                threading.Thread(target=self._report_progress, args=[self._supervisor], daemon=True).start()
                role_groups = {name: RoleGroup(group, self._recover) for name, group in groups.items()}
                self._train(classes["trainer"], role_groups, job, self._supervisor)
        except Exception as error:  # whatever a user's trainer raises ends the job, with its traceback in the log
            traceback.print_exc()
            stage, reason = Stage.FAILED, f"{type(error).__name__}: {error}"
            if not isinstance(error, SchedulerError | JobSpecError):  # whose messages say where
                frame = traceback.extract_tb(error.__traceback__)[-1]
                reason += f" (at {frame.filename}:{frame.lineno}, in {frame.name})"
        if self._supervisor is None:
            self._outcome = stage, reason, None
        else:
            if self._trainer is not None:
                self._supervisor.progress(self._trainer.step)
            self._supervisor.finish(stage, reason)
            self._outcome = self._supervisor.outcome(stage, reason)  # should the master not have been there

    def _launch(self, cluster: Cluster, classes: dict[str, type], job: JobInfo) -> dict[str, WorkerGroup]:
        placed, config = place_roles(self._spec), self._spec.user_config()
        groups = {}
        with cluster.launching():
            for role in self._spec.roles:
                cls = classes[role.role]
                args = (config, job) if issubclass(cls, BaseWorkload) else (config,)
                group: WorkerGroup = cls.create_group(*args)  # type: ignore[attr-defined]
                env = self._spec.env | role.env
                groups[role.role] = group.launch(cluster, placed[role.role], name=role.role, env_vars=env)
        return groups

    def _train(self, cls: type, groups: dict[str, RoleGroup], job: JobInfo, supervisor: Supervisor) -> None:
        while True:
            trainer: BaseTrainer = cls(groups, self._spec.user_config(), job, self._restarts)
            self._trainer, self._start_trainer_again = trainer, False
            trainer.supervisor = supervisor
            try:
                trainer.init()
                trainer.fit()
                return
            except JobFailedError:
                raise
            except Exception as error:  # whatever a user's trainer raises
                if not self._start_trainer_again:
                    if not trainer.is_recoverable():
                        raise
                    traceback.print_exc()
                    supervisor.trainer_raised(error)
                self._restarts += 1

    def _recover(self, error: SchedulerError) -> bool:
        """Whether workers alone were replaced, so that a call can be made again; else the trainer starts again."""
        assert self._supervisor is not None
        decision: Decision = self._supervisor.recover(error, lambda _: 0, same_step=False)
        self._start_trainer_again = decision.level != "worker"
        return not self._start_trainer_again

    def _report_progress(self, supervisor: Supervisor) -> None:
        while not supervisor.has_ended(0.5):
            if self._trainer is not None and self._trainer.step:
                supervisor.progress(self._trainer.step)


class JobManager:
    """Creates, finds and ends the process of a job's trainer, which outlives the master that made it.

    `directory`: where events go. `start_timeout_s`: for `init` of a new worker.
    """

    def __init__(self, job: str, spec: JobSpec, directory: str, start_timeout_s: float) -> None:
        self.directory = directory
        self.outcome: Outcome | None = None
        self._job, self._spec, self._start_timeout_s = job, spec, start_timeout_s
        self._name = f"job.{job}.trainer"
        self._ping: Any = None
        self._host: Any = None

    def find_or_start(self) -> None:
        """Take up the trainer's process that an earlier master has started, or start the first."""
        with suppress(ValueError):  # the job is new
            self._host = ray.get_actor(self._name, namespace=RAY_NAMESPACE)
        if self._host is None:
            self.start(0, None)

    def start(self, restarts: int, failure: str | None) -> None:
        """Start the trainer's process; `failure`: which it recovers from."""
        self._ping = None
        host = detached_actor(TrainerHost, self._name, max_concurrency=2)
        self._host = host.remote(self._job, self._spec, restarts, failure)
        self._host.run.remote(self.directory, self._start_timeout_s)

    def lost(self) -> str | None:
        """Why the trainer's process is gone; None where it is not."""
        if self._ping is None or ray.wait([self._ping], timeout=0)[0]:
            before, self._ping = self._ping, self._host.outcome.remote()
            if before is not None:
                try:
                    self.outcome = ray.get(before)
                except ray.exceptions.RayActorError as error:
                    return str(error).strip().split("\n")[0]
        return None

    def log_paths(self) -> list[str]:
        """Files that the trainer prints to."""
        with suppress(ray.exceptions.RayError):  # it is gone
            paths: list[str] = ray.get(self._host.log_paths.remote(), timeout=5)
            return paths
        return []

    def end(self) -> None:
        """Kill the trainer's process."""
        with suppress(Exception):  # it is gone already
            ray.kill(self._host)


def load_classes(job: JobSpec) -> dict[str, type]:
    """The classes of the trainer (under "trainer") and of all roles. Raises one JobSpecError for all that fail."""
    wanted: list[tuple[RoleSpec, type]] = [(job.trainer, BaseTrainer), *((role, Worker) for role in job.roles)]
    loaded = {spec.role: _load(spec, base) for spec, base in wanted}
    problems = [problem for problem in loaded.values() if isinstance(problem, str)]
    if problems:
        raise JobSpecError(problems)
    return {name: cls for name, cls in loaded.items() if isinstance(cls, type)}


def _load(spec: RoleSpec, base: type) -> type | str:
    """The class, or what is wrong with it."""
    if spec.module == MAIN:
        text = f"the module {MAIN!r} is this script, which the job's processes do not run"
        return f"{spec.call}: {text}. Put {spec.cls} into a module of its own, and name that."
    try:
        module = importlib.import_module(spec.module)
    except (Exception, SystemExit) as error:  # whatever a user's module raises while it is imported
        reason = f"{type(error).__name__}: {error}"
        return f"{spec.call}: the module {spec.module!r} cannot be imported ({reason}). Correct it or its path."
    found = without_ray_remote(getattr(module, spec.cls, None))
    if found is None:
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        return f"{spec.call}: the module {spec.module!r} has no {spec.cls!r}. {did_you_mean(spec.cls, classes)}"
    where = f"{spec.call}: {spec.module}.{spec.cls}"
    if not isinstance(found, type) or not issubclass(found, base):
        return f"{where} is not a subclass of {base.__name__}. Derive it from {base.__module__}.{base.__name__}."
    if inspect.isabstract(found):
        return f"{where} is abstract. Define {', '.join(sorted(found.__abstractmethods__))}."  # type: ignore[attr-defined]
    return _constructor_problem(where, found) or found


def _constructor_problem(where: str, cls: type) -> str | None:
    """What is wrong with a constructor that cannot take what is given here: told before anything starts, as its
    workers would, and arguments in another order would be taken for each other in silence."""
    given, passed_on = ["config"], ""
    if issubclass(cls, BaseTrainer | BaseWorkload):
        given = ["config", "job"] if issubclass(cls, BaseWorkload) else ["groups", "config", "job", "restart_count"]
        passed_on = ", ".join(given)
    signature = inspect.signature(cls)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in signature.parameters.values() if parameter.kind in kinds]
    misplaced = any(
        (name in given and name != its) or (name in CONFIG_ARGUMENTS and its != "config")
        for name, its in zip(names, given, strict=False)
    )
    try:
        signature.bind(*given)
        if not misplaced and not set(names) & set(FOREIGN_ARGUMENTS):
            return None
    except TypeError:
        pass
    body = f"super().__init__({passed_on})" if passed_on else "self.config = config"
    advice = f"Write: def __init__(self, {', '.join(given)}): {body}" + (", or leave it out." if passed_on else ".")
    return f"{where}.__init__{signature} is called with ({', '.join(given)}). {advice}"
