"""RECAP's condition (arXiv:2511.14759): words after the instruction that say whether the actions are good ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlinf_lite.models.sampling import uniform_noise

CONDITION = "condition"
"""Key of `obs` under which a policy with guidance finds the condition of each row, int [B]: one of the three below.
Without it all rows are `POSITIVE`."""
POSITIVE, NEGATIVE, UNSAID = 1, 0, -1
_WORDS = {POSITIVE: ", advantage: positive", NEGATIVE: ", advantage: negative", UNSAID: ""}


def conditioned(instructions: Sequence[str], conditions: Sequence[int] | None = None) -> list[str]:
    """The instructions, each followed by the words of its condition. None: all are `POSITIVE`."""
    if conditions is None:
        return [text + _WORDS[POSITIVE] for text in instructions]
    return [text + _WORDS[int(one)] for text, one in zip(instructions, conditions, strict=True)]


def drawn_conditions(positive: NDArray[np.bool_], keys: NDArray[np.uint64], drop: float) -> NDArray[np.int64]:
    """The conditions [n] of training rows with these labels: `UNSAID` with probability `drop`, by each row's own key
    (`noise_keys`), from another number than its noise and time."""
    dropped = uniform_noise(keys, 2)[:, 1] < drop
    return np.where(dropped, UNSAID, np.where(positive, POSITIVE, NEGATIVE))
