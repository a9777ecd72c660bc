"""Bare ManiSkill, by its own `env.step` and nothing of rlinf_lite's but the stand-in material: the reference.

python -m tests.envs.bare_maniskill plan.json out.npz
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np


def main() -> None:
    from rlinf_lite.envs.maniskill.setup import import_maniskill, material_works, use_inert_material

    import_maniskill()
    if not material_works():
        use_inert_material()
    import gymnasium
    import torch

    torch.set_num_threads(1)
    with open(sys.argv[1]) as file:
        plan = json.load(file)
    rows: dict[str, list[np.ndarray]] = {"first": [], "states": [], "rewards": [], "success": []}
    for seed, actions in zip(plan["seeds"], plan["actions"], strict=True):
        env = gymnasium.make(plan["task"], num_envs=1, obs_mode="state", render_backend="none", **plan["settings"])
        first, _ = env.reset(seed=seed)
        steps = [env.step(np.asarray(action, np.float32)) for action in actions]
        rows["first"].append(first[0].numpy())
        rows["states"].append(np.stack([step[0][0].numpy() for step in steps]))
        rows["rewards"].append(np.array([float(step[1]) for step in steps], np.float32))
        rows["success"].append(np.array([bool(step[4]["success"]) for step in steps]))
    stacked: dict[str, Any] = {name: np.stack(arrays) for name, arrays in rows.items()}
    np.savez(sys.argv[2], **stacked)


if __name__ == "__main__":
    main()
