import subprocess
import sys

import pytest

from rlinf_lite.config import Config
from rlinf_lite.scheduler.errors import PlacementError
from rlinf_lite.scheduler.placement import (
    HybridComponentPlacement,
    ProcessPlacement,
    parse_placement,
    resolve_placements,
)

pytestmark = pytest.mark.usefixtures("own_ray")

GRAMMAR = [
    # spec, slots, the slots of each rank
    ("0", 1, [(0,)]),
    (0, 1, [(0,)]),
    ("all", 3, [(0,), (1,), (2,)]),
    ("0-3", 4, [(0,), (1,), (2,), (3,)]),
    ("4-7", 8, [(4,), (5,), (6,), (7,)]),
    ("0,2", 4, [(0,), (2,)]),
    ("0-1,3", 4, [(0,), (1,), (3,)]),
    (" 0 - 1 , 3 ", 4, [(0,), (1,), (3,)]),
    ("0:0", 1, [(0,)]),
    ("0:0-1", 1, [(0,), (0,)]),
    ("0-3:0", 4, [(0, 1, 2, 3)]),
    ("all:0-3", 2, [(0,), (0,), (1,), (1,)]),
    ("all:0", 4, [(0, 1, 2, 3)]),
    ("0-1:0-3", 2, [(0,), (0,), (1,), (1,)]),
    ("0-3:0-1", 4, [(0, 1), (2, 3)]),
    ("0-1:0-3,2-3:4-5", 4, [(0,), (0,), (1,), (1,), (2,), (3,)]),
    ("0:0-1,1-2:2,3", 4, [(0,), (0,), (1, 2), (3,)]),
    (
        "0-1:0-3,3-5,7-10:7-14",
        11,
        [(0,), (0,), (1,), (1,), (3,), (4,), (5,), *[(s,) for s in (7, 7, 8, 8, 9, 9, 10, 10)]],
    ),
    ("0-1:0-1,3:2", 4, [(0,), (1,), (3,)]),
    ("0:0-999", 1, [(0,)] * 1000),
]
REFUSALS = [
    # spec, slots, what the message says
    ("0:2", 1, "starts at rank 2, but the next rank is 0"),
    ("4-7", 2, "needs slots 4..7, this cluster has 0..1 (1 node x 2, accelerator=cpu)"),
    ("2", 2, "needs slot 2, this cluster has 0..1"),
    ("0-3:0-2", 4, "3 processes on 4 slots"),
    ("0-1:0-2", 2, "3 processes on 2 slots"),
    ("0-2:0-1", 3, "2 processes on 3 slots"),
    ("3-1", 4, "run backwards. Write 1-3"),
    ("0:3-1", 4, "ranks 3-1, which run backwards"),
    ("1,0", 4, "not in ascending order"),
    ("0-2,2-3", 4, "share slots"),
    ("0:0-1,0:2-3", 1, "share slots"),
    ("2-3,0-2", 4, "share slots"),
    ("0:1-2", 1, "starts at rank 1, but the next rank is 0"),
    ("0:0,1:2", 2, "starts at rank 2, but the next rank is 1"),
    ("0-1,2:0", 3, "starts at rank 0, but the next rank is 2"),
    ("x", 2, "`x`, which is not a placement"),
    ("0-", 2, "not a placement"),
    ("-1", 2, "not a placement"),
    ("0,,1", 2, "not a placement"),
    ("0:", 2, "not a placement"),
    ("0:1:2", 2, "not a placement"),
    ("0.5", 2, "not a placement"),
    ("all,0", 2, "share slots"),
    ("", 2, "not a placement"),
    (True, 2, "not a placement"),
    ("auto", 2, "slots are chosen in training runs"),
    ("0-999999999999", 2, "needs slots"),
]


@pytest.mark.parametrize(("spec", "num_slots", "expected"), GRAMMAR)
def test_grammar(spec: str, num_slots: int, expected: list[tuple[int, ...]]) -> None:
    assert parse_placement(spec, num_slots) == [ProcessPlacement(rank, slots) for rank, slots in enumerate(expected)]


@pytest.mark.parametrize(("spec", "num_slots", "message"), REFUSALS)
def test_refusals(spec: str, num_slots: int, message: str) -> None:
    with pytest.raises(PlacementError) as error:
        parse_placement(spec, num_slots, component="rollout")
    assert message in str(error.value)
    assert str(error.value).startswith(f"rollout: {spec}")
    assert isinstance(error.value, ValueError)


def test_out_of_range_says_what_to_set() -> None:
    with pytest.raises(PlacementError) as error:
        parse_placement("4-7", 2, component="rollout")
    assert str(error.value) == (
        "rollout: 4-7 needs slots 4..7, this cluster has 0..1 (1 node x 2, accelerator=cpu). "
        "Set cluster.num_gpus_per_node: 8 to run eight virtual slots on CPU."
    )


def test_out_of_range_on_gpus_does_not_speak_of_virtual_slots() -> None:
    with pytest.raises(PlacementError, match=r"\(2 nodes x 4, accelerator=cuda\)\. Use slots up to 7"):
        parse_placement("8", 8, component="actor", slots_per_node=4, accelerator="cuda")


def test_a_process_stays_on_one_node() -> None:
    assert len(parse_placement("0-7:0-3", 8, slots_per_node=4)) == 4
    with pytest.raises(PlacementError, match=r"rank 0 would own slots 0\.\.7, which lie on two nodes of 4 slots"):
        parse_placement("0-7:0", 8, slots_per_node=4)


def config(**cluster: object) -> Config:
    return Config.model_validate({"cluster": {"accelerator": "cpu", **cluster}})


def test_components_of_a_config() -> None:
    cfg = config(num_gpus_per_node=8, component_placement={"actor": "0-7", "env,reward": "0-3", "rollout": "4-7:0-1"})
    placements = resolve_placements(cfg.cluster, 8, "cpu")
    assert {name: len(processes) for name, processes in placements.items()} == {
        "actor": 8,
        "env": 4,
        "reward": 4,
        "rollout": 2,
    }
    assert [process.slots for process in placements["rollout"]] == [(4, 5), (6, 7)]


def test_node_groups_number_their_own_slots() -> None:
    cfg = config(
        num_nodes=4,
        num_gpus_per_node=2,
        component_placement={"actor": "0-1", "env": {"placement": "all:0-7", "node_group": "sim"}},
        node_groups=[{"label": "sim", "nodes": "1,3"}],
    )
    placements = resolve_placements(cfg.cluster, 2, "cpu")
    assert [process.slots[0] for process in placements["env"]] == [2, 2, 3, 3, 6, 6, 7, 7]


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (
            {"component_placement": {"env": {"placement": "0", "node_group": "sim"}}},
            "sim is not in cluster.node_groups",
        ),
        (
            {
                "component_placement": {"env": {"placement": "1", "node_group": "sim"}},
                "node_groups": [{"label": "sim", "nodes": 0}],
            },
            "node group sim has 0..0",
        ),
        (
            {
                "component_placement": {"env": {"placement": "0", "node_group": "sim"}},
                "node_groups": [{"label": "sim", "nodes": "2-3"}],
            },
            "needs node 3, this cluster has nodes 0..0",
        ),
        (
            {
                "num_nodes": 2,
                "component_placement": {"env": {"placement": "0", "node_group": "sim"}},
                "node_groups": [{"label": "sim", "nodes": 2}],  # the first that is not there
            },
            "needs node 2, this cluster has nodes 0..1",
        ),
        ({"component_placement": {"env": "0", "actor,env": "0"}}, "env is placed twice"),
        ({"component_placement": {"env,,actor": "0"}}, "empty name"),
        ({"component_placement": {"env": "auto"}}, "slots are chosen in training runs"),
    ],
)
def test_refusals_of_a_config(cluster: dict[str, object], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        HybridComponentPlacement(config(**cluster))


def test_strategy_and_map() -> None:
    placement = HybridComponentPlacement(
        config(num_gpus_per_node=2, component_placement={"actor": "0", "env": "1:0-1"})
    )
    assert placement.get_strategy("env").world_size == 2
    lines = placement.describe().splitlines()
    assert lines[0] == "slots 0..1 (1 node x 2, accelerator=cpu); cells are ranks"
    assert [line.split() for line in lines[1:]] == [
        ["slot", "node", "actor", "env"],
        ["0", "0", "0", "-"],
        ["1", "0", "-", "0-1"],
    ]
    with pytest.raises(PlacementError, match=r"critic has no line in cluster\.component_placement"):
        placement.get_strategy("critic")


def test_cuda_without_a_gpu_needs_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_lite.scheduler.placement.detect_num_gpus", lambda: 0)
    assert HybridComponentPlacement(config(accelerator="cuda", num_gpus_per_node=8)).shape.num_slots == 8
    with pytest.raises(PlacementError, match="this machine has no GPU"):
        HybridComponentPlacement(config(accelerator="cuda"))
    assert HybridComponentPlacement(config(accelerator="auto")).shape.describe().endswith("accelerator=cpu)")


def test_importing_placement_needs_neither_ray_nor_torch() -> None:
    code = (
        "import sys, rlinf_lite.scheduler\n"
        "from rlinf_lite.scheduler import parse_placement, HybridComponentPlacement, route, PlacementError\n"
        "assert not {'ray', 'torch', 'zmq'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
