"""What an environment may say in a step, and what is made of it: the table of the gymnasium adapter's door.

Every row is played by a `gymnasium.Env` per row and, where a batch can say it, by a `VectorEnv`. Two environments of
eight steps; what the table says is said by the second one, in its third step. The first one says what is usual.
"""

from __future__ import annotations

import math
import re
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorEnv

from rlinf_lite.envs import ChunkedEnv, ChunkResult, EnvContractError, EpisodeRecord, NonFiniteError
from rlinf_lite.envs.check import check_episodes
from rlinf_lite.envs.errors import EpisodeContractError
from rlinf_lite.envs.gymnasium.simulator import GymnasiumSimulator, simulator_of_vector_env
from rlinf_lite.envs.simulator import StepOutputs
from rlinf_lite.workers.env import _Stage

STEPS, AT = 8, 3
BOX = gymnasium.spaces.Box(-10, 10, (2,), np.float32)
ACTION = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
WHERE = r"^row 1, step 3 of the episode with seed \d+: "


class Says(gymnasium.Env[Any, Any]):
    """`what`: what it says in its third step in place of what is usual."""

    observation_space, action_space = BOX, ACTION

    def __init__(self, what: dict[str, Any]) -> None:
        self.what = what

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.clock = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.clock += 1
        said = {"reward": 1.0, "terminated": False, "truncated": False, "info": {"success": False}}
        said |= self.what if self.clock == AT else {}
        obs = np.full(2, self.clock, np.float32)
        return obs, said["reward"], said["terminated"], said["truncated"], said["info"]


class SaysInABatch(VectorEnv[Any, Any, Any]):
    """The same of two rows. `dtype`: of the array that a value of `what` is put into."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}
    single_observation_space, single_action_space, num_envs = BOX, ACTION, 2

    def __init__(self, what: dict[str, Any], dtype: str) -> None:
        self.what, self.dtype, self.clocks = what, dtype, np.zeros(2, np.int64)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = np.ones(2, np.bool_) if options is None else options["reset_mask"]
        self.clocks = np.where(mask, 0, self.clocks)
        return self.observe(), {}

    def observe(self) -> Any:
        return np.repeat(self.clocks.astype(np.float32)[:, None], 2, axis=1)

    def step(self, actions: Any) -> Any:
        self.clocks = self.clocks + 1
        said: dict[str, Any] = {
            "reward": np.ones(2),
            "terminated": np.zeros(2, np.bool_),
            "truncated": np.zeros(2, np.bool_),
            "success": np.zeros(2, np.bool_),
        }
        what = {**self.what, **self.what.get("info", {})} if self.clocks[1] == AT else {}
        for name, value in what.items():
            if name in said:
                usual = np.asarray(said[name].tolist(), self.dtype)
                usual[1] = value
                said[name] = usual
        return self.observe(), said["reward"], said["terminated"], said["truncated"], {"success": said["success"]}


def play(env: ChunkedEnv) -> EpisodeRecord:
    """The second row's first episode, in chunks of four."""
    env.reset(seeds=[1, 2])
    for _ in range(2):
        for record in env.chunk_step(np.zeros((2, 4, 1), np.float32)).episodes:
            if record.env_id == 1:
                return record
    raise AssertionError("no episode ended")


def played(what: dict[str, Any], dtype: str | None) -> EpisodeRecord:
    """By a `gymnasium.Env` per row, or by a batch whose values are of `dtype`."""
    simulator: Any
    if dtype is None:
        simulator = GymnasiumSimulator([Says({}), Says(what)], "says")
    else:
        simulator = simulator_of_vector_env(SaysInABatch(what, dtype), "says")
    return play(ChunkedEnv(simulator, max_episode_steps=STEPS))


def info(success: Any) -> dict[str, Any]:
    return {"info": {"success": success}}


TAKEN = [  # what is said, in arrays of which types, and what the episode's record has: success, return, length
    (info(True), (None, "bool", "object"), (True, 8.0, 8)),
    (info(np.True_), (None,), (True, 8.0, 8)),
    (info(1), (None, "int8", "int64", "object"), (True, 8.0, 8)),
    (info(1.0), (None, "float32", "float64"), (True, 8.0, 8)),
    (info(np.array([True])), (None,), (True, 8.0, 8)),
    (info(torch.tensor(True)), (None,), (True, 8.0, 8)),
    (info(0), (None, "int8", "float32", "object"), (False, 8.0, 8)),
    (info(-0.0), (None, "float32"), (False, 8.0, 8)),
    ({"info": {}}, (None,), (False, 8.0, 8)),  # as another step of the episode has said False
    ({"info": {"is_success": True}}, (None,), (True, 8.0, 8)),
    ({"reward": 2}, (None, "int8", "int64", "object"), (False, 9.0, 8)),
    ({"reward": 0.1}, ("float64",), (False, 7.0 + float(np.float32(0.1)), 8)),
    ({"reward": True}, (None, "bool"), (False, 8.0, 8)),
    ({"reward": np.array([[2.0]])}, (None,), (False, 9.0, 8)),
    ({"reward": torch.tensor(2.0)}, (None,), (False, 9.0, 8)),
    ({"terminated": True}, (None, "bool", "object"), (False, 3.0, 3)),
    ({"terminated": 1}, (None, "int8", "float32"), (False, 3.0, 3)),
    ({"truncated": np.array([1])}, (None,), (False, 3.0, 3)),
]

REFUSED = [  # what is said, in arrays of which types, the error and its words
    (info(math.nan), (None, "float32", "object"), EpisodeContractError, r"info\['success'\] is nan; return True"),
    (info(-1), (None, "int8", "object"), EpisodeContractError, r"info\['success'\] is -1; return True or False"),
    (info(0.5), (None, "float32"), EpisodeContractError, r"info\['success'\] is 0.5; return True or False"),
    (info(2), (None, "int8"), EpisodeContractError, r"info\['success'\] is 2; return True or False"),
    (info(None), (None, "object"), EpisodeContractError, r"info\['success'\] is None; return True or False"),
    (info("no"), (None, "object"), EpisodeContractError, r"info\['success'\] is 'no'; return True or False"),
    (info([True, False]), (None,), EpisodeContractError, r"info\['success'\] is \[True, False\]; return True"),
    ({"reward": math.nan}, (None, "float64", "object"), NonFiniteError, "the reward is nan: look for"),
    ({"reward": math.inf}, (None, "float32"), NonFiniteError, "the reward is inf: look for"),
    ({"reward": 1e300}, (None, "float64"), EpisodeContractError, r"reward is 1e\+300, which does not fit float32"),
    ({"reward": 10**400}, (None, "object"), EpisodeContractError, "reward is 1000.*, which does not fit float32"),
    ({"reward": None}, (None, "object"), EpisodeContractError, "reward is None; return one number per step"),
    ({"reward": "1.0"}, (None, "object"), EpisodeContractError, "reward is '1.0'; return one number per step"),
    ({"reward": np.ones(2)}, (None,), EpisodeContractError, r"reward is array\(\[1., 1.\]\); return one number"),
    ({"terminated": math.nan}, (None, "float32"), EpisodeContractError, "terminated is nan; return True or False"),
    ({"terminated": 2}, (None, "int8"), EpisodeContractError, "terminated is 2; return True or False"),
    ({"terminated": "False"}, (None, "object"), EpisodeContractError, "terminated is 'False'; return True or False"),
    ({"terminated": None}, (None, "object"), EpisodeContractError, "terminated is None; return True or False"),
    ({"truncated": 0.5}, (None, "float64"), EpisodeContractError, "truncated is 0.5; return True or False"),
]


def by_door(table: list[Any]) -> list[Any]:
    return [
        pytest.param(what, dtype, *rest, id=f"{what}, {dtype or 'one per row'}")
        for what, dtypes, *rest in table
        for dtype in dtypes
    ]


@pytest.mark.parametrize(("what", "dtype", "expected"), by_door(TAKEN))
def test_taken(what: dict[str, Any], dtype: str | None, expected: tuple[bool, float, int]) -> None:
    record = played(what, dtype)
    assert (record.success_once, record.return_, record.length) == expected


@pytest.mark.parametrize(("what", "dtype", "kind", "words"), by_door(REFUSED))
def test_refused(what: dict[str, Any], dtype: str | None, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=WHERE + words):
        played(what, dtype)


def test_a_batch_has_a_value_for_each_environment() -> None:
    for name in ("reward", "terminated", "truncated"):
        for value in (np.zeros(()), np.zeros((2, 1)), np.zeros(3)):
            env = SaysInABatch({}, "bool")
            usual = env.step

            def step(actions: Any, usual: Any = usual, value: Any = value, name: str = name) -> Any:
                obs, *rest, found = usual(actions)
                rest[("reward", "terminated", "truncated").index(name)] = value
                return obs, *rest, found

            env.step = step
            with pytest.raises(EnvContractError, match=rf"step returned {name} of shape .*return one value per"):
                play(ChunkedEnv(simulator_of_vector_env(env, "says"), max_episode_steps=STEPS))


def test_what_rows_that_have_ended_say_is_not_looked_at() -> None:
    """A batch is stepped whole, its ended rows in vain."""

    class Broken(SaysInABatch):
        def step(self, actions: Any) -> Any:
            obs, reward, terminated, truncated, found = super().step(actions)
            truncated = np.array([True, False]) if self.clocks[1] == 1 else truncated
            if self.clocks[1] > 1:
                reward[0], found["success"] = np.nan, np.array([np.nan, 0.0])
            return obs, reward, terminated, truncated, found

    env = ChunkedEnv(simulator_of_vector_env(Broken({}, "bool"), "says"), max_episode_steps=STEPS, auto_reset=False)
    assert play(env).return_ == 8.0


class OneBuffer(Says):
    """Its observations are in one array, which it writes again in each step; `buffer`: of how many environments."""

    def __init__(self, buffer: np.ndarray) -> None:
        super().__init__({})
        self.buffer = buffer

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.position = float(np.random.default_rng(seed).integers(5))
        self.buffer[:] = self.position
        return self.buffer, {}

    def step(self, action: Any) -> Any:
        _, *rest = super().step(action)
        self.position += 1
        self.buffer[:] = self.position
        return self.buffer, *rest


class Copies(OneBuffer):
    def reset(self, **arguments: Any) -> Any:
        obs, found = super().reset(**arguments)
        return obs.copy(), found

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return obs.copy(), *rest


def test_environments_that_write_into_their_last_observation_show_what_copies_show() -> None:
    one = np.zeros(2, np.float32)
    kinds = {
        "copies": [Copies(np.zeros(2, np.float32)) for _ in range(2)],
        "a buffer each": [OneBuffer(np.zeros(2, np.float32)) for _ in range(2)],
        "one for both": [OneBuffer(one) for _ in range(2)],
    }
    shown: dict[str, list[Any]] = {}
    for name, envs in kinds.items():
        env = ChunkedEnv(GymnasiumSimulator(envs, name), max_episode_steps=5)
        obs = [env.reset(seeds=[3, 4])["state"].copy()]
        for _ in range(3):
            result = env.chunk_step(np.zeros((2, 2, 1), np.float32))
            obs += [result.obs["state"].copy(), *([] if result.final_obs is None else [result.final_obs[1]["state"]])]
        shown[name] = [part.tolist() for part in obs]
    assert shown["a buffer each"] == shown["copies"] == shown["one for both"]


class OneBatch(SaysInABatch):
    """Its observations, rewards and flags are in the same arrays in each step."""

    def __init__(self, copies: bool) -> None:
        super().__init__({}, "bool")
        self.copies, self.buffers = copies, [np.zeros((2, 2), np.float32), np.ones(2), *np.zeros((2, 2), np.bool_)]

    def reset(self, **arguments: Any) -> Any:
        return self.written(super().reset(**arguments)[0])[0], {}

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, truncated, found = super().step(actions)
        return *self.written(obs, reward * self.clocks, terminated, truncated), found

    def written(self, *values: Any) -> list[Any]:
        for buffer, value in zip(self.buffers, values, strict=False):
            buffer[:] = value
        return [buffer.copy() if self.copies else buffer for buffer in self.buffers[: len(values)]]


def test_a_batch_that_writes_into_its_last_arrays_shows_what_copies_show() -> None:
    shown = []
    for copies in (True, False):
        env = ChunkedEnv(simulator_of_vector_env(OneBatch(copies), "one"), max_episode_steps=5)
        parts = [env.reset(seeds=[3, 4])["state"].tolist()]
        for _ in range(3):
            result = env.chunk_step(np.zeros((2, 2, 1), np.float32))
            ends = [] if result.final_obs is None else result.final_obs[1]["state"].tolist()
            parts += [result.obs["state"].tolist(), result.rewards.tolist(), ends]
        shown.append(parts)
    assert shown[0] == shown[1]


def test_rows_that_a_batchs_mask_leaves_out_say_nothing_of_success() -> None:
    class Masked(SaysInABatch):
        def step(self, actions: Any) -> Any:
            *rest, _ = super().step(actions)
            return *rest, {"success": np.array([True, False]), "_success": np.array([True, False])}

    class Mixed(SaysInABatch):
        def step(self, actions: Any) -> Any:
            *rest, _ = super().step(actions)
            one, other = np.array([True, False]), np.array([False, True])
            return *rest, {"success": one, "_success": one, "is_success": other, "_is_success": other}

    for kind, expected in ((Masked, [1, -1]), (Mixed, [1, 1])):
        env = ChunkedEnv(simulator_of_vector_env(kind({}, "bool"), "says"), max_episode_steps=STEPS)
        env.reset(seeds=[1, 2])
        assert env.chunk_step(np.zeros((2, 1, 1), np.float32)) and env.last_success.tolist() == expected


@pytest.mark.parametrize("info", [None, [1]])
def test_info_is_a_dict(info: Any) -> None:
    with pytest.raises(EpisodeContractError, match=WHERE + "step returned .* as info; return a dict"):
        played({"info": info}, None)


def test_success_at_the_end_is_success_once() -> None:
    with pytest.raises(EpisodeContractError, match=r"^row 1: success_at_end of the episode .* is True; return_"):
        check_episodes("in chunk 1", chunk_with({"success_once": False, "success_at_end": True}), 2)


class OwnVecEnv:
    """Of two rows; `rewards` and so on: what a chunk's result has in place of what is right."""

    num_envs, action_dim, max_episode_steps = 2, 1, 8

    def __init__(self, **arrays: Any) -> None:
        self.arrays = arrays

    def chunk_step(self, actions: Any) -> ChunkResult:
        shape = actions.shape[:2]
        usual = {name: np.zeros(shape, np.bool_) for name in ("terminated", "truncated")}
        usual |= {"rewards": np.zeros(shape, np.float32), "executed": np.ones(shape, np.bool_)}
        return ChunkResult({"state": np.zeros((2, 1), np.float32)}, **{**usual, **self.arrays})


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (
            {"terminated": np.full((2, 3), -1, np.int8)},
            "terminated from chunk_step is int8 of shape (2, 3); return",
        ),
        ({"truncated": np.zeros(2, np.bool_)}, "truncated from chunk_step is bool of shape (2,); return bool"),
        ({"rewards": np.zeros((2, 3))}, "rewards from chunk_step is float64 of shape (2, 3); return float32"),
        ({"rewards": np.full((2, 3), None)}, "rewards from chunk_step is object of shape (2, 3); return float32"),
        ({"executed": [[True] * 3] * 2}, "executed from chunk_step is a builtins.list; return bool"),
    ],
)
def test_arrays_of_a_vec_env_of_ones_own_are_of_their_types_in_every_chunk(arrays: Any, words: str) -> None:
    for given in ({}, arrays):
        stage = _Stage(0, OwnVecEnv(**given), np.arange(2), [], 1)
        if not given:
            assert stage.step(np.zeros((2, 3, 1), np.float32)).executed.all()
            continue
        with pytest.raises(EpisodeContractError, match=re.escape(words)):
            stage.step(np.zeros((2, 3, 1), np.float32))


RECORD = dict(
    env_id=1, task_id="t", seed=1, length=5, return_=1.0, success_once=True, success_at_end=None, steps_to_success=2
)


@pytest.mark.parametrize(
    "figures",
    [{"return_": np.float32(1)}, {"return_": 3}, {"success_once": np.True_}, {"steps_to_success": None}, {"length": 2}],
    ids=str,
)
def test_records_of_a_vec_env_of_ones_own_that_are_taken(figures: dict[str, Any]) -> None:
    check_episodes("in chunk 1", chunk_with(figures), 2)


@pytest.mark.parametrize(
    "figures",
    [
        *[{"return_": value} for value in (math.nan, math.inf, None, "1")],
        *[{name: value} for name in ("success_once", "success_at_end") for value in (math.nan, 0.5, 1, "yes")],
        *[{"length": value} for value in (0, -1, 2.5, None, True)],
        *[{"steps_to_success": value} for value in (0, math.nan, 6)],
        {"return_": 10**400},
    ],
    ids=str,
)
def test_records_of_a_vec_env_of_ones_own_that_are_refused(figures: dict[str, Any]) -> None:
    [name] = figures
    with pytest.raises(EpisodeContractError, match=rf"^row 1: {name} of the episode that ended in chunk 1 is .*; retu"):
        check_episodes("in chunk 1", chunk_with(figures), 2)


def chunk_with(figures: dict[str, Any]) -> ChunkResult:
    empty = np.zeros((2, 1), np.bool_)
    records = [EpisodeRecord(**{**RECORD, **figures})]
    return ChunkResult({}, np.zeros((2, 1), np.float32), empty, empty, empty, episodes=records)


@pytest.mark.parametrize("value", [math.nan, 0.5, 2, -2])
def test_what_a_simulator_of_ones_own_writes_as_success(value: float) -> None:
    class Own(GymnasiumSimulator):
        def step(self, rows: Any, actions: Any, out: StepOutputs) -> None:
            super().step(rows, actions, out)
            out.success[1] = value

    env = ChunkedEnv(Own([Says({}), Says({})], "own"), max_episode_steps=STEPS)
    with pytest.raises(EpisodeContractError, match=r"row 1, step 1 of the episode .*: success is .*; a simulator repo"):
        play(env)
