"""The library by itself, as OpenVLA evaluates with it.

`python tests/envs/bare_libero.py assets task state size in out`: `state` is the number of a published initial state, or
`drawn` with a seed, such as drawn7. A task of LIBERO-PRO has its suite before it, and is played by that library. `in`
holds actions [T, 7], `out` what was seen after each of them. Of rlinf_lite it has nothing but the config.yaml without
which the library asks on the terminal, and the folder of LIBERO-PRO.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np


def main(assets: str, task: str, state: str, size: int, given: str, out: str) -> None:
    from rlinf_lite.envs.libero.package import write_config
    from rlinf_lite.envs.libero.pro import pro_folder

    suite_name, _, task = task.rpartition("/")
    os.environ["LIBERO_CONFIG_PATH"] = str(write_config(Path(assets)))
    if suite_name:
        os.environ["LIBERO_CONFIG_PATH"] = str(Path(out).parent)
        folder = pro_folder()
        sys.path.insert(0, str(folder.parents[1]))
        folders = {"benchmark_root": folder, "bddl_files": folder / "bddl_files", "init_states": folder / "init_files"}
        (Path(out).parent / "config.yaml").write_text(
            "".join(f"{name}: {path}\n" for name, path in {**folders, "datasets": folder, "assets": assets}.items())
        )
    import libero.libero

    libero.libero._assets_path_cache = assets
    from libero.libero import benchmark, get_libero_path
    from libero.libero.envs import OffScreenRenderEnv
    from robosuite.utils.transform_utils import quat2axisangle

    names = [suite_name] if suite_name else ["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"]
    suites = [benchmark.get_benchmark(name)() for name in names]
    suite, number = next(
        (suite, suite.get_task_names().index(task)) for suite in suites if task in suite.get_task_names()
    )
    found = suite.get_task(number)
    bddl = os.path.join(get_libero_path("bddl_files"), found.problem_folder, found.bddl_file)
    env = OffScreenRenderEnv(bddl_file_name=bddl, camera_heights=size, camera_widths=size)
    env.seed(int(state.partition("drawn")[2] or 0))
    env.reset()
    if state.isdigit():
        env.set_init_state(suite.get_task_init_states(number)[int(state)])
    for _ in range(10):
        env.step([0, 0, 0, 0, 0, 0, -1])
    seen: dict[str, list[object]] = {name: [] for name in ("simulation", "state", "agentview", "wrist", "success")}
    for action in np.load(given)["actions"]:
        obs, _, done, _ = env.step(action.astype(np.float64).tolist())
        turned = quat2axisangle(obs["robot0_eef_quat"])
        seen["simulation"].append(env.get_sim_state())
        seen["state"].append(np.concatenate([obs["robot0_eef_pos"], turned, obs["robot0_gripper_qpos"]]))
        seen["agentview"].append(obs["agentview_image"])
        seen["wrist"].append(obs["robot0_eye_in_hand_image"])
        seen["success"].append(bool(done))
    np.savez(out, **{name: np.array(values) for name, values in seen.items()})


if __name__ == "__main__":
    _, assets, task, state, size, given, out = sys.argv
    main(assets, task, state, int(size), given, out)
