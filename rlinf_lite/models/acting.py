"""Acting with a trained policy, one action after the other, for one observation or a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlinf_lite.envs.observations import ObservationError, as_batch, num_rows, take_rows
from rlinf_lite.models.base import Mode, check_mode

if TYPE_CHECKING:
    from rlinf_lite.models.base import Policy


class ActionQueue:
    """Returns a policy's actions one by one; computes a new chunk after `num_actions` of the last were taken.

    `num_actions`: how many actions of a chunk are executed; None: all. Call `reset` when an episode begins; for a
    batch, with the rows in which one begins.
    """

    def __init__(self, policy: Policy, num_actions: int | None = None, mode: Mode = "greedy") -> None:
        """Raises ValueError if `num_actions` is not from 1 to the length of a chunk, and UnknownModeError."""
        check_mode(mode)
        chunk = policy.num_action_chunks
        is_count = isinstance(num_actions, Integral) and not isinstance(num_actions, bool)
        if num_actions is not None and not (is_count and 1 <= num_actions <= chunk):
            raise ValueError(f"num_actions is {num_actions}, and a chunk of this policy has {chunk}. Take 1 to {chunk}")
        self._policy, self._mode = policy, mode
        self._num_actions = chunk if num_actions is None else num_actions
        self._chunk: NDArray[np.float32] | None = None
        self._taken = np.zeros(0, np.int64)

    def reset(self, rows: Sequence[int] | NDArray[np.integer[Any] | np.bool_] | None = None) -> None:
        """Drop the rest of the chunks of these rows (numbers, or a bool for each row; None: all). The next `act`
        computes new chunks for these rows only."""
        if rows is None:
            self._chunk = None
        elif self._chunk is not None:
            self._taken[list(rows)] = self._num_actions

    def act(self, obs: Mapping[str, Any]) -> NDArray[np.float32]:
        """The next action, [D] or [B, D]. `obs` is as in `Policy.act`; only rows that need a new chunk are read.

        Raises as `Policy.act`, and ObservationError if `obs` has another number of rows than the current chunks.
        """
        batch, is_single = as_batch(obs)
        if self._chunk is None or (self._taken == self._num_actions).all():
            self._chunk = np.array(self._policy.act(obs, self._mode))
            self._taken = np.zeros(self._chunk.shape[:-2], np.int64)  # [] or [B]
        elif self._chunk.shape[:-2] != (() if is_single else (num_rows(batch),)):
            raise ObservationError(
                f"the chunk that is executed is {list(self._chunk.shape)}, and this observation has "
                f"{'no batch dimension' if is_single else f'{num_rows(batch)} rows'}. Call reset() when episodes begin"
            )
        elif (spent := np.flatnonzero(self._taken == self._num_actions)).size:
            self._chunk[spent] = self._policy.act(take_rows(batch, spent), self._mode)
            self._taken[spent] = 0
        # a copy: new chunks of rows are written into this one
        actions = np.take_along_axis(self._chunk, self._taken[..., None, None], axis=-2)
        self._taken += 1
        return actions[..., 0, :]
