"""Which placements a run with `cluster.component_placement: auto` tries, and which of them there is memory for."""

import os
import re

import pytest

from rlinf_lite.config import load_config
from rlinf_lite.config.checks import possible
from rlinf_lite.config.names import fused_roles
from rlinf_lite.config.plan import plan_of
from rlinf_lite.preview import dry_run, placements
from rlinf_lite.preview.placements import check_room
from rlinf_lite.runners.run_config import write_config
from rlinf_lite.scheduler import PlacementError

EIGHT = ["cluster.num_gpus_per_node=8", "cluster.accelerator=cuda", "cluster.component_placement=auto"]
STALE = ["runner.mode=async", "algorithm.correction.kind=decoupled"]


def config(*overrides, name="maniskill_pushcube_ppo_mlp"):
    return load_config(name, [*EIGHT, *overrides], elsewhere=True)


def language(*overrides):
    ours = ["data.num_prompts=40", "actor.global_batch_size=320", "actor.precision=fp32", *overrides]
    return config(*ours, name="math/math_arithmetic_grpo")


def shown(placed, roles):
    """The lines of some roles, roles that share processes, and the number of stages."""
    lines = {name: line for names, line in placed.cluster.component_placement.items() for name in names.split(",")}
    return " ".join(lines[role] for role in roles), placed.cluster.fuse, placed.rollout.pipeline_stage_num


def test_placements_of_a_simulation():
    in_turn = [shown(placed, ("env", "rollout", "actor")) for placed in possible(config())]
    assert in_turn == [
        ("0-7 0-7 0-7", None, 1),
        ("0-7 0-7 0-7", "actor,rollout", 1),
        ("0-7 0-7 0-7", "actor,rollout", 2),
        ("0-3 4-7 0-7", None, 2),
        ("0-3 4-7 4-7", "actor,rollout", 2),
        ("0-3 4-5 6-7", None, 2),
    ]
    beside = [
        shown(placed, ("env", "rollout", "actor")) for placed in possible(config(*STALE, "env.train.num_envs=48"))
    ]
    assert beside == [
        ("0-7 0-7 0-7", None, 1),
        ("0-3 0-3 4-7", None, 1),
        ("0-5 0-5 6-7", None, 1),
        ("0-3 4-7 4-7", None, 2),
        ("0-3 4-5 6-7", None, 2),
    ]


def test_placements_of_a_language_model():
    in_turn = [shown(placed, ("rollout", "reward", "actor")) for placed in possible(language("cluster.fuse=null"))]
    assert in_turn == [
        ("0-7 0-7 0-7", None, 1),
        ("0-7 0-7 0-7", "actor,rollout", 1),
        ("0-3 0-3 4-7", None, 1),
    ]
    beside = [shown(placed, ("rollout", "reward", "actor"))[0] for placed in possible(language(*STALE))]
    assert beside == ["0-7 0-7 0-7", "0-3 0-3 4-7", "0-5 0-5 6-7", "0-1 0-1 2-7"]


@pytest.mark.parametrize(("cores", "line"), [(1, None), (4, "0-1:0-3"), (7, "0-1:0-3"), (64, "0-1:0-15")])
def test_slots_that_are_cores_have_a_simulator_for_each(cores, line, monkeypatch):
    """As many as divide the environments evenly."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    placed = possible(config("cluster.accelerator=cpu", "cluster.num_gpus_per_node=2", "env.train.num_envs=16"))
    several = [lines for lines, _, _ in (shown(one, ("env",)) for one in placed) if ":" in lines]
    assert several == ([] if line is None else [line])


def test_a_configs_own_fuse_is_one_of_several():
    """Where policies would act with other numbers it stays."""
    for own in ("null", "'actor,rollout'"):
        fuses = {tuple(fused_roles(placed)) for placed in possible(language(f"cluster.fuse={own}"))}
        assert fuses == {(), ("actor", "rollout")}
    more = language("cluster.fuse='actor,rollout'", "algorithm.kl={place: loss, coef: 0.1}")
    fuses = [fused_roles(placed) for placed in possible(more)]
    assert fuses[:3] == [["actor", "rollout"], [], ["actor", "rollout", "reference"]]
    low = possible(language("cluster.fuse=null", "actor.precision=bf16"))
    assert {tuple(fused_roles(placed)) for placed in low} == {()}
    with pytest.raises(ValueError, match=r"cluster\.fuse: there is no role 'learner'"):
        config("cluster.fuse='actor,learner'")
    with pytest.raises(ValueError, match=r"cluster\.fuse: names actor alone"):
        config("cluster.fuse=actor")


def test_node_groups_are_kept():
    """Roles with a group stay within it and have all of it between them, lines that name slots stay as they are."""
    groups = "cluster.node_groups=[{label: sim, nodes: 0}, {label: gpu, nodes: 1}]"
    lines = "{env: {placement: auto, node_group: sim}, rollout: {placement: auto, node_group: gpu}, actor: '8-15'}"
    placed = possible(config("cluster.num_nodes=2", groups, f"cluster.component_placement={lines}"))
    for plan in map(plan_of, placed):
        assert [p.slots for p in plan.placements["env"]] == [(slot,) for slot in range(8)]
        assert [p.slots for p in plan.placements["rollout"]] == [(slot,) for slot in range(8, 16)]
        assert [p.slots for p in plan.placements["actor"]] == [(slot,) for slot in range(8, 16)]
    gpu = "{placement: auto, node_group: gpu}"
    together = f"{{env: {{placement: auto, node_group: sim}}, rollout: {gpu}, actor: {gpu}}}"
    placed = possible(config("cluster.num_nodes=2", groups, f"cluster.component_placement={together}"))
    actors = {tuple(p.slots[0] for p in plan_of(one).placements["actor"]) for one in placed}
    assert actors == {tuple(range(8, 16)), tuple(range(12, 16))}


def test_names_and_groups_that_are_not_there_are_said_as_ever():
    with pytest.raises(ValueError, match="no component is called 'envs'"):
        config("cluster.component_placement={actor: auto, rollout: auto, env: auto, envs: auto}")
    lines = "{actor: auto, rollout: auto, env: {placement: auto, node_group: sim}}"
    with pytest.raises(ValueError, match=r"node_group sim is not in cluster\.node_groups"):
        config(f"cluster.component_placement={lines}")


def test_imitation_has_nothing_to_choose():
    with pytest.raises(ValueError, match="in imitation there is nothing to choose by"):
        load_config("tabletop_sft_mlp", ["cluster.component_placement=auto"])


def test_what_no_placement_mends_is_said_as_ever():
    with pytest.raises(ValueError, match="micro_batch_size") as error:
        config("actor.micro_batch_size=0")
    assert "component_placement" not in str(error.value)


def test_a_chosen_placement_takes_the_overrides_of_any_other(tmp_path):
    for placed in possible(load_config("gym_pendulum_ppo_mlp", ["cluster.component_placement=auto"])):
        write_config(placed, tmp_path)  # as a run does
        again = load_config(tmp_path / "config.yaml", ["cluster.component_placement.env=0", "cluster.fuse=null"])
        assert again.cluster.component_placement == {**placed.cluster.component_placement, "env": 0}


def test_memory_rules_placements_out(monkeypatch):
    """A process has a context of CUDA, a GiB, and little of a small network's: three on a slot, two, or one."""
    monkeypatch.setattr(placements, "gpu_bytes", lambda: 2**30 * 9 // 4)
    found = check_room(config())
    assert [one.outcome for one in found] == ["too large", "fits", "fits", "fits", "fits", "fits"]
    assert [one.needed_bytes // 2**30 for one in found] == [3, 2, 2, 2, 1, 1]
    said = dry_run.describe(config())
    assert all(str(one).strip() in said for one in found) and "it cannot run" not in said
    monkeypatch.setattr(placements, "gpu_bytes", lambda: None)
    assert {one.outcome for one in check_room(config())} == {"may fit"}
    assert check_room(config("cluster.component_placement={actor: 0-7, env: 0-3, rollout: 4-7}")) == []


def test_where_nothing_fits_it_is_said_before_anything_starts(monkeypatch):
    monkeypatch.setattr(placements, "gpu_bytes", lambda: 2**29)
    with pytest.raises(PlacementError) as error:
        check_room(config())
    said = str(error.value)
    assert said.startswith(
        "cluster.component_placement: is auto, and no placement fits into the smallest GPU here, 512"
    )
    listed = re.findall(r"^ +too large +[1-3]\.\d GiB  'cluster\.component_placement=\{actor", said, re.MULTILINE)
    assert len(listed) == 6
    assert "Lower env.train.num_envs" in said and "actor.offload" in said
    previewed = dry_run.describe(config())
    assert "it cannot run on this machine" in previewed and all(line.strip() in previewed for line in said.splitlines())
