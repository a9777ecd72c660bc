"""The same seed gives the same results for any number of workers, ranks and stages.

Runs are compared with a run with one worker per role, up to rounding of sums. That run gives the same bits on both
runtimes (test_both_runtimes), so it runs on threads.
"""

import pytest
import torch
from safetensors.torch import load_file

from tests.runners.conftest import FUSED, SMALL_MATH, placed, read_metrics
from tests.runners.test_both_runtimes import RUNS, run
from tests.runners.test_flow_runs import SFT as SMALL_FLOW_SFT
from tests.runners.test_resume import ADAPTERS

ONE = ["cluster.component_placement={actor: '0', rollout: '0', env: '0'}", "rollout.pipeline_stage_num=1"]
SEVERAL = ["cluster.component_placement={actor: '0', rollout: 0-1, env: 0-1}", "rollout.pipeline_stage_num=2"]
TWO_ACTORS = ["cluster.component_placement={actor: 0-1, rollout: '0', env: 0-1}", "rollout.pipeline_stage_num=2"]
APART = ["cluster.component_placement={actor: 0-1, rollout: 0-1, env: 0-1}", "rollout.pipeline_stage_num=2"]
TWO_ROLLOUTS = ["cluster.component_placement={actor: 0-1, rollout: 0-1, env: '0'}", "actor.micro_batch_size=4"]
GROUPS = [
    "algorithm={adv_type: grpo, loss_type: ppo, group_size: 8, value_coef: 0, update_epochs: 2}",
    "env.train.auto_reset=false",
    "rollout.num_chunks=10",
    "actor.global_batch_size=20",
    "actor.micro_batch_size=10",
]
QUICK = ["runner.val_check_interval=-1"]
WHITENED = ["algorithm.adv_type=gae", "algorithm.normalize_advantages=true", placed(fuse=FUSED)]

LOSSES = ("train/actor/policy_loss", "train/critic/value_loss", "train/actor/approx_kl_k3", "rollout/returns_mean")
OF_GROUPS = ("train/actor/policy_loss", "train/actor/approx_kl_k3", "rollout/advantages_max")
KINDS = {
    "simulator": (RUNS["simulator"], ONE, 3, LOSSES),
    "groups": (RUNS["simulator"], [*ONE, *GROUPS], 3, OF_GROUPS),
    "flow": (RUNS["flow"], ONE, 2, LOSSES),
    "imitation": (RUNS["imitation"], [*ONE, "data.num_episodes=40"], 6, ("train/actor/sft_loss",)),
    "imitation by flows": (("tabletop_sft_flow", SMALL_FLOW_SFT), ONE, 2, ("train/actor/sft_loss",)),
    "language": (("math/math_arithmetic_grpo", SMALL_MATH), WHITENED, 2, ("train/critic/value_loss",)),
    "adapters": (RUNS["language"], ADAPTERS, 2, ("train/critic/value_loss",)),
}
"""A kind of run: its config, its settings with one worker per role, its steps, and the numbers that are compared."""
ROUNDING = {"imitation by flows": {"rel": 1e-4}}
"""Tolerance of the numbers, if it is not 1e-4."""
WEIGHTS = {"imitation": 1e-5, "language": 1e-4, "adapters": 1e-4}
"""Largest difference of a weight at the end, if weights are compared."""
ON_THREADS = [("simulator", SEVERAL), ("groups", SEVERAL), ("flow", SEVERAL)]
ON_RAY = [
    ("simulator", TWO_ACTORS),
    ("simulator", TWO_ROLLOUTS),
    ("groups", TWO_ACTORS),
    ("flow", [*APART, "actor.micro_batch_size=2"]),
    ("imitation", [TWO_ACTORS[0], "actor.micro_batch_size=16"]),
    ("imitation by flows", [*APART, "actor.micro_batch_size=2"]),
    ("language", [placed("0-1", rollout="1", num_slots=2), "actor.strategy=fsdp", "rollout.pipeline_stage_num=2"]),
    (
        "language",
        [
            placed("'0:0-1'", fuse=FUSED),
            "actor.strategy=replicated",
            "actor.max_tokens_per_micro_batch=4096",
        ],
    ),
    (
        "language",
        [
            placed("'0:0-1'", rollout="'0'"),
            "actor.strategy=tensor_parallel",
            "actor.tensor_model_parallel_size=2",
        ],
    ),
    ("adapters", [placed("0-1", rollout="1", num_slots=2), "actor.strategy=fsdp"]),
]
ROWS = [pytest.param("local", *row) for row in ON_THREADS]
ROWS += [
    pytest.param("ray", *row, marks=(pytest.mark.processes, *[pytest.mark.slow] * (number > 0)))
    for number, row in enumerate(ON_RAY)
]


@pytest.fixture(scope="module")
def references():
    return {}


@pytest.fixture
def reference(references, tmp_path):
    def reference(kind):
        if kind not in references:
            what, alone, steps, _ = KINDS[kind]
            references[kind] = run("local", what, steps, tmp_path / "reference", *alone, *QUICK)
        return references[kind]

    return reference


def weights(result):
    files = (result.checkpoint / "policy").rglob("*.safetensors")
    return {(file.name, name): tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("runtime", "kind", "place"), ROWS)
def test_numbers_do_not_depend_on_the_placement(reference, tmp_path, runtime, kind, place):
    what, alone, steps, names = KINDS[kind]
    expected = reference(kind)
    result = run(runtime, what, steps, tmp_path / "spread", *alone, *place, *QUICK)
    lines, others = ([line for line in read_metrics(one.run_dir) if "time/step" in line] for one in (result, expected))
    assert len(lines) == len(others) == steps
    for line, other in zip(lines, others, strict=True):
        wanted = pytest.approx([other[name] for name in names], **ROUNDING.get(kind, {"abs": 1e-4}))
        assert [line[name] for name in names] == wanted
        if kind == "flow":
            assert max(line["rollout/logprob_drift"], other["rollout/logprob_drift"]) < 1e-5
    if kind == "groups":
        assert others[0]["rollout/advantages_max"] > 0
    if kind in WEIGHTS:
        ours, theirs = weights(result), weights(expected)
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], atol=WEIGHTS[kind], rtol=0, msg=str(name))


def test_losses_depend_on_the_seed(reference, tmp_path):
    other = run("local", RUNS["simulator"], 1, tmp_path / "seed", *ONE, *QUICK, "runner.seed=1")
    lines = [read_metrics(result.run_dir)[0] for result in (other, reference("simulator"))]
    assert abs(lines[0]["train/critic/value_loss"] - lines[1]["train/critic/value_loss"]) > 1e-3


def test_the_first_pass_has_ratio_one(start):
    result = start("algorithm.update_epochs=1", "actor.global_batch_size=64", "runner.max_steps=2").run()
    for line in read_metrics(result.run_dir):
        assert line["train/actor/ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert line["train/actor/approx_kl_k3"] == pytest.approx(0.0, abs=1e-9)
