"""The tiny checkpoints that the published code of openpi and LeRobot wrote, and what that code computed with them.

FLOW_CHECKPOINTS names another folder of such checkpoints, of other sizes, seeds, cameras or statistics.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_lite.models import load_policy
from rlinf_lite.models.flow.networks import Prefix
from rlinf_lite.models.flow.policy import FlowPolicy
from rlinf_lite.models.flow.sampler import Sampler

FOLDER = Path(os.environ.get("FLOW_CHECKPOINTS", Path(__file__).parents[1] / "fixtures"))
NAMES = sorted(file.parent.name for file in FOLDER.glob("*/golden.npz"))
WITH_PREFIX = [name for name in NAMES if "prefix_out" in np.load(FOLDER / name / "golden.npz").files]


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / name / "golden.npz"))


def tensor(name: str, key: str) -> Tensor:
    return torch.from_numpy(golden(name)[key])


def policy_of(name: str) -> FlowPolicy:
    """The checkpoint's, with the cameras of its golden observations."""
    policy = load_policy(FOLDER / name)
    assert isinstance(policy, FlowPolicy)
    names = [key.removeprefix("image_") for key in golden(name) if golden(name)[key].dtype == np.uint8]
    names = [one for one in names if one != "resized"]
    if policy.cfg.layout == "openpi":  # which calls them by where they are
        policy.cfg = replace(policy.cfg, cameras=dict(zip(policy.cfg.slots, names, strict=False)))
    assert policy.prompts is not None
    policy.prompts._cfg = replace(policy.cfg, long_prompts="cut")  # as the published code does
    return policy.eval()


def observation(name: str) -> dict[str, Any]:
    found = golden(name)
    images = {key.removeprefix("image_"): x for key, x in found.items() if key.startswith("image_") and x.ndim == 4}
    images = {key: x for key, x in images.items() if x.dtype == np.uint8}
    return {"images": images, "state": found["state_raw"], "instruction": found["prompts"].tolist()}


def padded_state(policy: FlowPolicy, name: str) -> Tensor:
    found = golden(name)
    state = torch.from_numpy(found["state"] if "state" in found else found["state_norm"]).float()
    return torch.nn.functional.pad(state, (0, policy.cfg.max_state_dim - state.shape[-1]))


def golden_prefix(policy: FlowPolicy, name: str) -> Prefix:
    """Of the inputs that the published code computed."""
    pixels, image_mask, tokens, token_mask = (
        tensor(name, key) for key in ("pixel_values", "image_masks", "tokens", "token_mask")
    )
    pixels = pixels.to(next(policy.parameters()).dtype)
    return policy.network.prefix(pixels, image_mask, tokens, token_mask, padded_state(policy, name))


def sampler_at(policy: FlowPolicy, num_steps: int) -> Sampler:
    return replace(policy.sampler, num_steps=num_steps)


def largest(one: Tensor, other: Tensor | np.ndarray) -> float:
    return float((one.double() - torch.as_tensor(other).double()).abs().max())
