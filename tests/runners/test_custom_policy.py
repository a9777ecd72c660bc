"""A user's own policy trains, is saved, and is loaded again, from its one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf_lite.models import load_policy
from rlinf_lite.models.tensor_files import read_tensors
from tests.runners.conftest import read_metrics

POLICY = "examples.embodiment.custom_policy:SquashedGaussianPolicy"


def test_a_custom_policy_trains_and_goes_on_from_its_checkpoint(start: Any, tmp_path: Path) -> None:
    mine = [f"model.id={POLICY}", "model.options.hidden_size=16", "runner.max_steps=2", "runner.save_interval=2"]
    result = start(*mine).run()
    losses = [line["train/actor/policy_loss"] for line in read_metrics(result.run_dir)]
    assert len(losses) == 2 and np.isfinite(losses).all()
    start.stop()

    assert result.checkpoint is not None
    policy = load_policy(result.checkpoint / "policy")
    assert (policy.policy_id, policy.config_dict()["hidden_size"]) == (POLICY, 16)
    runner = start(*mine, f"runner.resume={result.run_dir}", "runner.max_steps=3")
    assert runner.run().completed_steps == 3


def test_tied_parameters_act_as_they_train_and_stay_tied(start: Any) -> None:
    mine = ["model.id=tests.models.tied:TiedPolicy", "model.options={}", "runner.save_interval=2"]
    mine += ["cluster.component_placement.env=0-1", "algorithm.recompute_logprobs=false"]
    result = start("runner.max_steps=2", *mine).run()
    assert all(line["rollout/logprob_drift"] < 1e-6 for line in read_metrics(result.run_dir))
    saved = read_tensors(result.checkpoint / "policy" / "model.safetensors")
    assert torch.equal(saved["back.weight"], saved["embed.weight"])
