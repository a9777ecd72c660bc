"""Predictions choose what a simulation of every placement, decision by decision, finds to be fastest."""

import heapq
import os
import re

import pytest

from rlinf_lite.config import load_config
from rlinf_lite.config.checks import possible
from rlinf_lite.config.names import fused_roles
from rlinf_lite.config.plan import plan_of
from rlinf_lite.preview import dry_run, placements
from rlinf_lite.preview.placements import Costs, best_first, check_room, fits, measured, step_s
from rlinf_lite.runners.run_config import write_config
from rlinf_lite.scheduler import PlacementError

EIGHT = ["cluster.num_gpus_per_node=8", "cluster.accelerator=cuda", "cluster.component_placement=auto"]
T = 50  # decisions of a step


def config(*overrides, name="maniskill_pushcube_ppo_mlp"):
    return load_config(name, [*EIGHT, *overrides], elsewhere=True)


def simulated_s(costs, plan):
    """Each stage's environments, then its policy, decision by decision; a slot does one thing at a time, what was ready
    first. Then training, on all slots of the actor."""
    roles = ("env", "rollout")
    slots = {role: [p.slots[0] for p in plan.placements[role]] for role in (*roles, "actor")}
    stages, free = plan.config.rollout.pipeline_stage_num, dict.fromkeys(range(8), 0.0)
    queue = [(0.0, stage, 0) for stage in range(stages)]  # when it is ready, whose it is, what has been done
    ended = 0.0
    while queue:
        ready, stage, done = heapq.heappop(queue)
        role = roles[done % 2]
        took = costs.work[role] / len(slots[role]) / T / stages
        ends = []
        for slot in slots[role]:
            free[slot] = max(free[slot], ready) + took
            ends.append(free[slot])
        ended = max(ends)
        if done + 1 < 2 * T:
            heapq.heappush(queue, (ended, stage, done + 1))
    return max(free.values()) + costs.work["actor"] / len(slots["actor"]) + costs.rest_s


@pytest.mark.parametrize(
    "work",
    [
        {"env": 80.0, "rollout": 8.0, "actor": 8.0},
        {"env": 8.0, "rollout": 80.0, "actor": 8.0},
        {"env": 8.0, "rollout": 8.0, "actor": 80.0},
        {"env": 30.0, "rollout": 30.0, "actor": 30.0},
        {"env": 40.0, "rollout": 10.0, "actor": 5.0},
    ],
    ids=["env", "policy", "training", "even", "mixed"],
)
def test_the_predicted_best_is_the_simulated_best(work):
    candidates, costs = [plan_of(placed) for placed in possible(config())], Costs(work, 0.5)
    assert len(candidates) > 20
    best = min(candidates, key=lambda plan: step_s(costs, plan))
    assert simulated_s(costs, best) <= 1.02 * min(simulated_s(costs, plan) for plan in candidates)
    slowest = max(candidates, key=lambda plan: step_s(costs, plan))
    assert simulated_s(costs, slowest) > 1.5 * simulated_s(costs, best)
    for plan in candidates:
        assert step_s(costs, plan) == pytest.approx(simulated_s(costs, plan), rel=0.05)


@pytest.mark.parametrize("processes_per_slot", [1, 2])
@pytest.mark.parametrize("busy", ["env", "rollout", "actor"])
def test_where_memory_rules_placements_out_the_best_of_the_others_is_found(busy, processes_per_slot):
    """A process has a context of CUDA, a GiB, and little of a small network's."""
    work = {"env": 8.0, "rollout": 8.0, "actor": 8.0, busy: 80.0}
    costs, room = Costs(work, 0.5), 2**30 * (4 * processes_per_slot + 1) // 4
    plans = [plan_of(placed) for placed in possible(config())]
    free = min(simulated_s(costs, plan) for plan in plans)
    found = next(plan for plan in by_worth(costs, plans) if fits(plan, room))
    allowed = []
    for plan in plans:
        fused, on_slots = set(fused_roles(plan.config)), [0] * 8
        for role in sorted(work.keys() - ({"rollout"} if fused else set())):
            for process in plan.placements[role]:
                on_slots[process.slots[0]] += 1
        if max(on_slots) <= processes_per_slot:
            allowed.append(simulated_s(costs, plan))
    assert len(allowed) < len(plans)
    assert simulated_s(costs, found) <= 1.05 * min(allowed)
    if processes_per_slot == 1:
        assert simulated_s(costs, found) > 1.1 * free  # memory costs something here


def test_overlap_of_asynchronous_runs():
    """Where training needs as long as rollouts, slots of their own let both go on at once."""
    overlapping = config("runner.mode=async", "algorithm.correction.kind=decoupled")
    costs = Costs({"env": 20.0, "rollout": 20.0, "actor": 40.0}, 0.0)
    times = {}
    for placed in possible(overlapping):
        lines = {name: line for names, line in placed.cluster.component_placement.items() for name in names.split(",")}
        times.setdefault((lines["env"], lines["rollout"], lines["actor"]), step_s(costs, plan_of(placed)))
    assert times["0-7", "0-7", "0-7"] == 10.0  # everything on everything: the sum of work over eight
    assert times["0-3", "0-3", "4-7"] == 10.0  # 40 / 4, and 40 / 4 beside it
    assert times["0-3", "4-7", "4-7"] == 15.0  # acting and training take turns on four
    assert min(times.values()) == 10.0


def test_costs_are_what_was_busy():
    plan = plan_of(possible(config("rollout.pipeline_stage_num=2"))[0])
    line = {"time/step": 10.0, "time/generate_rollouts": 6.0, "time/training": 3.0}
    line |= {"perf/env_idle_frac": 0.5, "perf/rollout_idle_frac": 0.75}
    costs = measured([line, {**line, "time/step": 100.0}, line], plan)
    assert costs.work == {"env": 24.0, "rollout": 12.0, "actor": 24.0} and costs.rest_s == 1.0
    sent = measured([line | {"time/sync_weights": 0.25}], plan)
    assert (sent.rest_s, sent.sync_s) == (0.75, 0.25)


LANGUAGE = ["cluster.num_gpus_per_node=8", "cluster.accelerator=cuda", "cluster.component_placement=auto"]


def language(*overrides):
    ours = ["data.num_prompts=40", "actor.global_batch_size=320", "actor.precision=fp32", *overrides]
    return load_config("math/math_arithmetic_grpo", [*LANGUAGE, *ours], elsewhere=True)


def of_slots(plan):
    return tuple(len({process.slots for process in plan.placements[role]}) for role in ("rollout", "actor"))


def by_worth(costs, plans):
    return [plans[i] for i in best_first([step_s(costs, plan) for plan in plans], plans)]


def best_of(costs, candidates):
    return by_worth(costs, [plan_of(candidate) for candidate in candidates])[0]


def test_language_models_have_the_placement_that_enumeration_finds():
    """In turn all slots are everybody's; side by side each side has slots in proportion to its work."""
    generating = Costs({"rollout": 60.0, "actor": 20.0}, 0.0, sync_s=1.0)
    in_turn = best_of(generating, possible(language()))
    assert of_slots(in_turn) == (8, 8) and fused_roles(in_turn.config) == ["actor", "rollout"]
    assert step_s(generating, in_turn) == 60 / 8 + 20 / 8
    stale = ["runner.mode=async", "algorithm.correction.kind=decoupled"]
    for work, slots in ((60.0, 20.0), (6, 2)), ((20.0, 60.0), (2, 6)), ((40.0, 40.0), (4, 4)):
        beside = best_of(Costs({"rollout": work[0], "actor": work[1]}, 0.0), possible(language(*stale)))
        enumerated = {k: max(work[0] / k, work[1] / (8 - k)) for k in range(1, 8)}
        assert min(enumerated, key=enumerated.get) == slots[0]
        seconds = step_s(Costs({"rollout": work[0], "actor": work[1]}, 0.0), beside)
        assert seconds == min(enumerated.values()) == 10.0


def test_a_configs_own_fuse_is_one_of_several():
    """Where policies would act with other numbers it stays."""
    for own in ("null", "'actor,rollout'"):
        fuses = {tuple(fused_roles(placed)) for placed in possible(language(f"cluster.fuse={own}"))}
        assert fuses == {(), ("actor", "rollout")}
    low = possible(language("cluster.fuse=null", "actor.precision=bf16"))
    assert {tuple(fused_roles(placed)) for placed in low} == {()}
    assert {tuple(fused_roles(placed)) for placed in possible(config())} == {(), ("actor", "rollout")}
    with pytest.raises(ValueError, match=r"cluster\.fuse: there is no role 'learner'"):
        config("cluster.fuse='actor,learner'")
    with pytest.raises(ValueError, match=r"cluster\.fuse: names actor alone"):
        config("cluster.fuse=actor")


@pytest.mark.parametrize("sync_s", [0.0, 0.01, 0.05])
def test_on_two_cores_a_language_models_two_that_are_tried(sync_s, monkeypatch):
    """Fused pairs, and two policies beside one actor, of which one is as fast as anything by hand."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(2)))
    shipped = load_config("math/math_arithmetic_grpo", ["cluster.component_placement=auto", "cluster.accelerator=cpu"])
    costs = Costs({"rollout": 0.5, "actor": 1.2}, 0.02, sync_s)
    plans = by_worth(costs, [plan_of(placed) for placed in possible(shipped)])
    found = [(plan.size("rollout"), plan.size("actor"), bool(fused_roles(plan.config))) for plan in plans]
    assert set(found[:2]) == {(2, 2, True), (2, 1, False)}


@pytest.mark.parametrize("nodes", [1, 2])
def test_cores_are_those_of_the_nodes_that_a_role_is_on(nodes, monkeypatch):
    """One slot of four cores on each node: as many simulators and policies as cores, in turn; on two nodes half as
    long, and where a role keeps to one of them, on its cores only."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    cores = ["cluster.accelerator=cpu", "cluster.num_gpus_per_node=1", f"cluster.num_nodes={nodes}"]
    costs = Costs({"env": 40.0, "rollout": 24.0, "actor": 16.0}, 0.0)
    placed = possible(config(*cores, "env.train.num_envs=64", "env.eval.num_envs=64"))
    found = best_of(costs, placed)
    sizes = [found.size(role) for role in ("env", "rollout", "actor")]
    assert sizes == [4 * nodes, 4 * nodes, nodes] and step_s(costs, found) == 80 / (4 * nodes)
    apart = [plan_of(one) for one in placed if one.cluster.component_placement.get("env") == "0"]
    if nodes == 2:
        alone = next(
            plan for plan in apart if plan.size("rollout") == 1 and plan.placements["rollout"][0].slots == (1,)
        )
        assert step_s(Costs({"env": 8.0, "rollout": 1.0, "actor": 0.0}, 0.0), alone) >= 8.0  # a simulator, one thread


def test_where_nothing_fits_it_is_said_before_anything_starts(monkeypatch):
    ours = config()
    check_room(ours)  # how much a GPU has is not known here
    for module in (placements, dry_run):
        monkeypatch.setattr(module, "room_for", lambda accelerator: 2**29)
    with pytest.raises(PlacementError) as error:
        check_room(ours)
    said = str(error.value)
    assert said.startswith("cluster.component_placement: is auto, and the smallest GPU here has 512.0 MiB")
    sizes = [float(found) for found in re.findall(r"^ +([\d.]+) GiB  \{actor", said, re.MULTILINE)]
    assert len(sizes) == 8 and sizes == sorted(sizes)
    assert "more" in said and "Lower env.train.num_envs" in said
    assert said.splitlines()[1].strip() in dry_run.describe(ours)
    check_room(config("cluster.component_placement={actor: 0-7, env: 0-3, rollout: 4-7}"))  # not ours to say


def test_memory_rules_placements_out():
    candidates = [plan_of(placed) for placed in possible(config())]
    together = candidates[0]
    assert {len(ranks) for ranks in together.placements.values()} == {8}
    apart = next(plan for plan in candidates if len(plan.placements["actor"]) == len(plan.placements["env"]) == 4)
    # three contexts of CUDA on a slot, or two, and little of a small network's
    assert fits(together, None) and fits(together, 2**30 * 13 // 4) and not fits(together, 2**30 * 9 // 4)
    assert fits(apart, 2**30 * 9 // 4)
    assert not fits(together, 2**20)


def test_node_groups_are_kept():
    """Roles with a group stay within it, lines that name slots stay as they are."""
    groups = "cluster.node_groups=[{label: sim, nodes: 0}, {label: gpu, nodes: 1}]"
    lines = "{env: {placement: auto, node_group: sim}, rollout: {placement: auto, node_group: gpu}, actor: '8-15'}"
    placed = possible(config("cluster.num_nodes=2", groups, f"cluster.component_placement={lines}"))
    for plan in map(plan_of, placed):
        assert {slot for p in plan.placements["env"] for slot in p.slots} <= set(range(8))
        assert {slot for p in plan.placements["rollout"] for slot in p.slots} <= set(range(8, 16))
        assert [p.slots for p in plan.placements["actor"]] == [(slot,) for slot in range(8, 16)]
    gpu = "{placement: auto, node_group: gpu}"
    together = f"{{env: {{placement: auto, node_group: sim}}, rollout: {gpu}, actor: {gpu}}}"
    placed = possible(config("cluster.num_nodes=2", groups, f"cluster.component_placement={together}"))
    actors = {tuple(p.slots[0] for p in plan_of(one).placements["actor"]) for one in placed}
    assert tuple(range(8, 16)) in actors and tuple(range(12, 16)) in actors


def test_a_chosen_placement_takes_the_overrides_of_any_other(tmp_path):
    for placed in possible(load_config("gym_pendulum_ppo_mlp", ["cluster.component_placement=auto"])):
        write_config(placed, tmp_path)  # as a run does
        again = load_config(tmp_path / "config.yaml", ["cluster.component_placement.env=0", "cluster.fuse=null"])
        assert again.cluster.component_placement == {**placed.cluster.component_placement, "env": 0}
