"""Tabletop: what is drawn from a seed, what language and pictures say, how episodes are decided, and the expert."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rlinf_lite.config import EnvConfig
from rlinf_lite.envs import (
    ChunkedEnv,
    Demonstrator,
    EnvContractError,
    EpisodeRecord,
    Obs,
    UnknownEnvError,
    check_env,
    make_env,
)
from rlinf_lite.envs.tabletop import language
from rlinf_lite.envs.tabletop.language import COLOURS, FAMILIES, HELD_OUT
from rlinf_lite.envs.tabletop.render import PALETTE
from tests.envs.toy import ToySimulator

CLOSE, OPEN = 1.0, -1.0


def tabletop(
    task: str = "pick",
    num_envs: int = 8,
    split: str = "train",
    seeds: Sequence[int] | None = None,
    rules: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[ChunkedEnv, Obs]:
    """An environment, frozen at the end of its episodes, and its first observation."""
    rules = {"auto_reset": False, "ignore_terminations": False} | (rules or {})
    given = {"id": "tabletop", "task": task, "options": options, "train": rules, "eval": rules}
    env = make_env(EnvConfig.model_validate(given), "eval" if split == "eval" else "train", num_envs)
    assert isinstance(env, ChunkedEnv)
    return env, env.reset(seeds=range(num_envs) if seeds is None else seeds)


def play(env: ChunkedEnv, chunk: int = 4) -> list[EpisodeRecord]:
    """Records of the expert's episodes, by row."""
    records: list[EpisodeRecord] = []
    while len(records) < env.num_envs:
        records += env.chunk_step(env.expert_actions(chunk)).episodes
    return sorted(records, key=lambda record: record.env_id)


def pixels(image: np.ndarray, colour: str) -> np.ndarray:
    """Table coordinates [P, 2] of the pixels of a colour in a picture [64, 64, 3]."""
    rows, columns = np.nonzero((image == PALETTE[colour]).all(axis=-1))
    return np.stack([columns + 0.5, 63.5 - rows], axis=1) / 32 - 1


def go(env: ChunkedEnv, targets: np.ndarray, grip: float, num_steps: int = 10) -> Any:
    """Moves every row's effector to its target [B, 2], then sets the gripper; the chunk's result."""
    ways = targets - env.simulator.observe(np.arange(env.num_envs))["state"][:, :2]
    actions = np.zeros((env.num_envs, num_steps, 3), np.float32)
    actions[:, :-1, :2] = (ways / 0.2 / (num_steps - 1))[:, None]
    actions[:, :, 2], actions[:, -1, 2] = OPEN, grip
    return env.chunk_step(actions)


@pytest.mark.parametrize("task", [*FAMILIES, "all"])
def test_the_protocol_is_kept(task: str) -> None:
    for mode in ("rgb", "state", "rgb+state"):
        env, obs = tabletop(task, 3, obs_mode=mode)
        assert check_env(env) == []
        assert ("images" in obs) == (mode != "state")
        assert obs["state"].shape == (3, 4 if mode == "rgb" else 16)
    assert obs["images"]["top"].shape == (3, 64, 64, 3) and obs["images"]["top"].dtype == np.uint8


def test_an_episode_is_a_function_of_its_seed_alone() -> None:
    _, obs = tabletop("all", 64, obs_mode="rgb+state")
    env, _ = tabletop("all", 5, seeds=range(100, 105), obs_mode="rgb+state")
    play(env)
    again = env.reset(seeds=[63, 7, 0, 7, 20])
    for row, seed in enumerate([63, 7, 0, 7, 20]):
        assert again["instruction"][row] == obs["instruction"][seed]
        np.testing.assert_array_equal(again["state"][row], obs["state"][seed])
        np.testing.assert_array_equal(again["images"]["top"][row], obs["images"]["top"][seed])
    assert len({image.tobytes() for image in obs["images"]["top"]}) == 64


@pytest.mark.parametrize("task", FAMILIES)
def test_the_expert_never_fails(task: str) -> None:
    for chunk, blocks in ((4, [3, 3]), (1, [1, 3])):
        env, _ = tabletop(task, 200, num_blocks=blocks, eval_pairs="all", split="eval")
        records = play(env, chunk)
        assert all(record.success_once and record.success_at_end for record in records)
        assert np.mean([record.length for record in records]) < {"pick": 3.7, "push": 10, "place": 9.5}[task]
        assert [record.return_ for record in records] == [1.0] * 200  # sparse


@pytest.mark.parametrize("task", FAMILIES)
def test_the_expert_recovers(task: str) -> None:
    env, _ = tabletop(task, 200, rules={"max_episode_steps": 60})
    rng = np.random.default_rng(0)
    early = env.chunk_step(rng.uniform(-1, 1, (200, 8, 3)).astype(np.float32)).episodes
    decided = {record.env_id for record in early}
    assert len(decided) < 60
    late: list[EpisodeRecord] = []
    while len(late) + len(decided) < 200:
        actions = env.expert_actions(4)
        assert not actions[sorted(decided)].any()  # zeros in frozen rows
        late += env.chunk_step(actions).episodes
    assert all(record.success_once for record in late)

    env.reset(seeds=range(200))
    records: list[EpisodeRecord] = []
    while len(records) < 200:
        actions = env.expert_actions(4)
        records += env.chunk_step(actions + 0.25 * rng.normal(size=actions.shape).astype(np.float32)).episodes
    assert np.mean([bool(record.success_once) for record in records]) > 0.98


def test_expert_actions_step_nothing_and_need_an_expert() -> None:
    env, _ = tabletop("push", 4)
    assert isinstance(env, Demonstrator)
    actions = env.expert_actions(12)
    np.testing.assert_array_equal(actions, env.expert_actions(12))
    for start in range(0, 12, 4):  # open loop: the later actions are those from the states that the first lead to
        np.testing.assert_array_equal(env.expert_actions(4), actions[:, start : start + 4])
        env.chunk_step(actions[:, start : start + 4])
    with pytest.raises(EnvContractError, match="toy has no scripted expert; give its Simulator expert_actions"):
        ChunkedEnv(ToySimulator(2), max_episode_steps=3).expert_actions(1)


def test_held_out_pairs_are_never_trained() -> None:
    pairs = [f"{family}_{colour}" for family, colour in HELD_OUT.items()]

    def played(split: str, eval_pairs: str, seeds: range) -> set[str]:
        env, _ = tabletop("all", 500, split, seeds, eval_pairs=eval_pairs)
        return {record.task_id for record in play(env)}

    trained = played("train", "all", range(500)) | played("train", "held_out", range(500, 1000))
    assert trained == {f"{family}_{colour}" for family in FAMILIES for colour in PALETTE} - set(pairs)
    assert played("eval", "train", range(500)) == trained
    assert played("eval", "held_out", range(500)) == set(pairs)
    assert played("eval", "all", range(500)) == trained | set(pairs)


def test_wordings() -> None:
    _, obs = tabletop("all", 2000)
    said = set(obs["instruction"])
    numbers = itertools.product(range(len(FAMILIES)), range(4), *[range(len(COLOURS))] * 2, (-1, 1))
    assert said < {language.sentence(*those) for those in numbers if those[2] != those[3]}
    shapes = {re.sub("|".join(PALETTE), "*", sentence) for sentence in said}
    assert len(shapes) == 4 + 4 + 2 * 4  # four wordings each; place: left and right
    _, obs = tabletop("all", 500, num_wordings=1)
    shapes = {re.sub("|".join(PALETTE), "*", sentence) for sentence in obs["instruction"]}
    assert shapes == {
        "pick up the * block",
        "push the * block onto the * square",
        "put the * block left of the * block",
        "put the * block right of the * block",
    }


@pytest.mark.parametrize("task", FAMILIES)
def test_the_picture_shows_what_the_sentence_names(task: str) -> None:
    _, obs = tabletop(task, 100, obs_mode="rgb+state")
    for row, sentence in enumerate(obs["instruction"]):
        image, state = obs["images"]["top"][row], obs["state"][row]
        named = re.findall("|".join(PALETTE), sentence)
        seen = [colour for colour in PALETTE if pixels(image, colour).size]
        assert set(named) <= set(seen) and len(seen) == (4 if task == "push" else 3)
        effector, block, goal = state[:2], state[8:10], state[10:12]
        np.testing.assert_allclose(pixels(image, named[0]).mean(axis=0), effector + block, atol=0.08)
        if task == "place":
            x, y = pixels(image, named[1]).mean(axis=0)
            beside = x - 0.45 if "left" in sentence else x + 0.45
            np.testing.assert_allclose([beside, y], effector + goal, atol=0.08)
        if task == "push":
            np.testing.assert_allclose(
                pixels(image, named[1]).mean(axis=0), effector + goal, atol=0.15
            )  # cut at the edge


def follow(obs: Obs) -> np.ndarray:
    """Where a block of the named colour is in each picture; the table's centre where there is none."""
    found = []
    for sentence, image in zip(obs["instruction"], obs["images"]["top"], strict=True):
        seen = pixels(image, re.findall("|".join(PALETTE), sentence)[0])
        found.append(seen.mean(axis=0) if seen.size else np.zeros(2))
    return np.array(found)


def test_language_decides() -> None:
    env, obs = tabletop("pick", 300)
    assert go(env, follow(obs), CLOSE).rewards.sum() == 300
    env, obs = tabletop("pick", 300, shuffle_instructions=True)
    result = go(env, follow(obs), CLOSE)
    assert 0.1 < result.rewards.sum() / 300 < 0.3  # the same block is named by chance
    wrong = [record for record in result.episodes if not record.success_once]
    assert len(wrong) > 60 and all(record.length == 10 for record in wrong)  # another block: the episode has failed
    assert result.terminated[[record.env_id for record in wrong], -1].all()


def test_closing_on_the_bare_table_decides_nothing() -> None:
    env, _ = tabletop("pick", 50, obs_mode="state")
    result = env.chunk_step(np.tile(np.array([0, 0, CLOSE], np.float32), (50, 3, 1)))
    assert not result.episodes and (result.obs["state"][:, 2:4] == [1, 0]).all()
    env, _ = tabletop("pick", 50, rules={"max_episode_steps": None})
    ended = env.chunk_step(np.zeros((50, 30, 3), np.float32))
    assert ended.truncated[:, 23].all() and ended.executed.sum() == 50 * 24


def test_pushing_another_block_onto_a_square_fails() -> None:
    env, _ = tabletop("push", 100)
    scene = env.simulator._scene
    scene.squares[:50] = scene.squares[:50, ::-1]  # the expert now pushes the named block onto the other square
    fooled = env.expert_actions(24)
    scene.squares[:50] = scene.squares[:50, ::-1]
    records = env.chunk_step(fooled).episodes
    assert {record.env_id: record.success_once for record in records} == {row: row >= 50 for row in range(100)}


def test_placing_on_the_other_side_fails_and_elsewhere_can_be_mended() -> None:
    env, obs = tabletop("place", 60, obs_mode="state", rules={"max_episode_steps": 60})
    state = obs["state"].astype(np.float64)
    block, goal = state[:, :2] + state[:, 8:10], state[:, :2] + state[:, 10:12]
    spots = goal - np.stack([2 * 0.45 * state[:, 7], np.zeros(60)], axis=1)  # on the other side
    spots[30:, 1] -= np.sign(spots[30:, 1]) * 0.4  # and not level with it
    go(env, block, CLOSE)
    actions = np.zeros((60, 11, 3), np.float32)
    actions[:, :10, :2] = ((spots - block) / 0.2 / 10)[:, None]
    actions[:, :10, 2], actions[:, 10, 2] = CLOSE, OPEN
    failed = np.asarray(env.chunk_step(actions).terminated.any(axis=1))
    on_table = np.flatnonzero(np.abs(spots[:30]).max(axis=1) < 1)
    assert len(on_table) > 10 and failed[on_table].all() and not failed[30:].any()
    mended = [record for _ in range(8) for record in env.chunk_step(env.expert_actions(4)).episodes]
    assert {record.env_id for record in mended if record.success_once} >= set(range(30, 60))


def test_an_outcome_is_final_and_nothing_moves_after_it() -> None:
    env, obs = tabletop("pick", 50, rules={"ignore_terminations": True}, obs_mode="rgb+state")
    rng = np.random.default_rng(0)
    wrong = obs["state"][:25, :2] + obs["state"][:25, 12:14]  # another block
    right = obs["state"][25:, :2] + obs["state"][25:, 8:10]
    before = go(env, np.concatenate([wrong, right]), CLOSE)
    assert not before.episodes and before.rewards.sum() == 25
    after = env.chunk_step(rng.uniform(-1, 1, (50, 14, 3)).astype(np.float32))
    np.testing.assert_array_equal(after.obs["images"]["top"], before.obs["images"]["top"])
    assert after.rewards.sum() == 0 and not after.terminated.any() and after.truncated[:, -1].all()
    assert [record.success_once for record in after.episodes] == [False] * 25 + [True] * 25
    assert [record.success_at_end for record in after.episodes] == [False] * 25 + [True] * 25


@pytest.mark.parametrize("task", FAMILIES)
def test_dense_reward_is_the_way_covered(task: str) -> None:
    env, obs = tabletop(task, 50, reward_mode="dense", obs_mode="state")
    to_block, to_goal = obs["state"][:, 8:10], obs["state"][:, 10:12] - obs["state"][:, 8:10]
    ways = np.hypot(to_block[:, 0], to_block[:, 1]) + np.hypot(to_goal[:, 0], to_goal[:, 1])
    left = ways + 1 - [record.return_ for record in play(env)]
    assert (left > -1e-4).all() and (left < 0.4).all()  # at the end of a push the effector is still behind the block


@pytest.mark.parametrize("auto_reset", [True, False])
def test_resume_is_exact(auto_reset: bool) -> None:
    rules = {"auto_reset": auto_reset}
    env, _ = tabletop("all", 32, rules=rules, obs_mode="rgb+state")
    rng = np.random.default_rng(0)
    chunks = rng.uniform(-1, 1, (8, 32, 4, 3)).astype(np.float32)
    for chunk in chunks[:5]:
        pending = env.chunk_step(chunk).obs
    resumed, _ = tabletop("all", 32, rules=rules, seeds=range(900, 932), obs_mode="rgb+state")
    loaded = resumed.load_state_dict(env.state_dict())
    for chunk in (None, *chunks[5:]):
        if chunk is not None:
            ours, theirs = env.chunk_step(chunk), resumed.chunk_step(chunk)
            assert ours.episodes == theirs.episodes
            np.testing.assert_array_equal(ours.rewards, theirs.rewards)
            pending, loaded = ours.obs, theirs.obs
        np.testing.assert_array_equal(pending["images"]["top"], loaded["images"]["top"])
        np.testing.assert_array_equal(pending["state"], loaded["state"])
        assert pending["instruction"] == loaded["instruction"]


def test_the_gripper_can_be_seen() -> None:
    env, first = tabletop("place", 20, obs_mode="rgb")
    opened = first["images"]["top"]
    closed = env.chunk_step(np.tile(np.array([0, 0, CLOSE], np.float32), (20, 1, 1))).obs["images"]["top"]
    white = [(images == 255).all(axis=-1).sum(axis=(1, 2)) for images in (opened, closed)]
    assert (white[1] > 1.5 * white[0]).all()


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(UnknownEnvError, match=r"env\.task: there is no environment 'pik'\. Did you mean pick"):
        tabletop("pik")


def test_evaluations_play_on_by_default_so_that_success_at_the_end_means_something() -> None:
    env = make_env(EnvConfig(id="tabletop", task="pick"), "eval", 3)
    assert isinstance(env, ChunkedEnv)
    env.reset(seeds=[1, 2, 3])
    assert [record.length for record in play(env)] == [24, 24, 24]
