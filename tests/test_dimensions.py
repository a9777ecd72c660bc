"""Names of dimensions: what counts as a name, and when columns change their order."""

from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlinf_lite.data import demonstrations
from rlinf_lite.data.lerobot.frames import Keys
from rlinf_lite.dimensions import counted, flat_names, order_of, write_names
from rlinf_lite.envs import ChunkedEnv, EnvContractError, get_env_spec
from rlinf_lite.envs.check import check_env
from rlinf_lite.envs.gymnasium.simulator import GymnasiumSimulator


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["x", "y"], ("x", "y")),
        ({"motors": ["x", "y"]}, ("x", "y")),
        ({"arm": ["x"], "hand": ["y"]}, ("x", "y")),
        ({"y": 1, "x": 0}, ("x", "y")),
        (["state"], None),
        (None, None),
        ([1, 2], None),
    ],
)
def test_names_are_read_as_lerobot_writes_them(given, names):
    assert flat_names(given, 2) == names


def test_names_that_only_count_say_nothing_unless_they_are_the_same_ones():
    assert counted(["motor_0", "motor_1"]) and counted(["q[1]", "q[2]"])
    assert not counted(["motor_1", "motor_0"]) and not counted(["x", "y"]) and not counted(["x_0", "y_1"])
    assert order_of(["x", "y"], ["motor_0", "motor_1"]) is order_of(["state_0", "state_1"], ["x", "y"]) is None
    assert order_of(["state_0", "state_1"], ["state_1", "state_0"]) == (1, 0)
    assert order_of(["x", "y", "z"], ["y", "z", "x"]) == (2, 0, 1)
    for found in (["x", "y", "g"], ["x", "y", "y"]):
        with pytest.raises(ValueError, match="not the same names"):
            order_of(["x", "y", "z"], found)


class _Dict(gymnasium.Env):
    """Numbers by key, which the space sorts; actions that it names."""

    observation_space = spaces.Dict({"y": spaces.Box(-1, 1, (1,)), "x": spaces.Box(-1, 1, (1,))})
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_names = ("left", "right")

    def reset(self, *, seed=None, options=None):
        return {key: np.zeros(1, np.float32) for key in "xy"}, {}


def spec_of(env):
    built = ChunkedEnv(GymnasiumSimulator([env], "own"), max_episode_steps=4)
    return get_env_spec(built, built.reset())


def test_an_environment_names_its_dimensions_by_attributes_or_keys():
    spec = spec_of(_Dict())
    assert (spec.state_names, spec.action_names) == (list(_Dict.observation_space.spaces), ["left", "right"])
    wrapped = gymnasium.wrappers.TransformReward(_Dict(), lambda reward: reward)
    wrapped.state_names = ["b", "a"]
    assert (spec_of(wrapped).state_names, spec_of(wrapped).action_names) == (["b", "a"], ["left", "right"])
    for wrong in (["a", "a"], ["a"], "ab", [1, 2]):
        wrapped.state_names = wrong
        with pytest.raises(EnvContractError, match="set it to 2 different texts"):
            spec_of(wrapped)
        assert [one for one in check_env(wrapped) if "set it to 2 different texts" in one], wrong
    assert spec_of(gymnasium.make("Pendulum-v1")).state_names is None


def test_names_that_occur_in_several_groups_begin_with_their_groups():
    left_first = flat_names({"left": ["elbow", "wrist"], "right": ["elbow", "wrist"]}, 4)
    right_first = flat_names({"right": ["elbow", "wrist"], "left": ["elbow", "wrist"]}, 4)
    assert order_of(left_first, right_first) == (2, 3, 0, 1)


@pytest.mark.parametrize("own", [None, ["joint_1", "joint_2"]])
@pytest.mark.parametrize("match", [True, False])
def test_where_an_environments_names_say_nothing_the_policys_count(own, match, tmp_path, monkeypatch):
    write_names(tmp_path, {"action": ["lift", "grip"]})
    monkeypatch.setattr(demonstrations, "start_dir", lambda cfg: tmp_path)
    monkeypatch.setattr(demonstrations, "keys_of", lambda cfg, seen: Keys({}, None, "action"))
    feature = SimpleNamespace(names=["grip", "lift"], width=2)
    dataset = SimpleNamespace(directory=tmp_path, info=SimpleNamespace(features={"action": feature}))
    cfg = SimpleNamespace(data=SimpleNamespace(keys=SimpleNamespace(match_names=match)))
    keys = demonstrations.matched_keys(cfg, dataset, SimpleNamespace(state_names=None, action_names=own))
    assert keys.order == ({"action": (1, 0)} if match else {})
    if match or own is None:
        assert keys.names == {"action": ["lift", "grip"]}
