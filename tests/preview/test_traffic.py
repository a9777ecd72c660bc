"""What a step sends between nodes, against loops over single environments."""

from collections import Counter

import pytest

from rlinf_lite.config import load_config
from rlinf_lite.config.plan import plan_of
from rlinf_lite.preview.fake import Counts
from rlinf_lite.preview.memory import Estimate
from rlinf_lite.preview.traffic import traffic

SAMPLE_BYTES, TRAINED, BUFFER_BYTES = 1000, 5000, 12
FOUND = Estimate(models={"policy": Counts(TRAINED, TRAINED, {"float32": 4 * TRAINED}, BUFFER_BYTES, 0, 0)})
FOUND.sample_bytes = SAMPLE_BYTES
NUM_ENVS, DECISIONS, STATE_DIM, ACTION_DIM, LIMIT = 24, 16, 3, 1, 200  # of Pendulum


def sent(env, rollout, actor, strategy="fsdp", nodes=3, *more):
    """On nodes of two slots each."""
    settings = [
        f"cluster.num_nodes={nodes}",
        "cluster.num_gpus_per_node=2",
        "cluster.accelerator=cpu",
        f"cluster.component_placement={{env: '{env}', rollout: '{rollout}', actor: '{actor}'}}",
        f"env.train.num_envs={NUM_ENVS}",
        f"rollout.num_chunks={DECISIONS}",
        "actor.global_batch_size=96",
        "actor.micro_batch_size=24",
        f"actor.strategy={strategy}",
        *more,
    ]
    return traffic(plan_of(load_config("embodiment/gym_pendulum_ppo_mlp", settings)), FOUND)


@pytest.mark.parametrize(
    ("env", "rollout", "actor"),
    [("0-1", "2-3", "4-5"), ("0-3", "4", "5"), ("0", "1-3", "0"), ("0,2,4", "1,3,5", "0-3"), ("0-1", "0-1", "0-1")],
)
def test_every_environment_is_counted_where_it_goes(env, rollout, actor):
    def slots(line):
        parts = [part.split("-") for part in line.split(",")]
        return [slot for part in parts for slot in range(int(part[0]), int(part[-1]) + 1)]

    of = {name: slots(line) for name, line in {"env": env, "rollout": rollout, "actor": actor}.items()}
    expected = {kind: Counter() for kind in ("observations", "actions", "trajectories")}
    for number in range(NUM_ENVS):  # blocks of environments, in order, for each role
        worker = number // (NUM_ENVS // len(of["env"]))
        inside, stage_rows = number % (NUM_ENVS // len(of["env"])), NUM_ENVS // len(of["env"]) // 2
        row = worker * stage_rows + inside % stage_rows  # of all rows of its stage
        sizes = [NUM_ENVS // 2 // len(of["rollout"])] * len(of["rollout"])
        serving = next(rank for rank in range(len(sizes)) if row < sum(sizes[: rank + 1]))
        simulates, acts = of["env"][worker] // 2, of["rollout"][serving] // 2
        trains = of["actor"][number // (NUM_ENVS // len(of["actor"]))] // 2
        if simulates != acts:
            observed = (DECISIONS + 1 + DECISIONS / LIMIT) * (4 * STATE_DIM + 8)
            expected["observations"][simulates, acts] += observed + DECISIONS * 7
            expected["actions"][acts, simulates] += DECISIONS * 4 * ACTION_DIM
        if acts != trains:
            expected["trajectories"][acts, trains] += DECISIONS * SAMPLE_BYTES
    found = sent(env, rollout, actor)
    for kind, links in expected.items():
        assert found.links.get(kind, Counter()) == pytest.approx(links, rel=0.01), kind


def test_weights_go_once_to_a_node_without_an_actor():
    weights = 4 * TRAINED + BUFFER_BYTES
    assert sent("0", "2-5", "0").links["weights"] == {(0, 1): weights, (0, 2): weights}
    assert sent("0", "2:0-3", "0").links["weights"] == {(0, 1): weights}
    assert sent("0", "0-5", "1-2").links["weights"] == {(0, 2): weights}
    assert "weights" not in sent("0", "2-3", "2-3").links


def test_nodes_without_an_actor_are_served_by_all_nodes_that_have_some():
    weights = 4 * TRAINED + BUFFER_BYTES
    found = sent("0", "4:0-1,5-9", "0-3", nodes=5).links["weights"]
    assert found == {(0, 2): weights, (1, 3): weights, (0, 4): weights}


def test_gradients_go_around_the_actors():
    updates = 10 * NUM_ENVS * DECISIONS // 96
    one_way = updates * 2 * 4 * TRAINED
    two = sent("0", "0", "0,2", "replicated").links["gradients"]
    assert two == pytest.approx({(0, 1): one_way / 2, (1, 0): one_way / 2})
    four = sent("0", "0", "0-3", "replicated").links["gradients"]  # two of four edges are between nodes
    assert four == pytest.approx({(0, 1): one_way * 3 / 4, (1, 0): one_way * 3 / 4})
    # of each of two micro-batches parameters twice, gradients once; and what is sent to the rollout worker, gathered
    times = updates * 2 * 3 + 1
    sharded = sent("0", "0", "0,2", "fsdp").links["gradients"]
    assert sharded == pytest.approx({(0, 1): times * 4 * TRAINED / 2, (1, 0): times * 4 * TRAINED / 2})
    times += NUM_ENVS * DECISIONS // 2 // 24  # scored again, in micro-batches
    sharded = sent("0", "0", "0,2", "fsdp", 3, "algorithm.recompute_logprobs=true").links["gradients"]
    assert sharded == pytest.approx({(0, 1): times * 4 * TRAINED / 2, (1, 0): times * 4 * TRAINED / 2})


def test_one_node_sends_nothing():
    found = sent("0-1", "0-1", "0-1", nodes=1)
    assert not found.links and not found.messages and found.busiest() == 0


def test_what_is_not_known_is_an_error():
    config = load_config("embodiment/gym_pendulum_ppo_mlp", [])
    with pytest.raises(ValueError, match="known once it is built"):
        traffic(plan_of(config), Estimate())
