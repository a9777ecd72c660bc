"""The gymnasium adapters, against gymnasium itself."""

from __future__ import annotations

import contextlib
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper

from rlinf_lite.config import EnvConfig
from rlinf_lite.envs import ChunkedEnv, EnvContractError, UnknownEnvError, env_seed, make_env
from rlinf_lite.envs.errors import EpisodeContractError
from rlinf_lite.envs.gymnasium.simulator import GymnasiumSimulator, VectorEnvSimulator, simulator_of_vector_env
from tests.envs.broken_envs import Good, SaysSuccessWhereItIs


def pendulum(**train: Any) -> EnvConfig:
    return EnvConfig.model_validate({"id": "gymnasium", "task": "Pendulum-v1", "train": train})


def test_pendulum_in_chunks_equals_single_steps() -> None:
    env = make_env(pendulum(), "train", 2)
    actions = np.random.default_rng(0).uniform(-3, 3, (2, 200, 1)).astype(np.float32)
    obs = env.reset(seeds=[5, 6])
    chunks = [env.chunk_step(actions[:, i : i + 4]) for i in range(0, 200, 4)]
    rewards = np.concatenate([chunk.rewards for chunk in chunks], 1)
    for row, seed in enumerate([5, 6]):
        plain = gymnasium.make("Pendulum-v1")
        state, _ = plain.reset(seed=seed)
        np.testing.assert_array_equal(obs["state"][row], state)
        for step in range(200):
            state, reward, _, truncated, _ = plain.step(np.clip(actions[row, step], -2, 2))
            assert rewards[row, step] == np.float32(reward)
            if step % 4 == 3 and step < 199:
                np.testing.assert_array_equal(chunks[step // 4].obs["state"][row], state)
        assert truncated and chunks[-1].truncated[row, -1] and chunks[-1].final_obs is not None
        np.testing.assert_array_equal(chunks[-1].final_obs[1]["state"][row], state)
    assert [record.success_once for record in chunks[-1].episodes] == [None, None]


def test_the_time_limit_of_the_config_comes_first() -> None:
    for limit, expected in ((None, 200), (250, 250), (50, 50)):
        env = make_env(pendulum(max_episode_steps=limit), "train", 1)
        env.reset()
        result = env.chunk_step(np.zeros((1, 300, 1), np.float32))
        assert env.max_episode_steps == expected and result.executed.sum() == expected


def test_pendulum_resumes_exactly() -> None:
    actions = np.random.default_rng(0).uniform(-2, 2, (3, 60, 1)).astype(np.float32)
    env = make_env(pendulum(max_episode_steps=25), "train", 3)
    env.reset(seeds=[env_seed(0, row) for row in range(3)])
    env.chunk_step(actions[:, :30])
    assert isinstance(env, ChunkedEnv)
    other = make_env(pendulum(max_episode_steps=25), "train", 3)
    assert isinstance(other, ChunkedEnv)
    other.load_state_dict(env.state_dict())
    expected, got = env.chunk_step(actions[:, 30:]), other.chunk_step(actions[:, 30:])
    np.testing.assert_array_equal(expected.rewards, got.rewards)
    np.testing.assert_array_equal(expected.obs["state"], got.obs["state"])
    assert expected.episodes == got.episodes


class Camera(gymnasium.Env[Any, Any]):
    """Observes pixels, numbers and text; reports success."""

    observation_space = gymnasium.spaces.Dict(
        {
            "top": gymnasium.spaces.Box(0, 255, (6, 8, 3), np.uint8),
            "robot": gymnasium.spaces.Dict({"arm": gymnasium.spaces.Box(-1, 1, (2, 2), np.float64)}),
            "gripper": gymnasium.spaces.Discrete(3),
            "task": gymnasium.spaces.Text(20),
        }
    )
    action_space = gymnasium.spaces.Box(-1, 1, (2, 3), np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.clock = 0
        self.observation_space.seed(seed)
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        assert action.shape == (2, 3) and action.dtype == np.float64
        self.clock += 1
        return self.observe(), 1, False, self.clock == 5, {"is_success": self.clock == 3}

    def observe(self) -> Any:
        pixels = self.np_random.integers(0, 255, (6, 8, 3), np.uint8)
        arm = np.full((2, 2), self.clock / 10)
        return {"top": pixels, "robot": {"arm": arm}, "gripper": 2, "task": "pick"}


def test_dict_observations_become_images_state_and_text() -> None:
    env = ChunkedEnv(GymnasiumSimulator([Camera(), Camera()], "camera"), max_episode_steps=10)
    obs = env.reset(seeds=[1, 2])
    assert obs["images"]["top"].shape == (2, 6, 8, 3) and obs["images"]["top"].dtype == np.uint8
    assert obs["state"].tolist() == [[0, 0, 1, 0, 0, 0, 0]] * 2 and obs["state"].dtype == np.float32
    assert obs["instruction"] == ["pick", "pick"]
    records = env.chunk_step(np.zeros((2, 8, 6), np.float32)).episodes
    assert [(one.length, one.success_once, one.success_at_end) for one in records] == [(5, True, False)] * 2


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_vector_envs_are_unwrapped(mode: AutoresetMode) -> None:
    vector = SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1")] * 2, autoreset_mode=mode)
    assert isinstance(simulator_of_vector_env(vector, "pendulum"), GymnasiumSimulator)


def test_batched_vector_env_equals_separate_envs() -> None:
    def batched(num_envs: int) -> ChunkedEnv:
        makers = [lambda: gymnasium.make("Pendulum-v1", max_episode_steps=-1)] * num_envs
        vector = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
        return ChunkedEnv(VectorEnvSimulator(vector, "Pendulum-v1"), max_episode_steps=7)

    separate, env = make_env(pendulum(max_episode_steps=7), "train", 3), batched(3)
    for one in (separate, env):
        one.reset(seeds=[1, 2, 3])
    for chunk in range(5):
        actions = np.random.default_rng(chunk).uniform(-2, 2, (3, 3, 1)).astype(np.float32)
        expected, got = separate.chunk_step(actions), env.chunk_step(actions)
        np.testing.assert_array_equal(expected.rewards, got.rewards)
        np.testing.assert_array_equal(expected.obs["state"], got.obs["state"])
        assert expected.episodes == got.episodes
    env.reset(env_ids=[1])
    other = batched(3)  # rows of different lengths are replayed together
    resumed = other.load_state_dict(env.state_dict())
    actions = np.random.default_rng(9).uniform(-2, 2, (3, 3, 1)).astype(np.float32)
    assert resumed["state"].shape == (3, 3)
    np.testing.assert_array_equal(env.chunk_step(actions).rewards, other.chunk_step(actions).rewards)


class Scaled(SyncVectorEnv):
    """A class of one's own may change what its environments say."""

    def step(self, actions: Any) -> Any:
        obs, rewards, *others = super().step(actions)
        return obs + 100, 7 * rewards, *others


def test_a_vector_env_of_ones_own_steps_by_itself() -> None:
    makes = [lambda: gymnasium.make("Pendulum-v1", max_episode_steps=-1)] * 2
    bare = SyncVectorEnv(makes, autoreset_mode=AutoresetMode.DISABLED)
    simulator = simulator_of_vector_env(Scaled(makes, autoreset_mode=AutoresetMode.DISABLED), "pendulum")
    env = ChunkedEnv(simulator, max_episode_steps=5)
    env.reset(seeds=[1, 2])
    bare.reset(seed=[1, 2])
    result = env.chunk_step(np.zeros((2, 1, 1), np.float32))
    obs, rewards, *_ = bare.step(np.zeros((2, 1), np.float32))
    np.testing.assert_array_equal(result.obs["state"], obs + 100)
    np.testing.assert_array_equal(result.rewards[:, 0], (7 * rewards).astype(np.float32))


class Told(SyncVectorEnv):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.seeds = seed
        return super().reset(seed=seed, options=options)


def test_rows_that_play_on_are_given_no_seed() -> None:
    told = Told([lambda: gymnasium.make("Pendulum-v1")] * 2, autoreset_mode=AutoresetMode.DISABLED)
    env = ChunkedEnv(simulator_of_vector_env(told, "pendulum"), max_episode_steps=5)
    env.reset(seeds=[1, 2])
    assert None not in told.seeds
    env.reset(seeds=[5], env_ids=[1])
    assert told.seeds[0] is None and told.seeds[1] is not None


class Deaf(SyncVectorEnv):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset(seed=seed)


class DeafLater(SyncVectorEnv):
    resets = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.resets += 1
        return super().reset(seed=seed, options=options if self.resets < 4 else None)


@pytest.mark.parametrize("kind", [Told, Deaf, DeafLater])
def test_a_vector_env_that_resets_rows_that_play_on_is_refused(kind: Any) -> None:
    vector = kind([lambda: gymnasium.make("Pendulum-v1")] * 2, autoreset_mode=AutoresetMode.DISABLED)
    env = ChunkedEnv(simulator_of_vector_env(vector, "pendulum"), max_episode_steps=9)
    env.reset(seeds=[1, 2])
    refused = pytest.raises(EpisodeContractError, match=r"row 0, step \d+ of .* a reset of other rows returned another")
    with contextlib.nullcontext() if kind is Told else refused:
        for _ in range(4):
            env.chunk_step(np.ones((2, 2, 1), np.float32))
            env.reset(env_ids=[1])


def test_one_environment_for_all_rows_is_refused() -> None:
    pendulum = gymnasium.make("Pendulum-v1")
    with pytest.raises(EnvContractError, match="the same environment for several rows"):
        GymnasiumSimulator([pendulum, gymnasium.wrappers.RescaleAction(pendulum, -1.0, 1.0)], "pendulum")


def test_a_vector_env_that_resets_itself_is_refused() -> None:
    vector = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point")
    with pytest.raises(EnvContractError, match=r"AutoresetMode\.DISABLED"):
        simulator_of_vector_env(vector, "cartpole")


def test_unusable_action_spaces_are_refused() -> None:
    with pytest.raises(EnvContractError, match="policies here act in a continuous Box"):
        make_env(EnvConfig(id="gymnasium", task="CartPole-v1"), "train", 1)
    unbounded = gymnasium.make("Pendulum-v1")
    unbounded.action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    with pytest.raises(EnvContractError, match=r"dimensions \[0\] have no finite bounds"):
        GymnasiumSimulator([unbounded], "pendulum")


class Says(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, said: Any) -> None:
        super().__init__(Good())
        self.instruction = said


class SaysToAll(Told):
    def __init__(self, said: Any) -> None:
        super().__init__([Good] * 2, autoreset_mode=AutoresetMode.DISABLED)
        self.instruction = said

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.instruction = "rest" if options and self.instruction else self.instruction
        return super().reset(seed=seed, options=options)


def test_an_instruction_is_an_attribute_of_environment_wrapper_or_batch() -> None:
    def played(simulator: Any) -> list[Any]:
        env = ChunkedEnv(simulator, max_episode_steps=9)
        return [env.reset(seeds=[1, 2])["instruction"], env.reset(env_ids=[1])["instruction"]]

    says = [gymnasium.wrappers.TimeLimit(Says("push"), 99), Says(None)]
    assert played(GymnasiumSimulator(says, "t")) == [["push", ""]] * 2
    inner = Told([lambda: Says("pull")] * 2, autoreset_mode=AutoresetMode.DISABLED)
    assert played(VectorEnvSimulator(inner, "t")) == [["pull", "pull"]] * 2
    for said, first in (("go", ["go", "go"]), (["go", "come"], ["go", "come"])):
        vector = VectorWrapper(SaysToAll(said))
        assert played(VectorEnvSimulator(vector, "t")) == [first, [first[0], "rest"]]
    with pytest.raises(EnvContractError, match=r"instruction is \['go'\]; set it to a str\."):
        played(GymnasiumSimulator([Says("go"), Says(["go"])], "t"))
    for wrong in (3, ["go"], ["go", None]):
        with pytest.raises(EnvContractError, match="set it to a str, or to a list of 2 of them"):
            played(VectorEnvSimulator(SaysToAll(wrong), "t"))


class Strict(Good):
    """Its bounds are within those of float32."""

    action_space = gymnasium.spaces.Box(-0.1, 0.1, (2,), np.float64)

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        return super().step(action)


def test_actions_are_of_the_action_space_whatever_its_precision() -> None:
    vector = SyncVectorEnv([Strict] * 2, autoreset_mode=AutoresetMode.DISABLED)
    for simulator in (GymnasiumSimulator([Strict(), Strict()], "strict"), VectorEnvSimulator(vector, "strict")):
        env = ChunkedEnv(simulator, max_episode_steps=9)
        env.reset()
        for bound in (env.action_low, env.action_high):
            env.chunk_step(np.full((2, 1, 2), bound))


def test_a_task_may_name_the_module_that_registers_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = "gymnasium.envs.classic_control:PendulumEnv"
    text = f"import gymnasium\ngymnasium.register('Their/Task-v0', '{entry}', max_episode_steps=7)\n"
    (tmp_path / "their_tasks.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    env = make_env(EnvConfig(id="gymnasium", task="their_tasks:Their/Task-v0"), "train", 2)
    assert env.max_episode_steps == 7
    with pytest.raises(UnknownEnvError, match="no_such_tasks cannot be imported"):
        make_env(EnvConfig(id="gymnasium", task="no_such_tasks:Task-v0"), "train", 1)


def test_an_unknown_task_gets_the_nearest_name() -> None:
    with pytest.raises(UnknownEnvError, match="Did you mean Pendulum-v1"):
        make_env(EnvConfig(id="gymnasium", task="Pendulm-v1"), "train", 1)


def mountain_car(**eval_rules: Any) -> ChunkedEnv:
    task = {"id": "gymnasium", "task": "MountainCarContinuous-v0", "eval": eval_rules}
    env = make_env(EnvConfig.model_validate(task), "eval", 2)
    assert isinstance(env, ChunkedEnv)
    return env


def pump(states: Any) -> Any:
    """Swing up the hill: full force in the direction of movement."""
    return np.where(states[:, 1:] < 0, -1.0, 1.0).astype(np.float32)


@pytest.mark.parametrize("num_steps", [1, 7])
def test_an_evaluation_ends_where_the_task_does(num_steps: int) -> None:
    """Past its end MountainCarContinuous would pay 100 at every step: a return of 91,800."""
    env = mountain_car()
    obs, records = env.reset(seeds=[5, 6]), []
    for _ in range(-(-env.max_episode_steps // num_steps)):
        result = env.chunk_step(np.repeat(pump(obs["state"])[:, None], num_steps, 1))
        obs, records = result.obs, records + result.episodes
    assert len(records) == 2
    for record, seed in zip(sorted(records, key=lambda record: record.env_id), (5, 6), strict=True):
        plain = gymnasium.make("MountainCarContinuous-v0")
        state, _ = plain.reset(seed=seed)
        total, length, over = 0.0, 0, False
        while not over:
            if length % num_steps == 0:
                action = pump(state[None])[0]
            state, reward, terminated, truncated, _ = plain.step(action)
            total, length, over = total + float(reward), length + 1, terminated or truncated
        assert terminated and 80 < total < 100
        assert (record.length, record.success_once) == (length, None)
        assert record.return_ == pytest.approx(total, rel=1e-5)


def test_an_evaluation_may_be_told_to_play_on() -> None:
    env = mountain_car(ignore_terminations=True)
    obs, records = env.reset(seeds=[5, 6]), []
    while not records:
        result = env.chunk_step(pump(obs["state"])[:, None])
        obs, records = result.obs, result.episodes
    assert [record.length for record in records] == [999, 999]


def test_success_said_only_where_it_is_means_none_elsewhere() -> None:
    def make() -> ChunkedEnv:
        simulator = GymnasiumSimulator([Good(), SaysSuccessWhereItIs()], "points", max_episode_steps=5)
        return ChunkedEnv(simulator, max_episode_steps=5)

    env = make()
    env.reset(seeds=[1, 2])
    silent, told = env.chunk_step(np.zeros((2, 5, 2), np.float32)).episodes
    assert (silent.success_once, silent.success_at_end) == (None, None)  # nobody has said anything yet
    assert (told.success_once, told.success_at_end) == (True, False)
    again = make()
    again.load_state_dict(env.state_dict())
    for one in (env, again):  # known from then on, through a resume too
        silent, told = one.chunk_step(np.zeros((2, 5, 2), np.float32)).episodes
        assert (silent.success_once, silent.success_at_end) == (False, False)
        assert (told.success_once, told.success_at_end) == (True, False)
