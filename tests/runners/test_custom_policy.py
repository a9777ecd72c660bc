"""A user's own policy trains, is saved, and is loaded again, from its one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlinf_lite.models import load_policy
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
