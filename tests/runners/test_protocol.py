"""The protocol of an evaluation, by which evaluations can be compared."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlinf_lite.config import Config, ConfigError, load_config
from rlinf_lite.envs import EnvSpec, EpisodeRecord, balanced_seed, env_seed
from rlinf_lite.envs.metaworld.tasks import MT10
from rlinf_lite.metrics import summarize_episodes
from rlinf_lite.models.base import PolicyInputs
from rlinf_lite.registry import UnknownSuiteError, env_card, suite_overrides, suites
from rlinf_lite.runners.protocol import notes_of, notes_of_run, protocol_of, suite_of


def test_an_instruction_that_the_policy_reads_and_nobody_gives_is_noted() -> None:
    cfg = load()
    reader, deaf = (PolicyInputs({}, 4, has_instruction=says) for says in (True, False))
    silent = EnvSpec(4, 4, {}, [-1.0] * 4, [1.0] * 4, 50, has_instruction=False)
    speaking = replace(silent, has_instruction=True)
    said = protocol_of(cfg, ["a"], {}, {}, silent, reader)["notes"]
    assert said == ['mlp_gaussian reads an instruction, and MT10 gives none: it is "" in every row']
    for spec, reads in ((silent, deaf), (speaking, reader), (silent, None), (None, reader)):
        assert notes_of(cfg, spec, reads) == []


def load(*overrides: str) -> Config:
    config = load_config("gym_pendulum_ppo_mlp", ["env.id=metaworld", "env.task=MT10", *overrides])
    assert isinstance(config, Config)
    return config


def test_an_evaluation_says_under_which_settings_and_by_which_code() -> None:
    cfg = load("env.options.render=exact", "env.options.obs_mode=rgb+state", "env.eval.num_episodes=30")
    played = {"max_episode_steps": 500, "ignore_terminations": False}
    said = json.loads(json.dumps(protocol_of(cfg, [*MT10 * 3], played, {})))
    expected = {
        "suite": None,
        "env": "metaworld",
        "task": "MT10",
        "tasks": sorted(MT10),
        "num_episodes": 30,
        "episodes_per_task": 3,
        "seed": 10_000,
        "max_episode_steps": 500,
        "num_action_chunks": 1,
        "mode": "greedy",
        "temperature": None,
        "model": "mlp_gaussian",
    }
    assert {name: said[name] for name in expected} == expected
    assert said["env_options"]["render"] == "exact" and "hidden_sizes" in said["model_options"]
    assert {"python", "torch", "rlinf_lite"} <= set(said["versions"])
    overrides = ["env.id=tests.envs.toy:make_env", "env.train.max_episode_steps=7", "rollout.num_chunks=16"]
    own = protocol_of(load_config("gym_pendulum_ppo_mlp", overrides), ["a", "a", "b"], {"max_episode_steps": 7}, {})
    assert own["max_episode_steps"] == 7 and own["episodes_per_task"] == [1, 2] and own["suite"] is None


def test_a_suite_is_named_where_all_of_its_settings_are_kept() -> None:
    card = env_card("metaworld")
    assert suite_of(card, load(*suite_overrides("metaworld-mt10", "metaworld"))) == "metaworld-mt10"
    assert suite_of(card, load(*suite_overrides("metaworld-mt50-100", "metaworld"))) == "metaworld-mt50-100"
    assert suite_of(card, load(*suite_overrides("metaworld-mt10", "metaworld"), "env.eval.num_episodes=20")) is None
    assert suite_of(card, load(*suite_overrides("metaworld-mt10", "metaworld"), "env.eval.mode=sampled")) is None
    trained = load_config("metaworld_sft_vla", suite_overrides("metaworld-mt10", "metaworld"), elsewhere=True)
    assert trained.env.eval.mode == "greedy" and suite_of(card, trained) == "metaworld-mt10"
    for name in card.suites:
        load(*suite_overrides(name, "metaworld"))
    for name, suite in env_card("libero").suites.items():
        cfg = load_config("libero_eval", suite_overrides(name, "libero"), elsewhere=True)
        assert suite_of(env_card("libero"), cfg) == name and suites()[name] == suite
        said = protocol_of(cfg, ["a", "b"], {"max_episode_steps": 7}, {})
        settling = 15 if name.endswith("-rlinf") else 10
        assert said["initial_states"].startswith("published") and said["env_options"]["settle_steps"] == settling
        assert said["max_episode_steps"] == 7 and said["suite"] == name
    own_limit = ["env.task=libero_10", "env.eval.max_episode_steps=null"]
    cfg = load_config("libero_eval", own_limit, elsewhere=True)
    assert suite_of(env_card("libero"), cfg) == "libero-10", "the protocol's own limit is played"
    with pytest.raises(UnknownSuiteError, match="Did you mean metaworld-mt10"):
        suite_overrides("metaworld-mt1", "metaworld")
    with pytest.raises(
        UnknownSuiteError, match="metaworld-mt10 is of metaworld, and the policy was trained in tabletop"
    ):
        suite_overrides("metaworld-mt10", "tabletop")


def test_every_task_is_evaluated_equally_often() -> None:
    seeds = [balanced_seed(10_000, episode, 10) for episode in range(200)]
    assert [seed % 10 for seed in seeds] == [episode % 10 for episode in range(200)]
    assert len(set(seeds)) == 200 and all(0 <= seed < 2**31 for seed in seeds)
    assert [balanced_seed(3, episode, 1) for episode in range(50)] == [env_seed(3, episode) for episode in range(50)]
    with pytest.raises(ConfigError, match=r"env.eval.num_episodes: 25 episodes do not divide over 10 tasks .*20 or 30"):
        load("env.eval.num_episodes=25")


def test_groups_of_tasks_have_rows_of_their_own() -> None:
    names = ("reach-v3", "door-open-v3", "push-v3")
    records = [
        EpisodeRecord(i, name, i, length=9, return_=1.0, success_once=name != "push-v3", success_at_end=None)
        for i, name in enumerate(names * 4)
    ]
    summary = summarize_episodes(records, "greedy", env_card("metaworld").task_groups, {"suite": None})
    assert [(row.task_id, row.num_successes, row.num_episodes) for row in summary.groups] == [
        ("easy", 8, 8),
        ("hard", 0, 4),
    ]
    assert [line.partition(":")[0] for line in summary.task_lines()] == [
        *sorted(names),
        "easy",
        "hard",
        "mean of the 2 groups",
    ]
    content = json.loads(summary.to_json(step=3))
    assert content["groups"][0]["success_once"] == 1.0 and content["protocol"] == {"suite": None}
    assert content["mean_of_groups"] == 0.5 and content["total"]["success_once"] == pytest.approx(2 / 3)
    single = summarize_episodes(records[:1], "greedy", env_card("metaworld").task_groups)
    assert single.groups == (), "a group that is the whole says nothing"


@pytest.mark.parametrize(
    ("num_envs", "group_size", "multiple"), [(64, 1, 10), (80, 1, None), (40, 8, 80), (80, 8, None)]
)
def test_environments_that_build_another_scene_in_most_episodes_are_noted(
    num_envs: int, group_size: int, multiple: int | None
) -> None:
    sizes = [f"env.train.num_envs={num_envs}", f"algorithm.group_size={group_size}"]
    found = notes_of_run(load_config("libero_ppo_oft", sizes, elsewhere=True), None, None)
    scenes = [line for line in found if "10 scenes cannot be divided evenly" in line]
    assert len(scenes) == (multiple is not None) and all(f"Multiples of {multiple} can" in line for line in scenes)
