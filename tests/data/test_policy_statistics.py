"""Statistics that a policy takes of a folder: exact, of relative actions too, and nothing to divide by is 0."""

import numpy as np
import pytest

from rlinf_lite.data.demonstrations import DemonstrationError, Demonstrations, foreign_dimensions, policy_statistics
from rlinf_lite.data.lerobot.frames import Keys, decode
from rlinf_lite.data.lerobot.layout import ACTION, STATE, vector_feature
from rlinf_lite.data.lerobot.reader import LeRobotDataset
from rlinf_lite.data.lerobot.writer import Episode, PartWriter, begin, publish
from rlinf_lite.envs import EnvSpec

SPEC = EnvSpec(3, 4, {}, [-2.0, -2.0, -2.0], [2.0, 4.0, 2.0], 24, True)
CHUNK = 4


def written(directory, states, actions):
    """A dataset of these episodes; as chunks that begin at every frame."""
    features = {STATE: vector_feature("state", 4), ACTION: vector_feature("action", 3)}
    part = PartWriter(begin(directory) / "rank_000", features, 10)
    for number, (state, action) in enumerate(zip(states, actions, strict=True)):
        part.add(Episode(number, {STATE: state, ACTION: action}, ["push"] * len(state)))
    part.finish()
    publish(directory, 10, None)
    keys = Keys({}, STATE, ACTION)
    return Demonstrations(decode(LeRobotDataset(directory), keys, directory / ".frames"), CHUNK, 1)


def episodes(rng, lengths=(5, 9, 2)):
    states = [rng.normal(300, 40, size=(n, 4)).astype(np.float32) for n in lengths]
    actions = [rng.uniform(-0.2, 0.3, size=(n, 3)).astype(np.float32) for n in lengths]
    return states, actions


def assert_of(found, values):
    wanted = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
    wanted |= {f"q{q:02d}": np.quantile(values, q / 100, axis=0) for q in (1, 10, 50, 90, 99)}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


def test_they_are_those_of_all_frames_and_of_chunks_where_actions_are_relative(tmp_path):
    states, actions = episodes(np.random.default_rng(0))
    demos = written(tmp_path / "set", states, actions)
    absolute = policy_statistics(demos, SPEC)
    assert_of(absolute["state"], np.concatenate(states).astype(np.float64))
    assert_of(absolute["action"], np.concatenate(actions).astype(np.float64))

    relative = policy_statistics(demos, SPEC, num_relative=2)["action"]
    rows = [
        np.append(action[t + i, :2] - state[t, :2], action[t + i, 2:])
        for state, action in zip(states, actions, strict=True)
        for t in range(len(state))
        for i in range(CHUNK)
        if t + i < len(state)
    ]
    of_chunks, of_frames = np.array(rows, np.float64), np.concatenate(actions).astype(np.float64)
    for name, values in relative.items():
        np.testing.assert_allclose(values[2], absolute["action"][name][2])
    assert_of({name: x[:2] for name, x in relative.items()}, of_chunks[:, :2])
    assert relative["mean"][0] < -200 < of_frames.mean(0)[0]
    with pytest.raises(DemonstrationError, match=r"action\[4\] is relative to state\[4\]"):
        demos.relative_actions(4)


def test_what_never_moves_is_not_divided_by(tmp_path):
    states, actions = episodes(np.random.default_rng(1), lengths=(600, 600))
    for state, action in zip(states, actions, strict=True):
        state[:, 1], action[:, 1] = np.float32(0.1), np.float32(0.3)
        state[:, 2] = 0.0
        state[7, 2] = 1.0  # a gripper that closes once in 600 frames: q01 = q99 = 0
    found = policy_statistics(written(tmp_path / "set", states, actions), SPEC)
    state, action = found["state"], found["action"]
    one = {name: np.array(x)[1] for name, x in state.items()}
    still = np.float64(np.float32(0.1))
    assert one["mean"] == pytest.approx(still) and one["std"] == 1.0
    assert (one["q01"], one["q99"]) == pytest.approx((still - 1, still + 1))
    assert (action["min"][1], action["max"][1], action["mean"][1], action["std"][1]) == (-2.0, 4.0, 1.0, 3.0)
    assert (action["q01"][1], action["q99"][1]) == (-2.0, 4.0)
    assert (state["q01"][2], state["q99"][2]) == (0.0, 1.0) and 0.03 < state["std"][2] < 0.05
    for values in (state, action):
        for low, high in (("min", "max"), ("q01", "q99")):
            assert (np.array(values[low]) < np.array(values[high])).all()
        assert (np.array(values["std"]) > 0).all()
    assert_of({name: x[3:] for name, x in state.items()}, np.concatenate(states)[:, 3:].astype(np.float64))


def test_dimensions_that_a_trained_policy_does_not_know_are_named(tmp_path):
    states, actions = episodes(np.random.default_rng(2))
    found = policy_statistics(written(tmp_path / "set", states, actions), SPEC)
    own = {
        "state": ([200.0, -1.0, 100.0, -1e5], [400.0, 1.0, 500.0, 1e5]),
        "action": ([-0.3, -np.inf, -0.1], [0.3, np.inf, -0.1]),
    }
    lines = foreign_dimensions(found, own)
    assert [line.split(" ")[0] for line in lines] == ["action[2]", "state[1]", "state[3]"]
    assert "the policy's statistics say [-1, 1]" in lines[1]
    assert foreign_dimensions(found, {}) == []
