"""What a trained policy does depends on what it is told: with other episodes' instructions it succeeds by chance."""

import numpy as np
import pytest
import torch

from rlinf_lite.config import EnvConfig
from rlinf_lite.envs import make_env
from rlinf_lite.models import load_policy
from rlinf_lite.shipped import shipped

NUM_EPISODES = 200
ONE_OF_THREE = 1 / 3  # blocks on the table


@pytest.fixture(scope="module")
def policy():
    return load_policy(shipped("assets") / "tabletop_vla").eval()


def success(policy, **tabletop) -> float:
    cfg = EnvConfig.model_validate({"id": "tabletop", "task": "pick", "options": tabletop})
    env = make_env(cfg, "eval", NUM_EPISODES)
    obs = env.reset(seeds=range(10_000, 10_000 + NUM_EPISODES))
    ended = {}
    for _ in range(-(-env.max_episode_steps // policy.num_action_chunks)):
        with torch.inference_mode():
            actions = policy.predict_action_batch(obs, "greedy").actions.numpy()
        result = env.chunk_step(actions)
        ended |= {record.env_id: record for record in result.episodes if record.env_id not in ended}
        obs = result.obs
    assert len(ended) == NUM_EPISODES
    return float(np.mean([record.success_once for record in ended.values()]))


def test_the_shipped_policy_follows_instructions(policy):
    told = success(policy)
    misled = success(policy, shuffle_instructions=True)
    assert told > 0.75
    assert 0.1 < misled < ONE_OF_THREE + 0.07, "at most chance (two standard errors), but blocks are still picked"
