"""A trained policy in the hands of a user: found by its run, one observation or many, chunks or single actions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import rlinf_lite
from rlinf_lite import ActionQueue
from rlinf_lite.checksums import CheckpointError
from rlinf_lite.envs import EnvSpec
from rlinf_lite.envs.observations import ObservationError
from rlinf_lite.models import CheckpointFormatError, GaussianPolicy, MLPGaussianPolicy, Policy, load_policy
from rlinf_lite.models.base import Mode, UnknownModeError
from rlinf_lite.runners.checkpoints import CheckpointStore

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
    with pytest.raises(
        CheckpointFormatError, match=r"is no policy, nor a checkpoint .* has no config\.json\. A run writes"
    ):
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

    backwards = {name: value[::-1] for name, value in obs.items() if name != "images"} | {
        "images": {"top": obs["images"]["top"][::-1]}
    }
    np.testing.assert_allclose(policy.act(backwards), many[::-1], atol=1e-5)
    flipped = obs["images"]["top"][:, ::-1]  # as the cameras of LIBERO are
    turned = obs | {"state": obs["state"][:, ::-1], "images": {"top": flipped}}
    copied = obs | {"state": turned["state"].copy(), "images": {"top": flipped.copy()}}
    assert (policy.act(turned) == policy.act(copied)).all()

    narrow = one | {"images": {"top": np.zeros((1, 400, 3), np.uint8)}}  # scaled, it has no row left
    assert policy.act(narrow).shape == many.shape[1:]
    none = obs | {"images": {"top": obs["images"]["top"][:0]}, "state": obs["state"][:0], "instruction": "pick"}
    nothing = policy.act(none | {"noise_key": obs["noise_key"][:0]})
    assert nothing.shape == (0, *many.shape[1:]) and nothing.dtype == np.float32


def test_samples_differ_and_a_key_repeats_them(mlp: MLPGaussianPolicy) -> None:
    obs: dict[str, Any] = {"state": np.zeros(3)}
    assert (mlp.act(obs, "sampled") != mlp.act(obs, "sampled")).any()
    obs["noise_key"] = np.uint64(7)
    assert (mlp.act(obs, "sampled") == mlp.act(obs, "sampled")).all()
    assert not mlp.training


def test_states_are_numbers_of_any_kind(mlp: MLPGaussianPolicy) -> None:
    expected = mlp.act({"state": np.array([1, 0, 2], np.float32)})
    for state in ([1, 0, 2], torch.tensor([1.0, 0.0, 2.0], requires_grad=True), np.array([2, 0, 1], np.float32)[::-1]):
        assert (mlp.act({"state": state}) == expected).all()
    assert mlp.act({"state": np.zeros((0, 3)), "images": {}}).shape == (0, 4, 2)


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
    for wrong in (5, 0, 2.5, True):
        with pytest.raises(ValueError, match=f"num_actions is {wrong}, and a chunk of this policy has 4. Take 1 to 4"):
            ActionQueue(mlp, wrong)


def test_rows_of_a_queue_begin_anew_by_themselves(mlp: MLPGaussianPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a queue of its own for each row does; the policy is asked for the rows that need a chunk alone."""
    act, asked = mlp.act, list[int]()

    def counted(obs: dict[str, Any], mode: Mode) -> Any:
        asked.append(np.size(obs["noise_key"]))
        return act(obs, mode)

    monkeypatch.setattr(mlp, "act", counted)
    many, each = ActionQueue(mlp, 3), [ActionQueue(mlp, 3) for _ in range(3)]
    begin: dict[int, Any] = {1: [2], 2: np.array([True, False, False]), 4: [], 6: np.arange(3)}
    many.reset([0])  # there is no chunk yet
    all_states = RNG.standard_normal((9, 3, 3))
    taken = []
    for step, states in enumerate(all_states):
        many.reset(begin.get(step, []))
        taken.append(many.act({"state": states, "images": {}, "noise_key": np.arange(3)}))
    assert asked == [3, 1, 1, 1, 1, 1, 3]
    for row, (queue, begins) in enumerate(zip(each, ([2, 6], [6], [1, 6]), strict=True)):
        for step, states in enumerate(all_states):
            if step in begins:
                queue.reset()
            alone = queue.act({"state": states[row], "noise_key": row})
            np.testing.assert_allclose(taken[step][row], alone, atol=1e-6)


@pytest.mark.parametrize(("mode", "hint"), [("Greedy", r"Did you mean greedy\?"), ("best", "Known: greedy, sampled, ")])
def test_modes_that_there_are_none_of(mode: Any, hint: str, mlp: MLPGaussianPolicy) -> None:
    with pytest.raises(UnknownModeError, match=f"there is no mode '{mode}'. {hint}"):
        mlp.act({"state": np.zeros(3)}, mode)
    with pytest.raises(UnknownModeError, match=f"there is no mode '{mode}'. {hint}"):
        ActionQueue(mlp, mode=mode)


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
        (
            {"images": {"top": np.zeros((3, 64, 64), np.uint8)}},
            r"is \[3, 64, 64\]; pictures are \[H, W, 3\], red first",
        ),
        (
            {"images": {"top": np.zeros((0, 64, 3), np.uint8)}},
            r"\['top'\] is \[0, 64, 3\]; sides of pictures are 1 to 8192 pixels",
        ),
        ({"images": {"top": np.zeros((1, 8193, 3), np.uint8)}}, r"is \[1, 8193, 3\]; sides of pictures are 1 to 8192"),
        ({"state": "left"}, "state is no array of numbers"),
        ({"state": ["1", "2"]}, "state is no array of numbers: it is <U1. Give float32"),
        ({"state": np.zeros(2) + 1j}, "state is no array of numbers: it is complex128. Give float32"),
        ({"instruction": 5}, "the instruction is 5. Give a text, or a list of a text per row"),
        ({"instruction": b"pick"}, "the instruction is b'pick'. Give a text"),
        ({"instruction": None}, "the instruction is None. Give a text"),
        ({"noise_key": 2.5}, r"noise_key is 2\.5; it is a whole number from 0 to 2\*\*64 - 1"),
        ({"noise_key": -1}, "noise_key is -1; it is"),
        ({"noise_key": 2**64}, "noise_key is 18446744073709551616; it is"),
        ({"noise_key": True}, "noise_key is True; it is"),
        ({"noise_key": [1, 2]}, "rows of the observation differ: .* noise_key has 2"),
        (
            {"images": {"top": np.zeros((2, 64, 64, 3), np.uint8)}, "instruction": ["a", None]},
            "the instruction of row 1 is None. Give a text",
        ),
        ({"images": {"wrist": np.zeros((64, 64, 3), np.uint8)}}, "looks through top, .* has images of wrist"),
        ({"images": {}}, "the policy looks through top, and the observation has no images"),
        ({"instruction": ["a"]}, r"images\['top'\] without, instruction with"),
        (
            {"images": {"top": np.zeros((1, 64, 64, 3), np.uint8)}, "instruction": ["a", "b"]},
            "rows of the observation differ: .* has 1, instruction has 2",
        ),
    ],
)
def test_observations_that_cannot_be_meant(vla: Policy, change: dict[str, Any], problem: str) -> None:
    obs = {"images": {"top": np.zeros((64, 64, 3), np.uint8)}, "instruction": "pick up the red block"}
    with pytest.raises(ObservationError, match=problem):
        vla.act(obs | change)


def test_what_the_policy_reads_is_named_where_it_is_missing(mlp: MLPGaussianPolicy) -> None:
    with pytest.raises(ValueError, match="the policy reads 'state', and the observation has instruction"):
        mlp.act({"instruction": "pick"})
    with pytest.raises(ValueError, match="here is nothing"):
        mlp.act({})
    with pytest.raises(ObservationError, match=r"the observation is a ndarray\. Give a dict of images, state"):
        mlp.act(np.zeros((64, 64, 3), np.uint8))
    with pytest.raises(ObservationError, match="state has 2 numbers, and the policy reads 3"):
        mlp.act({"state": [0.0, 1.0]})


def test_a_flow_names_what_it_reads_in_words_of_the_observation() -> None:
    flow, picture = load_policy("assets/tabletop_flow"), np.zeros((64, 64, 3), np.uint8)
    obs = {"images": {"top": picture}, "instruction": "pick up the red block", "state": np.zeros(4)}
    with pytest.raises(ObservationError, match="looks through top, and the observation has images of wrist"):
        flow.act(obs | {"images": {"wrist": picture}})
    with pytest.raises(ObservationError, match="state has 6 numbers, and the policy reads 4"):
        flow.act(obs | {"state": np.zeros(6)})
    assert flow.act(obs | {"images": {"top": picture, "other": picture}}).shape == (4, 3)


class Convolutions(GaussianPolicy):
    def build(self) -> None:
        self.actor = nn.Conv2d(3, self.num_outputs, 5, stride=3)
        self.critic = nn.Linear(1, self.num_values)

    def network(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        pixels = inputs["top"].permute(0, 3, 1, 2).float() / 255
        return self.actor(pixels).mean((2, 3)), self.critic(pixels.new_zeros(len(pixels), 1))


def test_pictures_of_any_size_are_scaled_to_that_of_the_policy(vla: Policy) -> None:
    """As PIL does, to the bit, for policies of one's own as for ours: this one would act otherwise on another size."""
    spec = EnvSpec(2, None, {"top": (48, 64)}, [-1.0] * 2, [1.0] * 2, 10, False)
    policy, camera = Convolutions(spec, {}), RNG.integers(0, 256, (480, 640, 3), dtype=np.uint8)
    small = np.array(Image.fromarray(camera).resize((64, 48), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(policy.inputs({"images": {"top": camera[None]}})["top"][0], small)
    acted = policy.act({"images": {"top": camera}})
    assert (acted == policy.act({"images": {"top": small}})).all()
    batch = np.stack([camera, camera[::-1]])
    assert (policy.act({"images": {"top": batch}})[0] == acted).all()
    with pytest.raises(ObservationError, match="looks through top, and the observation has images of wrist"):
        policy.act({"images": {"wrist": camera}})
    square = np.array(Image.fromarray(camera).resize((64, 64), Image.Resampling.BICUBIC))
    obs = {"instruction": "pick up the red block"}
    assert (vla.act(obs | {"images": {"top": camera}}) == vla.act(obs | {"images": {"top": square}})).all()


def test_a_damaged_checkpoint_does_not_act(
    mlp: MLPGaussianPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, 2)
    first, damaged = (store.write(step, lambda directory: mlp.save_pretrained(directory / "policy")) for step in (1, 2))
    load_policy(damaged)  # whole
    weights = damaged / "policy" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (tmp_path / "best").symlink_to(damaged / "policy")
    monkeypatch.chdir(damaged / "policy")
    for path in (tmp_path, damaged, damaged / "policy", tmp_path / "best", "."):
        with pytest.raises(CheckpointError, match=f"does not match its checksum: .* Take the one before it: {first}$"):
            load_policy(path)
    assert load_policy(first).act({"state": np.zeros(3)}).shape == (4, 2)


def test_it_acts_in_its_environment(vla: Policy) -> None:
    """As the run's own evaluation does, where it succeeds in two thirds of the episodes."""
    cfg = rlinf_lite.load_config("tabletop_ppo_vla")
    env = rlinf_lite.make_env(cfg.env, "eval", 32)
    obs, successes = env.reset(list(range(32))), list[bool]()
    while len(successes) < 32:
        result = env.chunk_step(vla.act(obs))
        obs = result.obs
        successes += [bool(episode.success_once) for episode in result.episodes]
    assert sum(successes) >= 14
