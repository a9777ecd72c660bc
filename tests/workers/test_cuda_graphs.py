"""What of torch's settings belongs to GPUs reaches the process that acts, generates or trains, before it does."""

import os

import pytest
import torch

from rlinf_lite.config import load_config
from rlinf_lite.data import DataProto
from rlinf_lite.models import graphs
from rlinf_lite.training import precision
from rlinf_lite.weights import WeightRoutes
from rlinf_lite.workers import EmbodiedFSDPActor, EnvWorker, MultiStepRolloutWorker, actor, rollout
from rlinf_lite.workers.layout import Layout
from rlinf_lite.workers.reasoning import base
from rlinf_lite.workers.reasoning import rollout as language
from rlinf_lite.workers.reasoning.actor import LanguageActor
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


def test_acting_and_generating_make_no_plans_for_shapes(monkeypatch):
    """cuDNN's attention would, for every number of rows and columns."""
    enabled, seen = torch.backends.cuda.cudnn_sdp_enabled, []
    cfg = load_config("embodiment/gym_pendulum_ppo_mlp")
    layout = Layout(cfg.env.train.num_envs, 1, 1, rollout_nodes=(0,), actor_nodes=(0,))
    acting = MultiStepRolloutWorker(cfg)
    acting.init(layout, EnvWorker(cfg).init(layout))
    with acting._acting():
        seen.append(enabled())
    generating = LanguageRollout(load_config("math/math_arithmetic_grpo"))
    generating.init(None, WeightRoutes((0,), (0,)))
    before = generating.model.logits
    monkeypatch.setattr(generating.model, "logits", lambda *args: seen.append(enabled()) or before(*args))
    tokens = {"prompt_ids": torch.ones(1, 2, dtype=torch.long), "prompt_mask": torch.ones(1, 2, dtype=torch.bool)}
    prompts = DataProto(tokens | {"group": torch.zeros(1, dtype=torch.long)}, meta_info={"seed": 0})
    assert next(generating._stream(prompts)).token_ids
    assert len(seen) > 1 and not any(seen) and enabled()


@pytest.mark.parametrize("wanted", [False, True])
def test_deterministic(monkeypatch, wanted):
    asked = []
    for module in (actor, rollout, base, language):
        monkeypatch.setattr(module, "be_deterministic", lambda *given: asked.append(given))
    monkeypatch.setattr(base, "check_supported", lambda *_: asked.append("computes"))
    cfg = load_config("embodiment/gym_pendulum_ppo_mlp", [f"runner.deterministic={wanted}"])
    layout = Layout(cfg.env.train.num_envs, 1, 1, rollout_nodes=(0,), actor_nodes=(0,))
    spec = EnvWorker(cfg).init(layout)
    MultiStepRolloutWorker(cfg).init(layout, spec)
    EmbodiedFSDPActor(cfg).init(layout, spec, 1)
    of_language = load_config("math/math_arithmetic_grpo", [f"runner.deterministic={wanted}"])
    LanguageRollout(of_language).init(None, WeightRoutes((0,), (0,)))
    LanguageActor(of_language).init(None, WeightRoutes((0,), (0,)), 1)
    assert asked == [*[("cpu", wanted)] * 4, "computes"]

    said = []
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", said.append)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    for device in ("cpu", "cuda:0"):
        precision.be_deterministic(device, wanted)
        assert said == [True] * (wanted and device == "cuda:0")
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if said else None)
        assert torch.utils.deterministic.fill_uninitialized_memory is not bool(said)
