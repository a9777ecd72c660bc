"""Predictions choose what a simulation of every placement, decision by decision, finds to be fastest."""

import heapq

import pytest

from rlinf_lite.config import load_config
from rlinf_lite.config.checks import possible
from rlinf_lite.config.plan import plan_of
from rlinf_lite.preview.placements import Costs, fits, measured, step_s

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
