"""RLJobBuilder, which describes a job call by call; `build` checks everything. Needs neither ray nor torch."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from rlinf_lite.jobs import exit_code as exit_code
from rlinf_lite.jobs.ported import FOREIGN_OPTIONS
from rlinf_lite.jobs.spec import NAMED_ROLES, JobSpec, JobSpecError, RoleSpec, builder_call, place_roles


def _role_call(name: str) -> Callable[[RLJobBuilder, str, str], RLJobBuilder]:
    """The builder method of a named role, such as `.actor(...)`."""

    def call(self: RLJobBuilder, module: str, cls: str) -> RLJobBuilder:
        return self.role(name, module, cls)

    return call


class RLJob(JobSpec):
    """A job that a builder has checked."""

    def submit(self, job_name: str, blocking: bool = False, **options: Any) -> Any:
        """Start the job under this name. `options`: see `rlinf_lite.jobs.submit.submit`."""
        foreign = [name for name in options if name in FOREIGN_OPTIONS]
        if foreign:
            raise JobSpecError([f"submit({name}={options[name]!r}): {FOREIGN_OPTIONS[name]}" for name in foreign])
        from rlinf_lite.jobs.submit import submit  # needs ray

        return submit(self, job_name, blocking, **options)


class RLJobBuilder:
    """A job, described in any order; `total`, `per_node`, `share` and `env` belong to the role named last.

    Nothing is checked before `build`, which reports every problem in one JobSpecError.
    """

    def __init__(self) -> None:
        self._job: dict[str, Any] = dict(num_nodes=1, devices_per_node=1, device_type="GPU", config={}, env={})
        self._drafts: list[RoleSpec] = []
        self._collocations: list[tuple[str, ...] | None] = []
        """The roles of each collocation call; None: all roles of the job."""
        self._misplaced: list[str] = []

    def node_num(self, count: int) -> RLJobBuilder:
        return self._with(num_nodes=count)

    def device_per_node(self, count: int) -> RLJobBuilder:
        return self._with(devices_per_node=count)

    def device_type(self, kind: str) -> RLJobBuilder:
        """`GPU`, or `CPU` for virtual devices."""
        return self._with(device_type=kind)

    def config(self, config: Any) -> RLJobBuilder:
        """The config of trainer and workers: a JSON dict, or a DictConfig, whose references `build` resolves."""
        return self._with(config=config)

    def global_env(self, env: dict[str, str]) -> RLJobBuilder:
        """Environment variables of all processes; a role's own variables (`env`) take precedence."""
        return self._with(env=env)

    trainer, actor, rollout, reference, reward, critic = map(_role_call, NAMED_ROLES)

    def role(self, name: str, module: str, cls: str) -> RLJobBuilder:
        """A role with any name, such as a simulator."""
        self._drafts.append(RoleSpec(name, module, cls))
        return self

    def total(self, count: int) -> RLJobBuilder:
        """The number of workers of the role, over all nodes."""
        return self._set("total", count)

    def per_node(self, count: int) -> RLJobBuilder:
        """The number of workers of the role on each node that it uses."""
        return self._set("per_node", count)

    def share(self, devices: float) -> RLJobBuilder:
        """Devices per worker of the role: an integer, or 1/integer if several workers share a device."""
        return self._set("share", devices)

    def env(self, env: dict[str, str]) -> RLJobBuilder:
        """Environment variables of the role (or of the trainer)."""
        return self._set("env", env)

    def with_collocation(self, *roles: str) -> RLJobBuilder:
        """Let these roles share devices."""
        self._collocations.append(tuple(map(str, roles)))
        return self

    def with_collocation_all(self) -> RLJobBuilder:
        """Let all roles share devices, also those named after this call."""
        self._collocations.append(None)
        return self

    def build(self) -> RLJob:
        """Check the description and return the job. Raises JobSpecError, which lists every problem."""
        config, unresolved = _plain(self._job["config"])
        spec = self._spec(config)
        uncountable = [*self._misplaced, *self._count_problems(), *self._collocation_problems(spec)]
        problems = uncountable + list(self._missing())
        problems += [unresolved] if unresolved else _config_problems(config)
        problems += _env_problems(".global_env", spec.env)
        for draft in self._drafts:
            problems += _env_problems(f"{draft.call}.env", draft.env)
        if not uncountable:
            try:
                place_roles(spec)
            except JobSpecError as error:
                problems += error.problems
        if problems:
            raise JobSpecError(problems)
        return copy.deepcopy(spec)

    def _with(self, **fields: Any) -> RLJobBuilder:
        self._job |= fields
        return self

    def _set(self, option: str, value: Any) -> RLJobBuilder:
        if not self._drafts:
            self._misplaced.append(f".{option}({value!r}): no role was named before it. Put it after .actor(...).")
        elif self._drafts[-1].role == "trainer" and option != "env":
            fix = "a job has one trainer, on no device. Put it after a role."
            self._misplaced.append(f".trainer(...).{option}({value!r}): {fix}")
        else:
            self._drafts[-1] = replace(self._drafts[-1], **{option: value})
        return self

    def _spec(self, config: Any) -> RLJob:
        trainers = [draft for draft in self._drafts if draft.role == "trainer"]
        roles = tuple(draft for draft in self._drafts if draft.role != "trainer")
        every = tuple(role.role for role in roles)
        return RLJob(
            **{**self._job, "config": config},
            trainer=trainers[0] if trainers else RoleSpec("trainer", "", ""),
            roles=roles,
            collocations=tuple(every if names is None else names for names in self._collocations),
            omegaconf=config is not self._job["config"],
        )

    def _missing(self) -> Iterator[str]:
        for role in ("trainer", "actor"):
            if all(draft.role != role for draft in self._drafts):
                yield f".{role}(module, cls): missing. Add .{role}('my.module', 'My{role.title()}')."
        if (kind := self._job["device_type"]) not in ("GPU", "CPU"):
            yield f".device_type({kind!r}): unknown. Write 'GPU', or 'CPU' for virtual devices."

    def _count_problems(self) -> Iterator[str]:
        yield from _count_problems(".node_num", self._job["num_nodes"])
        yield from _count_problems(".device_per_node", self._job["devices_per_node"])
        for draft in self._drafts:
            yield from _role_problems(draft, self._job["num_nodes"])
        for role, count in Counter(draft.role for draft in self._drafts if isinstance(draft.role, str)).items():
            if count > 1:
                yield f"{builder_call(role)}: {role!r} is named {count} times. Keep one call."

    def _collocation_problems(self, spec: JobSpec) -> Iterator[str]:
        per_node = {role.role: role.per_node for role in spec.roles if isinstance(role.role, str)}
        seen = set[str]()
        for roles, named in zip(spec.collocations, self._collocations, strict=True):
            call = ".with_collocation_all()" if named is None else f".with_collocation({_listed(roles)})"
            if len(roles) < 2:
                yield f"{call}: {len(roles)} role(s) share nothing. Name at least two."
            if unknown := [role for role in roles if role not in per_node]:
                known = ", ".join(per_node) or "none"
                yield f"{call}: the job has no role {_listed(unknown)} (its roles: {known}). Add or drop it."
            if repeated := sorted({role for role in roles if roles.count(role) > 1 or role in seen}):
                yield f"{call}: {_listed(repeated)} is collocated already. Name each role once, in one call."
            counts = {role: per_node[role] for role in roles if _is_count(per_node.get(role))}
            if len(set(counts.values())) > 1:
                values = ", ".join(f"{role} {count}" for role, count in counts.items())
                yield f"{call}: per_node differs ({values}). Give these roles the same .per_node."
            seen.update(roles)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_share(value: Any) -> bool:
    """Whether the value is an integer of at least 1, or 1/integer."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return False
    per_device = 1 / value  # infinite for the smallest numbers
    is_fraction = math.isfinite(per_device) and round(per_device) > 1 and math.isclose(round(per_device) * value, 1)
    return float(value).is_integer() or is_fraction


def _count_problems(call: str, value: Any) -> Iterator[str]:
    if not _is_count(value):
        yield f"{call}({value!r}): not an integer of at least 1. Give a count, such as 1."


def _role_problems(draft: RoleSpec, num_nodes: Any) -> Iterator[str]:
    for what, value in (("role name", draft.role), ("module", draft.module), ("class", draft.cls)):
        if not isinstance(value, str) or not value.strip():
            yield f"{draft.call}: {value!r} is not a {what}. Give it as a string."
    yield from _count_problems(f"{draft.call}.total", draft.total)
    yield from _count_problems(f"{draft.call}.per_node", draft.per_node)
    if not _is_share(draft.share):
        fix = "Write 2 for two devices per worker, 1/2 for two workers per device."
        yield f"{draft.call}.share({draft.share!r}): neither an integer of at least 1 nor 1/integer. {fix}"
    if all(map(_is_count, (draft.total, draft.per_node, num_nodes))) and draft.total > draft.per_node * num_nodes:
        most = f"{draft.per_node} per node on {num_nodes} node(s) are {draft.per_node * num_nodes} at most"
        fix = f"Set .per_node({-(-draft.total // num_nodes)}), or raise .node_num."
        yield f"{draft.call}.total({draft.total}): {most}. {fix}"


def _plain(config: Any) -> tuple[Any, str]:
    """A config of OmegaConf as basic types, any other unchanged; and a text on a bad reference, or ""."""
    omegaconf = sys.modules.get("omegaconf")  # not imported here: a user with such a config has imported it
    if omegaconf is None or not omegaconf.OmegaConf.is_config(config):
        return config, ""
    try:
        return omegaconf.OmegaConf.to_container(config, resolve=True, throw_on_missing=True), ""
    except omegaconf.errors.OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        return config, f".config(...): {error.full_key}: {reason}. Set it, or correct the reference."


def _config_problems(config: Any) -> Iterator[str]:
    fix = "Give the dict that trainer and workers read, such as {'lr': 0.001}."
    if not isinstance(config, dict):
        yield f".config({config!r}): a {type(config).__name__}, not a dict. {fix}"
    elif not config:
        yield f".config({{}}): empty, or not given. {fix}"
    else:
        try:
            json.dumps(config)
        except (TypeError, ValueError) as error:
            yield f".config(...): cannot be written as JSON ({error}). Use numbers, strings, lists and dicts."


def _env_problems(call: str, env: Any) -> Iterator[str]:
    if not isinstance(env, dict):
        yield f"{call}({env!r}): a {type(env).__name__}, not a dict. Write {{'NAME': 'value'}}."
    elif bad := {key: value for key, value in env.items() if not isinstance(key, str) or not isinstance(value, str)}:
        fixed = {str(key): str(value) for key, value in bad.items()}
        yield f"{call}({bad}): names and values must be strings. Write {fixed}."


def _listed(roles: Iterable[str]) -> str:
    return ", ".join(map(repr, roles))
