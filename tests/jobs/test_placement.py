from typing import Any

import pytest

from rlinf_lite.jobs.spec import JobSpec, JobSpecError, RoleSpec, place_roles

Roles = dict[str, tuple[int, int, float]]


def place(nodes: int, devices: int, roles: Roles, *collocations: tuple[str, ...]) -> dict[str, list[tuple[int, ...]]]:
    """Each role's slots by rank; roles are (total, per_node, share)."""
    specs = tuple(RoleSpec(name, "m", "C", *counts) for name, counts in roles.items())
    spec = JobSpec(nodes, devices, "CPU", {}, {}, RoleSpec("trainer", "m", "T"), specs, collocations)
    placed = place_roles(spec)
    assert all([process.rank for process in processes] == list(range(len(processes))) for processes in placed.values())
    return {role: [process.slots for process in processes] for role, processes in placed.items()}


ONE, BOTH = (1, 1, 1.0), ("actor", "rollout")
TABLE: list[tuple[str, int, int, Roles, list[tuple[str, ...]], dict[str, Any]]] = [
    ("a node each", 3, 1, {"actor": (2, 1, 1.0), "critic": ONE}, [], {"actor": [(0,), (1,)], "critic": [(2,)]}),
    ("declared order on a node", 1, 3, {"actor": ONE, "rollout": (2, 2, 1.0)}, [],
     {"actor": [(0,)], "rollout": [(1,), (2,)]}),
    ("per_node holds: two nodes of three", 3, 2, {"actor": (2, 1, 1.0)}, [], {"actor": [(0,), (2,)]}),
    ("per_node 2, the last node half full", 2, 2, {"actor": (3, 2, 1.0)}, [], {"actor": [(0,), (1,), (2,)]}),
    ("and another role in the gap", 2, 2, {"critic": ONE, "actor": (3, 2, 1.0)}, [],
     {"actor": [(0,), (1,), (3,)], "critic": [(2,)]}),
    ("collocated", 2, 2, {"actor": (2, 1, 1.0), "rollout": (2, 1, 1.0), "reward": (2, 1, 1.0)}, [BOTH],
     {"actor": [(0,), (2,)], "rollout": [(0,), (2,)], "reward": [(1,), (3,)]}),
    ("collocated, unequal totals", 2, 2, {"actor": (4, 2, 1.0), "rollout": (2, 2, 1.0)}, [BOTH],
     {"actor": [(0,), (1,), (2,), (3,)], "rollout": [(0,), (1,)]}),
    ("collocated, unequal shares", 1, 4, {"actor": (2, 2, 2.0), "rollout": (2, 2, 0.5)}, [BOTH],
     {"actor": [(0, 1), (2, 3)], "rollout": [(0,), (0,)]}),
    ("halves", 2, 1, {"actor": (4, 2, 0.5)}, [], {"actor": [(0,), (0,), (1,), (1,)]}),
    ("thirds", 1, 2, {"actor": (4, 4, 1 / 3)}, [], {"actor": [(0,), (0,), (0,), (1,)]}),
    ("halves of separate roles stay apart", 1, 2, {"actor": (1, 1, 0.5), "critic": (1, 1, 0.5)}, [],
     {"actor": [(0,)], "critic": [(1,)]}),
    ("several devices each", 2, 4, {"actor": (4, 2, 2.0)}, [], {"actor": [(0, 1), (2, 3), (4, 5), (6, 7)]}),
    ("separate roles on separate nodes", 2, 2, {"actor": (2, 2, 1.0), "rollout": (2, 2, 1.0)}, [],
     {"actor": [(0,), (1,)], "rollout": [(2,), (3,)]}),
    ("the freest nodes", 3, 2, {"actor": (3, 1, 1.0), "critic": ONE, "reward": ONE, "sim": ONE}, [],
     {"actor": [(0,), (2,), (4,)], "critic": [(1,)], "reward": [(3,)], "sim": [(5,)]}),
    ("large ones first", 2, 3, {"reward": ONE, "actor": (3, 3, 1.0), "critic": (2, 2, 1.0)}, [],
     {"reward": [(3,)], "actor": [(0,), (1,), (2,)], "critic": [(4,), (5,)]}),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "devices", "roles", "together", "slots"), [row[1:] for row in TABLE],
                         ids=[row[0] for row in TABLE])  # fmt: skip
def test_slots(nodes: int, devices: int, roles: Roles, together: list[tuple[str, ...]], slots: dict[str, Any]) -> None:
    assert place(nodes, devices, roles, *together) == slots


def test_separate_roles_never_share_a_slot_and_workers_stay_on_their_node() -> None:
    roles = {"actor": (5, 2, 1.0), "rollout": (6, 2, 0.5), "reward": (2, 1, 2.0), "critic": (3, 3, 0.25)}
    placed = place(3, 6, roles)
    used = [set(slot for slots in role for slot in slots) for role in placed.values()]
    assert sum(map(len, used)) == len(set.union(*used))
    for role, (_, per_node, _) in roles.items():
        nodes = [{slot // 6 for slot in slots} for slots in placed[role]]
        assert all(len(node) == 1 for node in nodes)
        assert all(nodes[rank] == nodes[rank - rank % per_node] for rank in range(len(nodes)))
        assert len(set().union(*nodes)) == -(-len(nodes) // per_node)


REFUSED: list[tuple[str, int, int, Roles, str]] = [
    ("a node is too small", 2, 2, {"actor": (3, 3, 1.0)},
     ".actor(...).per_node(3).share(1): needs 3 devices on a node, a node has 2."),
    ("a node is too small for the share", 1, 2, {"actor": (1, 1, 4.0)},
     ".actor(...).per_node(1).share(4): needs 4 devices on a node, a node has 2."),
    ("the job is too small", 2, 1, {"actor": (2, 1, 1.0), "sim": (1, 1, 0.5)},
     ".node_num(2).device_per_node(1): the job has 2 devices, its roles need 3 (actor 2, sim 1)."),
    ("enough devices, on the wrong nodes", 2, 2, {"actor": (2, 1, 1.0), "sim": (2, 2, 1.0)},
     ".actor(...): actor needs 1, 1 devices on 2 node(s); the other roles leave 0, 2 free, by node."),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "devices", "roles", "problem"), [row[1:] for row in REFUSED],
                         ids=[row[0] for row in REFUSED])  # fmt: skip
def test_no_room(nodes: int, devices: int, roles: Roles, problem: str) -> None:
    with pytest.raises(JobSpecError) as error:
        place(nodes, devices, roles)
    assert any(line.startswith(problem) for line in error.value.problems), error.value
