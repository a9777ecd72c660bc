"""A trained policy in the hands of a user: found by its run, one observation or many, chunks or single actions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlinf_lite
from rlinf_lite import ActionQueue
from rlinf_lite.models import CheckpointFormatError, MLPGaussianPolicy, Policy, load_policy

RNG = np.random.default_rng(0)
VLA = "assets/tabletop_vla"


def pictures(num: int) -> dict[str, Any]:
    images = {"top": RNG.integers(0, 256, (num, 64, 64, 3), dtype=np.uint8)}
    return {"images": images, "instruction": ["pick up the red block", "pick up the blue block"] * (num // 2)}


@pytest.fixture(scope="module")
def vla() -> Policy:
    return load_policy(VLA)


@pytest.fixture
def mlp() -> MLPGaussianPolicy:
    return MLPGaussianPolicy(3, [-2.0, 0.0], [2.0, 4.0], num_action_chunks=4)


@pytest.mark.parametrize("where", ["policy", "checkpoints/last/policy", "checkpoints/step_000040/policy"])
def test_a_policy_is_found_by_its_run(where: str, mlp: MLPGaussianPolicy, tmp_path: Path) -> None:
    mlp.save_pretrained(tmp_path / where)
    obs = {"state": RNG.standard_normal(3)}
    places = [tmp_path / where, (tmp_path / where).parent, *([tmp_path] if "step" not in where else [])]
    for place in places:
        assert (rlinf_lite.load_policy(place).act(obs) == mlp.act(obs)).all(), place
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointFormatError, match=r"is not a policy directory: it has no config\.json"):
        load_policy(tmp_path / "empty")
    with pytest.raises(CheckpointFormatError, match=r"nowhere: no such directory"):
        load_policy(tmp_path / "nowhere")


@pytest.mark.parametrize("path", [VLA, "assets/tabletop_flow"])
def test_one_observation_is_a_row_of_many(path: str) -> None:
    policy, obs = load_policy(path), pictures(2)
    obs["state"] = RNG.standard_normal((2, 4)).astype(np.float32)
    obs["noise_key"] = np.array([3, 4], np.uint64)
    many = policy.act(obs)
    assert many.shape == (2, policy.num_action_chunks, policy.action_dim) and many.dtype == np.float32
    assert (many == policy.predict_action_batch(obs, "greedy").actions.detach().numpy()).all()
    one = {name: value[1] for name, value in obs.items() if name != "images"} | {
        "images": {"top": obs["images"]["top"][1]}
    }
    np.testing.assert_allclose(policy.act(one), many[1], atol=1e-5)
    same_text = policy.act(obs | {"instruction": obs["instruction"][0]})
    np.testing.assert_allclose(same_text[0], many[0], atol=1e-5)


def test_samples_differ_and_a_key_repeats_them(mlp: MLPGaussianPolicy) -> None:
    obs: dict[str, Any] = {"state": np.zeros(3)}
    assert (mlp.act(obs, "sampled") != mlp.act(obs, "sampled")).any()
    obs["noise_key"] = np.uint64(7)
    assert (mlp.act(obs, "sampled") == mlp.act(obs, "sampled")).all()
    assert not mlp.training


def test_actions_one_by_one(mlp: MLPGaussianPolicy) -> None:
    states = RNG.standard_normal((6, 2, 3))
    queue = ActionQueue(mlp, num_actions=3)
    taken = [queue.act({"state": state}) for state in states]
    first, second = mlp.act({"state": states[0]}), mlp.act({"state": states[3]})
    assert (np.stack(taken, 1) == np.concatenate([first[:, :3], second[:, :3]], 1)).all()
    queue.act({"state": states[0]})
    with pytest.raises(ValueError, match=r"is \[2, 4, 2\], and this observation has no batch dimension\. Call reset"):
        queue.act({"state": states[0, 0]})
    queue.reset()
    assert (queue.act({"state": states[1, 0]}) == mlp.act({"state": states[1, 0]})[0]).all()
    with pytest.raises(ValueError, match="num_actions is 5, and a chunk of this policy has 4"):
        ActionQueue(mlp, 5)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"observation": 1}, "an observation has images, state, instruction; here is 'observation'"),
        ({"images": np.zeros((64, 64, 3), np.uint8)}, "images is no dict"),
        ({"images": {"top": np.zeros((64, 64, 3))}}, r"images\['top'\] is float64; pictures are uint8, 0 to 255"),
        (
            {"images": {"top": np.zeros((64, 64), np.uint8)}},
            r"images\['top'\] is \[64, 64\]; it must have 3 dimensions",
        ),
        ({"state": np.array([0.0, np.nan])}, "state has numbers that are not finite"),
        ({"state": np.zeros((1, 2))}, r"images\['top'\] without, state with"),
        ({"instruction": ["a"]}, r"images\['top'\] without, instruction with"),
        (
            {"images": {"top": np.zeros((1, 64, 64, 3), np.uint8)}, "instruction": ["a", "b"]},
            "rows of the observation differ: .* has 1, instruction has 2",
        ),
    ],
)
def test_observations_that_cannot_be_meant(vla: Policy, change: dict[str, Any], problem: str) -> None:
    obs = {"images": {"top": np.zeros((64, 64, 3), np.uint8)}, "instruction": "pick up the red block"}
    with pytest.raises(ValueError, match=problem):
        vla.act(obs | change)


def test_what_the_policy_reads_is_named_where_it_is_missing(mlp: MLPGaussianPolicy) -> None:
    with pytest.raises(ValueError, match="the policy reads 'state', and the observation has instruction"):
        mlp.act({"instruction": "pick"})
    with pytest.raises(ValueError, match="here is nothing"):
        mlp.act({})


def test_it_acts_in_its_environment(vla: Policy) -> None:
    """As the run's own evaluation does, where it succeeds in two thirds of the episodes."""
    cfg = rlinf_lite.load_config("tabletop_ppo_vla")
    env = rlinf_lite.make_vec_env(cfg.env, "eval", 32)
    obs, successes = env.reset(list(range(32))), list[bool]()
    while len(successes) < 32:
        result = env.chunk_step(vla.act(obs))
        obs = result.obs
        successes += [bool(episode.success_once) for episode in result.episodes]
    assert sum(successes) >= 14
