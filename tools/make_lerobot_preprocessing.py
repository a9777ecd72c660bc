"""Write tests/fixtures/lerobot-<release>.npz: the pictures and prompts that LeRobot's own code makes for pi0, pi0.5 and
SmolVLA. Releases with equal results share one file, which is named after the first of them.

    for release in 0.4.0 0.4.1 0.4.2 0.4.3 0.4.4 0.5.0 0.5.1 0.6.0 0.6.1; do
        pip download --no-deps --ignore-requires-python --dest WHEELS lerobot==$release
    done
    python tools/make_lerobot_preprocessing.py WHEELS

LeRobot is not installed: the script takes the few functions that it needs from the wheels, by name, and runs them.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

OUT = Path(__file__).resolve().parents[1] / "tests" / "fixtures"
SIDE = 7  # height and width of the policies' pictures
SIZES = ((5, 9), (8, 5), (9, 9))  # of the cameras' pictures; LeRobot rounds the last one to 6 rows, with 1 of padding
PADDED = 32
SENTENCES = ["pick up the cup", "Open_the drawer\nand wait ", "stop\n"]


def functions(wheel: Path, module: str, *names: str, **given: Any) -> dict[str, Any]:
    """The functions and methods of a module by name, with `given` as their globals, and without annotations."""
    with zipfile.ZipFile(wheel) as files:
        tree = ast.parse(files.read(f"lerobot/{module}.py"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in found:
        node.decorator_list = []
    future = ast.parse("from __future__ import annotations").body
    scope: dict[str, Any] = {"torch": torch, "F": F, "np": np, "deepcopy": deepcopy, **given}
    exec(compile(ast.Module([*future, *found], []), f"{wheel.name}:{module}", "exec"), scope)
    return {name: scope[name] for name in names if name in scope}


def helpers(wheel: Path, policy: str) -> dict[str, Any]:
    """The functions that the policies' methods call. Later releases have them in a separate module."""
    names = ("resize_with_pad_torch", "resize_with_pad", "pad_vector")
    with zipfile.ZipFile(wheel) as files:
        modules = [f"policies/{policy}/modeling_{policy}", "policies/common/vla_utils"]
        modules = [name for name in modules if f"lerobot/{name}.py" in files.namelist()]
    return {name: one for module in modules for name, one in functions(wheel, module, *names).items()}


def pictures(wheel: Path, policy: str, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A policy's pictures by camera, float32 [1, 3, SIDE, SIDE], made from uint8 pictures that a dataset gives as [0,
    1]."""
    batch = {name: torch.from_numpy(image).permute(0, 3, 1, 2).float() / 255 for name, image in given.items()}
    name = "prepare_images" if policy == "smolvla" else "_preprocess_images"
    module = f"policies/{policy}/modeling_{policy}"
    prepare = functions(wheel, module, name, OBS_STATE="state", **helpers(wheel, policy))[name]
    config = SimpleNamespace(
        image_features=dict.fromkeys(batch),
        image_resolution=(SIDE, SIDE),
        resize_imgs_with_padding=(SIDE, SIDE),
        empty_cameras=0,
    )
    owner = SimpleNamespace(config=config, parameters=lambda: iter([torch.zeros(1)]))
    images, _ = prepare(owner, batch | {"state": torch.zeros(1, 8)})
    return {name: image.contiguous().numpy() for name, image in zip(batch, images, strict=True)}


def prompts(wheel: Path, policy: str, states: np.ndarray) -> list[str]:
    """The texts that the tokenizer gets for SENTENCES and normalised `states`."""
    module = f"policies/{policy}/processor_{policy}"
    if policy == "pi05":
        key = SimpleNamespace(OBSERVATION="observation", COMPLEMENTARY_DATA="task")
        given = {"TransitionKey": key, "OBS_STATE": "state", **helpers(wheel, policy)}
        prepare = functions(wheel, module, "__call__", **given)["__call__"]
        step = SimpleNamespace(max_state_dim=PADDED, task_key="task")
        seen = {"observation": {"state": torch.from_numpy(states)}, "task": {"task": list(SENTENCES)}}
        return list(prepare(step, seen)["task"]["task"])
    with zipfile.ZipFile(wheel) as files:
        shared = "processor/newline_task_processor"
        module = shared if policy == "smolvla" and f"lerobot/{shared}.py" in files.namelist() else module
    add = functions(wheel, module, "complementary_data")["complementary_data"]
    return list(add(None, {"task": list(SENTENCES)})["task"])


def made_by(wheel: Path) -> dict[str, np.ndarray]:
    """The results of a release, together with their inputs."""
    rng = np.random.default_rng(0)
    given = {f"{h}x{w}": rng.integers(0, 256, (1, h, w, 3), dtype=np.uint8) for h, w in SIZES}
    states = np.round(rng.uniform(-1.1, 1.1, (len(SENTENCES), 8)), 3).astype(np.float32)
    found: dict[str, Any] = {"states": states, "sentences": np.array(SENTENCES)}
    found |= {f"image_{name}": image for name, image in given.items()}
    for policy in ("pi0", "pi05", "smolvla"):
        found |= {f"{policy}_{name}": image for name, image in pictures(wheel, policy, given).items()}
        found[f"{policy}_prompts"] = np.array(prompts(wheel, policy, states))
    return found


def main(folder: Path) -> None:
    kinds: list[tuple[list[str], dict[str, np.ndarray]]] = []
    for wheel in sorted(folder.glob("lerobot-*.whl")):
        release, found = wheel.name.split("-")[1], made_by(wheel)
        same = kinds and all(np.array_equal(kinds[-1][1][name], x) for name, x in found.items())
        if same:
            kinds[-1][0].append(release)
        else:
            kinds.append(([release], found))
    for releases, found in kinds:
        content: dict[str, Any] = {"releases": np.array(releases), **found}
        np.savez_compressed(OUT / f"lerobot-{releases[0]}.npz", **content)
        print(f"lerobot-{releases[0]}.npz: {', '.join(releases)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
