"""Nodes that share only a slow network: network namespaces of this machine, each with its own address, /dev/shm and
/tmp (tools/netns_cluster.py)."""

import json
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlinf_lite.config import load_config
from rlinf_lite.config.plan import observed, plan_of
from tests.runners.conftest import SMALL_PENDULUM, read_metrics
from tests.scheduler.training_ranks import UPDATES

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from netns_cluster import NetnsCluster, Network, missing

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.usefixtures("own_ray")]

APART = ["cluster.num_nodes=3", "cluster.component_placement={env: '0', rollout: '1:0-1', actor: '2'}"]
TABLETOP = [
    "env.train.num_envs=32",
    "env.train.ignore_terminations=true",
    "runner.max_steps=5",
    "runner.val_check_interval=0",
    "runner.save_interval=0",
    "cluster.num_gpus_per_node=1",
    "algorithm.critic_warmup_steps=0",
]
HYBRID = "cluster.component_placement={env: '0-1', rollout: '0-1', actor: '0'}"
LOSSES = ("train/actor/policy_loss", "train/critic/value_loss", "rollout/returns_mean")


@pytest.fixture(scope="module")
def machines():
    with NetnsCluster(3) as machines:
        yield machines


def metrics(root):
    """The metrics that the run below `root` has written so far."""
    found = list(root.glob("*/metrics.jsonl"))
    return [line for line in read_metrics(found[0].parent) if "time/step" in line] if found else []


def test_a_run_over_three_nodes_is_that_of_one_and_sends_what_was_predicted(machines, command_line):
    from rlinf_lite.preview.memory import estimate

    root = machines.shared / "apart"
    paths = [f"runner.logger.log_path={root}", f"actor.checkpoint_save_path={root}"]
    train = [sys.executable, "-m", "rlinf_lite.cli", "train", "tabletop_ppo_vla"]
    with machines.start(0, [*train, *TABLETOP, *APART, *paths], machines.environment) as process:
        counts = {}
        while process.poll() is None:
            if (step := len(metrics(root))) not in counts:
                counts[step] = Counter({(i, j): machines.sent_bytes[i][j] for i in range(3) for j in range(3)})
            time.sleep(0.02)
    assert process.returncode == 0

    here = machines.shared / "here"
    paths = [f"runner.logger.log_path={here}", f"actor.checkpoint_save_path={here}"]
    together = "cluster.component_placement={env: '0', rollout: '0', actor: '0'}"
    assert command_line(["train", "tabletop_ppo_vla", *TABLETOP, together, *paths]) == 0
    for own, reference in zip(metrics(root), metrics(here), strict=True):
        assert [own[name] for name in LOSSES] == [reference[name] for name in LOSSES]

    plan = plan_of(load_config("embodiment/tabletop_ppo_vla", [*TABLETOP, *APART]))
    found, seen, chunk = estimate(plan), observed(plan.config), plan.config.model.num_action_chunks
    obs_bytes = 4 * seen.state_dim + sum(3 * height * width for height, width in seen.cameras.values()) + 8
    ended = plan.num_chunks * chunk / 24  # episodes in a step: the last observation of each is sent, too
    policy, samples = found.models["policy"], 32 * plan.num_chunks
    predicted = {
        (0, 1): 32 * (plan.num_chunks + 1 + ended) * obs_bytes + samples * 7 * chunk,  # rewards and flags
        (1, 2): samples * found.sample_bytes,
        (2, 1): 4 * policy.trained + policy.buffer_bytes,  # once for both workers
    }
    for link, expected in predicted.items():
        assert (counts[4][link] - counts[1][link]) / 3 == pytest.approx(expected, rel=0.1), (link, predicted)
    actions = 4 * samples * chunk * seen.action_dim
    of_ray = 1_000 * plan.num_chunks + 5_000 * (plan.num_chunks + 1)  # of a message, and back for a large one
    assert (counts[4][1, 0] - counts[1][1, 0]) / 3 < 3 * (actions + of_ray)


def test_a_hybrid_run_goes_on_where_a_node_is_cut_off(monkeypatch, command_line):
    """It goes on on the spare node, with the same results as an undisturbed run on one machine."""
    for name, milliseconds in (("timeout", 2000), ("period", 1000)):  # otherwise Ray waits a minute for such a node
        monkeypatch.setenv(f"RAY_health_check_{name}_ms", str(milliseconds))
    steps = [*SMALL_PENDULUM, "runner.max_steps=10"]
    with NetnsCluster(3) as machines:
        root, here = machines.shared / "cut", machines.shared / "here"
        train = [sys.executable, "-m", "rlinf_lite.cli", "train", "gym_pendulum_ppo_mlp", *steps]
        placed = ["cluster.num_nodes=2", "cluster.num_gpus_per_node=1", HYBRID, f"runner.logger.log_path={root}"]
        with machines.start(0, [*train, *placed], machines.environment, stdout=subprocess.PIPE) as process:
            shown = []
            for line in process.stdout:
                shown.append(line)
                if line.startswith("step 4/"):
                    (used,) = (node for node in (1, 2) if runs_env_worker(machines, node))
                    machines.cut(used)
        assert process.returncode == 0, "".join(shown)
        assert runs_env_worker(machines, 3 - used) is False  # nothing remains on the spare node
        assert command_line(["train", "gym_pendulum_ppo_mlp", *steps, f"runner.logger.log_path={here}"]) == 0
        for own, reference in zip(metrics(root), metrics(here), strict=True):
            assert [own[name] for name in LOSSES] == [reference[name] for name in LOSSES]
        (events,) = root.glob("*/events.jsonl")
        failures = [event for event in map(json.loads, events.read_text().splitlines()) if event["event"] == "detected"]
        assert {event["kind"] for event in failures} == {"node_lost"}, failures


def runs_env_worker(machines, node):
    return machines.run(node, ["pgrep", "-f", "^ray::EnvWorker"], 30)[0] == 0


@pytest.mark.parametrize(("strategy", "ranks"), [("replicated", 2), ("fsdp", 2), ("fsdp", 4)])
def test_gradients_of_actors_on_two_nodes_take_what_was_predicted(strategy, ranks):
    """Four ranks: a node's two share the shards of a copy of the model (`actor.fsdp_size`)."""
    from rlinf_lite.preview.memory import estimate

    placed = "cluster.component_placement={env: '0', rollout: '0', actor: '0-1'}"
    settings = ["env.train.num_envs=12", placed, "cluster.num_nodes=2", "cluster.num_gpus_per_node=1"]
    settings += [f"actor.{key}={48 // UPDATES}" for key in ("global_batch_size", "micro_batch_size")]
    plan = plan_of(load_config("embodiment/tabletop_ppo_vla", [*settings, f"actor.strategy={strategy}"]))
    policy = estimate(plan).models["policy"]
    around = UPDATES * 8 * policy.trained
    if strategy == "fsdp" and ranks == 2:
        # of the one micro-batch of an update parameters for both passes (the root's stay between them), and gradients,
        # which gloo's reduce-scatter sends as an all-reduce, twice; then whole tensors, for rollout workers
        around = UPDATES * 4 * (2 * policy.parameters - policy.root + 2 * policy.trained) + 4 * policy.trained
    predicted = dict.fromkeys([(0, 1), (1, 0)], around / 2)

    with Network(2) as network:
        words = [sys.executable, "-m", "tests.scheduler.training_ranks"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        only = {"GLOO_SOCKET_IFNAME": "eth0"}
        more = [str(ranks), network.addresses[0], strategy, *(["2"] if ranks == 4 else [])]
        with ExitStack() as started:
            processes = [
                started.enter_context(
                    network.start(2 * rank // ranks, [*words, str(rank), *more], only, **(pipes if rank == 0 else {}))
                )
                for rank in range(ranks)
            ]
            first, counts = processes[0], []
            for word in ("ready", "done"):
                assert first.stdout.readline().strip() == word
                time.sleep(0.3)  # what was sent is on its way
                counts.append({link: network.sent_bytes[link[0]][link[1]] for link in predicted})
                first.stdin.write("go on\n")
                first.stdin.flush()
            assert [process.wait(60) for process in processes] == [0] * ranks
    for link in predicted:
        sent = counts[1][link] - counts[0][link]
        assert sent == pytest.approx(predicted[link], rel=0.1), (counts, predicted)
