"""What processes load decides how fast they start again, and what they take."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("rlinf_lite.workers.env, rlinf_lite.envs.tabletop, rlinf_lite.envs.gymnasium_env", ["torch", "transformers"]),
        ("rlinf_lite.workers.rollout", ["torch.distributed.tensor", "transformers"]),
        ("rlinf_lite.control.trainer_host, rlinf_lite.control.master", ["torch", "hydra"]),
    ],
)
def test_workers_load_only_what_they_need(module, heavy):
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout == "[]\n"
