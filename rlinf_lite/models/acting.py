"""A trained policy as whoever uses it calls it: one observation or a batch, and one action after the other."""

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
    """Actions one by one: the policy is asked for a chunk, and again when `num_actions` of it are taken.

    `num_actions`: how many of a chunk are executed; None: all. Call `reset` where an episode begins, of a batch
    with the rows where one does.
    """

    def __init__(self, policy: Policy, num_actions: int | None = None, mode: Mode = "greedy") -> None:
        """Raises ValueError for a number of actions that no chunk has, UnknownModeError."""
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
        """What is left of a chunk is not executed: of these rows of a batch, by number or with a bool for each, or of
        all. The next `act` asks the policy for theirs alone."""
        if rows is None:
            self._chunk = None
        elif self._chunk is not None:
            self._taken[list(rows)] = self._num_actions

    def act(self, obs: Mapping[str, Any]) -> NDArray[np.float32]:
        """The next action, [D] or [B, D]; of `obs` (see `Policy.act`) those rows are read whose chunk begins. Raises
        what that does, and ObservationError where there are other rows than the chunks that are executed have."""
        batch, is_single = as_batch(obs)
        if self._chunk is None or (self._taken == self._num_actions).all():
            self._chunk = np.array(self._policy.act(obs, self._mode))
            self._taken = np.zeros(self._chunk.shape[:-2], np.int64)  # [] or [B]
        elif self._chunk.shape[:-2] != (() if is_single else (num_rows(batch),)):
            raise ObservationError(
                f"the chunk that is executed is {list(self._chunk.shape)}, and this observation has "
                f"{'no batch dimension' if is_single else f'{num_rows(batch)} rows'}. Call reset() where episodes begin"
            )
        elif (spent := np.flatnonzero(self._taken == self._num_actions)).size:
            self._chunk[spent] = self._policy.act(take_rows(batch, spent), self._mode)
            self._taken[spent] = 0
        # a copy: the chunk is written to where rows get another
        actions = np.take_along_axis(self._chunk, self._taken[..., None, None], axis=-2)
        self._taken += 1
        return actions[..., 0, :]
