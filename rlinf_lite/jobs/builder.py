"""Describe a job call by call; `build` checks all of it. Needs neither ray nor torch."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from rlinf_lite.jobs import exit_code as exit_code
from rlinf_lite.jobs.ported import FOREIGN_OPTIONS
from rlinf_lite.jobs.spec import JobSpec, JobSpecError, RoleSpec, builder_call, place_roles


@dataclass(frozen=True)
class RLJob:
    """A checked job, ready to run."""

    spec: JobSpec

    def submit(self, job_name: str, blocking: bool = False, **options: Any) -> Any:
        """Launch it under a name. `options`: those of `rlinf_lite.jobs.submit.submit`."""
        from rlinf_lite.jobs.submit import submit

        problems = [
            f"submit({name}={value!r}): {FOREIGN_OPTIONS[name]}"
            for name, value in options.items()
            if name in FOREIGN_OPTIONS
        ]
        if problems:
            raise JobSpecError(problems)
        return submit(self.spec, job_name, blocking, **options)


class RLJobBuilder:
    """A job, described in any order; `total`, `per_node`, `share` and `env` belong to the role named last.

    Nothing is checked before `build`, which reports every problem in one JobSpecError.
    """

    def __init__(self) -> None:
        self._job: dict[str, Any] = dict(num_nodes=1, devices_per_node=1, device_type="GPU", config={}, env={})
        self._drafts: list[RoleSpec] = []
        self._collocations: list[tuple[str, ...] | None] = []
        self._misplaced: list[str] = []
        self._unresolved: list[str] = []

    def node_num(self, count: int) -> RLJobBuilder:
        self._job["num_nodes"] = count
        return self

    def device_per_node(self, count: int) -> RLJobBuilder:
        self._job["devices_per_node"] = count
        return self

    def device_type(self, kind: str) -> RLJobBuilder:
        """`GPU`, or `CPU`: as many virtual devices."""
        self._job["device_type"] = kind
        return self

    def config(self, config: Any) -> RLJobBuilder:
        """What the trainer and all workers get: a dict of JSON, or a DictConfig of OmegaConf, whose references are
        resolved here."""
        omegaconf, self._unresolved = sys.modules.get("omegaconf"), []  # whoever gives one of its has imported it
        self._job["omegaconf"] = omegaconf is not None and omegaconf.OmegaConf.is_config(config)
        if omegaconf is not None and self._job["omegaconf"]:
            try:
                config = omegaconf.OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
            except omegaconf.errors.OmegaConfBaseException as error:
                reason = str(error).splitlines()[0]
                self._unresolved = [f".config(...): {error.full_key}: {reason}. Set it, or correct the reference."]
        self._job["config"] = config
        return self

    def global_env(self, env: dict[str, str]) -> RLJobBuilder:
        """Environment variables of all processes; those of a role (`env`) come before them."""
        self._job["env"] = env
        return self

    def trainer(self, module: str, cls: str) -> RLJobBuilder:
        return self.role("trainer", module, cls)

    def actor(self, module: str, cls: str) -> RLJobBuilder:
        return self.role("actor", module, cls)

    def rollout(self, module: str, cls: str) -> RLJobBuilder:
        return self.role("rollout", module, cls)

    def reference(self, module: str, cls: str) -> RLJobBuilder:
        return self.role("reference", module, cls)

    def reward(self, module: str, cls: str) -> RLJobBuilder:
        return self.role("reward", module, cls)

    def critic(self, module: str, cls: str) -> RLJobBuilder:
        return self.role("critic", module, cls)

    def role(self, name: str, module: str, cls: str) -> RLJobBuilder:
        """A role of any name, such as a simulator's."""
        self._drafts.append(RoleSpec(name, module, cls))
        return self

    def total(self, count: int) -> RLJobBuilder:
        """Workers of the role, over all nodes."""
        return self._set("total", count)

    def per_node(self, count: int) -> RLJobBuilder:
        """Workers of the role on each node that it uses."""
        return self._set("per_node", count)

    def share(self, devices: float) -> RLJobBuilder:
        """Devices per worker of the role: an integer, or 1/integer where workers share one."""
        return self._set("share", devices)

    def env(self, env: dict[str, str]) -> RLJobBuilder:
        """Environment variables of the role (or of the trainer)."""
        return self._set("env", env)

    def with_collocation(self, *roles: str) -> RLJobBuilder:
        """Roles that share devices."""
        self._collocations.append(tuple(map(str, roles)))
        return self

    def with_collocation_all(self) -> RLJobBuilder:
        """All roles share devices, those named later too."""
        self._collocations.append(None)
        return self

    def build(self) -> RLJob:
        """Raises JobSpecError."""
        problems = [*self._misplaced]
        problems += _count_problems(".node_num", self._job["num_nodes"])
        problems += _count_problems(".device_per_node", self._job["devices_per_node"])
        for draft in self._drafts:
            problems += _role_problems(draft, self._job["num_nodes"])
        for role, count in Counter(draft.role for draft in self._drafts if isinstance(draft.role, str)).items():
            if count > 1:
                problems.append(f"{builder_call(role)}: {role!r} is named {count} times. Keep one call.")
        problems += self._collocation_problems()
        devices_can_be_counted = not problems

        for role in ("trainer", "actor"):
            if all(draft.role != role for draft in self._drafts):
                example = f".{role}('my.module', 'My{role.title()}')"
                problems.append(f".{role}(module, cls): missing. Add {example}.")
        if self._job["device_type"] not in ("GPU", "CPU"):
            fix = "Write 'GPU', or 'CPU' for virtual devices."
            problems.append(f".device_type({self._job['device_type']!r}): unknown. {fix}")
        problems += self._unresolved or _config_problems(self._job["config"])
        problems += _env_problems(".global_env", self._job["env"])
        for draft in self._drafts:
            problems += _env_problems(f"{draft.call}.env", draft.env)
        if devices_can_be_counted:
            try:
                place_roles(self._spec())
            except JobSpecError as error:
                problems += error.problems
        if problems:
            raise JobSpecError(problems)
        return RLJob(copy.deepcopy(self._spec()))

    def _set(self, option: str, value: Any) -> RLJobBuilder:
        if not self._drafts:
            self._misplaced.append(f".{option}({value!r}): no role was named before it. Put it behind .actor(...).")
        elif self._drafts[-1].role == "trainer" and option != "env":
            self._misplaced.append(
                f".trainer(...).{option}({value!r}): a job has one trainer, on no device. Put it behind a role."
            )
        else:
            self._drafts[-1] = replace(self._drafts[-1], **{option: value})
        return self

    @property
    def _roles(self) -> list[RoleSpec]:
        return [draft for draft in self._drafts if draft.role != "trainer"]

    def _spec(self) -> JobSpec:
        trainers = [draft for draft in self._drafts if draft.role == "trainer"]
        return JobSpec(
            **self._job,
            trainer=trainers[0] if trainers else RoleSpec("trainer", "", ""),
            roles=tuple(replace(draft, share=float(draft.share)) for draft in self._roles),
            collocations=self._collocated(),
        )

    def _collocated(self) -> tuple[tuple[str, ...], ...]:
        every = tuple(draft.role for draft in self._roles)
        return tuple(every if roles is None else roles for roles in self._collocations)

    def _collocation_problems(self) -> list[str]:
        per_node = {draft.role: draft.per_node for draft in self._roles if isinstance(draft.role, str)}
        problems, seen = [], set[str]()
        for roles, asked in zip(self._collocated(), self._collocations, strict=True):
            call = f".with_collocation({', '.join(map(repr, roles))})" if asked else ".with_collocation_all()"
            unknown = [role for role in roles if role not in per_node]
            repeated = sorted({role for role in roles if roles.count(role) > 1 or role in seen})
            counts = {role: per_node[role] for role in roles if _is_count(per_node.get(role))}
            if len(roles) < 2:
                problems.append(f"{call}: {len(roles)} role(s) share nothing. Name at least two.")
            if unknown:
                known = ", ".join(per_node) or "none"
                problems.append(f"{call}: the job has no role {_listed(unknown)} (its roles: {known}). Add or drop it.")
            if repeated:
                problems.append(f"{call}: {_listed(repeated)} is collocated already. Name each role once, in one call.")
            if len(set(counts.values())) > 1:
                values = ", ".join(f"{role} {count}" for role, count in counts.items())
                problems.append(f"{call}: per_node differs ({values}). Give these roles the same .per_node.")
            seen.update(roles)
        return problems


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _count_problems(call: str, value: Any) -> list[str]:
    return [] if _is_count(value) else [f"{call}({value!r}): not an integer of at least 1. Give a count, such as 1."]


def _role_problems(draft: RoleSpec, num_nodes: Any) -> list[str]:
    problems = []
    for what, value in (("role name", draft.role), ("module", draft.module), ("class", draft.cls)):
        if not isinstance(value, str) or not value.strip():
            problems.append(f"{draft.call}: {value!r} is not a {what}. Give it as a string.")
    problems += _count_problems(f"{draft.call}.total", draft.total)
    problems += _count_problems(f"{draft.call}.per_node", draft.per_node)
    share = draft.share
    is_positive = isinstance(share, int | float) and not isinstance(share, bool) and math.isfinite(share) and share > 0
    per_device = 1 / share if is_positive else 0.0
    is_fraction = math.isfinite(per_device) and round(per_device) > 1 and math.isclose(round(per_device) * share, 1)
    if not is_positive or not (float(share).is_integer() or is_fraction):
        problems.append(
            f"{draft.call}.share({draft.share!r}): neither an integer of at least 1 nor 1/integer. "
            "Write 2 for two devices per worker, 1/2 for two workers per device."
        )
    if all(map(_is_count, (draft.total, draft.per_node, num_nodes))) and draft.total > draft.per_node * num_nodes:
        most, needed = draft.per_node * num_nodes, -(-draft.total // num_nodes)
        problems.append(
            f"{draft.call}.total({draft.total}): {draft.per_node} per node on {num_nodes} node(s) are {most} at most. "
            f"Set .per_node({needed}), or raise .node_num."
        )
    return problems


def _config_problems(config: Any) -> list[str]:
    fix = "Give the dict that trainer and workers read, such as {'lr': 0.001}."
    if not isinstance(config, dict):
        return [f".config({config!r}): a {type(config).__name__}, not a dict. {fix}"]
    if not config:
        return [f".config({{}}): empty, or not given. {fix}"]
    try:
        json.dumps(config)
    except (TypeError, ValueError) as error:
        return [f".config(...): cannot be written as JSON ({error}). Use numbers, strings, lists and dicts."]
    return []


def _env_problems(call: str, env: Any) -> list[str]:
    if not isinstance(env, dict):
        return [f"{call}({env!r}): a {type(env).__name__}, not a dict. Write {{'NAME': 'value'}}."]
    bad = {key: value for key, value in env.items() if not isinstance(key, str) or not isinstance(value, str)}
    fixed = {str(key): str(value) for key, value in bad.items()}
    return [f"{call}({bad}): names and values must be strings. Write {fixed}."] if bad else []


def _listed(roles: list[str]) -> str:
    return ", ".join(map(repr, roles))
