"""Classes defined in notebook cells can train. The test uses a program from standard input, which has no file
either."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_lite.rewards.registry import RewardError, import_reward

CARD = """
from rlinf_lite.cards import EnvCard, Section, Task
from rlinf_lite.algorithms import register_advantage
from rlinf_lite.models import GaussianPolicy
from rlinf_lite.registry import ESTIMATORS
from torch import nn


class Room(EnvCard):
    class Options(Section):
        goal: float = 0.1

    tasks = {"reach": Task(max_episode_steps=30, state_dim=2, action_dim=2)}

    def make(self, num_envs, cfg, split):
        assert cfg.options.goal == 0.2
        return Reach()


@register_advantage("mine", needs_values=True)
def mine(inputs, cfg):
    return ESTIMATORS.get("gae")(inputs, cfg)


class Steady(GaussianPolicy):
    def build(self):
        self.mean, self.value = nn.Linear(2, self.num_outputs), nn.Linear(2, self.num_values)

    def network(self, inputs):
        return self.mean(inputs["state"]), self.value(inputs["state"])
"""
OVERRIDES = ["env.id=__main__:Room", "env.options.goal=0.2", "model={id: __main__:Steady}"]
OVERRIDES += ["algorithm.adv_type=__main__:mine"]


def test_a_card_and_a_policy_of_a_cell(repo: Path, tmp_path: Path) -> None:
    page = (repo / "docs" / "python.md").read_text()
    (cell,) = re.findall(r"<!-- cell -->\n```python\n(.*?)```", page, re.S)
    defined, load, rest = cell.partition("cfg = ")
    program = defined + CARD + load + rest.replace("    + [", f"    + {OVERRIDES} + [")
    program += (
        "\nprint('steps', result.completed_steps, rlinf_lite.load_policy(result.checkpoint).act({'state': [0, 0]}))"
    )
    found = subprocess.run(
        [sys.executable, "-"], input=program, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr[-3000:]
    (metrics,) = tmp_path.glob("results/*/metrics.jsonl")
    assert "train/critic/value_loss" in metrics.read_text()  # what the estimator needs is known in workers
    assert "steps 2 [" in found.stdout
    (checkpoint,) = tmp_path.glob("results/*/checkpoints/step_000002")
    how = 'rlinf_lite.evaluate(rlinf_lite.load_config(..., [..., "actor.checkpoint_load_path='
    assert f"  measure: in this program, {how}{checkpoint.relative_to(tmp_path)}" in found.stdout
    page = (checkpoint.parent.parent / "report.html").read_text()
    assert "rlinf-lite eval" not in found.stdout + page and "rlinf_lite.evaluate, in the program" in page


def test_rewards_are_named_in_files() -> None:
    with pytest.raises(RewardError, match=r"reward\.fn: __main__:score cannot be imported by another process"):
        import_reward("__main__:score")
