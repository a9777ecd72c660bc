"""Names that a config may use, known without importing what they stand for, and the nearest one to a wrong name."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable

COMPONENTS = ("actor", "rollout", "env")
"""Of an embodied run."""
ROLES = ("actor", "rollout", "reference", "critic", "reward")
"""Of a reasoning run."""
IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

_BUILT_IN = {
    "algorithm.adv_type": (
        *("gae", "grpo", "rloo", "opo", "remax"),
        *("reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    ),
    "algorithm.loss_type": ("ppo", "gspo", "cispo"),
    "env.id": ("maniskill", "tabletop", "gymnasium"),
    "model.id": ("mlp_gaussian", "openvla"),
    "actor.strategy": ("fsdp", "replicated"),
}
# Where names are registered. A registry that is not imported yet holds no names but the built-in ones.
_REGISTRIES = {
    "algorithm.adv_type": ("rlinf_lite.algorithms", "advantage_names"),
    "algorithm.loss_type": ("rlinf_lite.algorithms", "policy_loss_names"),
    "env.id": ("rlinf_lite.envs.registry", "env_names"),
    "model.id": ("rlinf_lite.models.registry", "policy_names"),
    "actor.strategy": ("rlinf_lite.training.strategies", "strategy_names"),
}
NAMED_KEYS = tuple(_BUILT_IN)


def known_names(key: str) -> list[str]:
    """What the key, one of NAMED_KEYS, may name."""
    module_name, function = _REGISTRIES[key]
    registered: Iterable[str] = getattr(sys.modules.get(module_name), function, tuple)()
    return sorted({*_BUILT_IN[key], *registered})


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`Did you mean x?`, or the known names where none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    return f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(known)}."
