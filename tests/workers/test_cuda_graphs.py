"""`rollout.cuda_graphs` reaches the process that acts or generates, before it does."""

import pytest

from rlinf_lite.config import load_config
from rlinf_lite.models import graphs
from rlinf_lite.weights import WeightRoutes
from rlinf_lite.workers import EnvWorker, MultiStepRolloutWorker
from rlinf_lite.workers.layout import Layout
from rlinf_lite.workers.reasoning.rollout import LanguageRollout


@pytest.mark.parametrize("wanted", [False, True])
def test_of_embodied_runs(monkeypatch, wanted):
    monkeypatch.setattr(graphs, "enabled", not wanted)
    cfg = load_config("embodiment/gym_pendulum_ppo_mlp", [f"rollout.cuda_graphs={wanted}"])
    layout = Layout(cfg.env.train.num_envs, 1, 1, rollout_nodes=(0,), actor_nodes=(0,))
    MultiStepRolloutWorker(cfg).init(layout, EnvWorker(cfg).init(layout))
    assert graphs.enabled is wanted


@pytest.mark.parametrize("wanted", [False, True])
def test_of_language_runs(monkeypatch, wanted):
    """The engine's own first passes are recorded, or not, already."""
    asked = []
    monkeypatch.setattr(graphs, "enabled", not wanted)
    monkeypatch.setattr(graphs, "can_record", lambda device: asked.append(graphs.enabled))
    LanguageRollout(load_config("math/math_arithmetic_grpo", [f"rollout.cuda_graphs={wanted}"])).init(
        None, WeightRoutes((0,), (0,))
    )
    assert asked == [wanted]
