"""`ChunkedEnv`: episodes, time limits, auto-reset, seeds and resume, for all simulators."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from rlinf_lite.envs.base import (
    ChunkResult,
    Demonstrator,
    EpisodeRecord,
    FloatArray,
    IntArray,
    Obs,
    first_non_finite,
    put_rows,
)
from rlinf_lite.envs.errors import (
    WHY_NOT_FINITE,
    EnvContractError,
    EnvError,
    EpisodeContractError,
    NonFiniteError,
    NoTimeLimitError,
    RowError,
    SimulatorError,
)
from rlinf_lite.envs.observations import take_rows
from rlinf_lite.envs.seeding import env_seed, episode_seed
from rlinf_lite.envs.simulator import Simulator, StepOutputs
from rlinf_lite.scheduler.heartbeat import report_progress

log = logging.getLogger(__name__)


class ChunkedEnv:
    """A `VecEnv` made of a `Simulator`.

    Ends of episodes:

    | auto_reset | ignore_terminations | an episode ends at        | flag at that step       | the row's next chunk |
    |------------|---------------------|---------------------------|-------------------------|----------------------|
    | true       | false               | termination or time limit | terminated or truncated | the next episode     |
    | true       | true                | time limit                | truncated               | the next episode     |
    | false      | false               | termination or time limit | terminated or truncated | frozen until `reset` |
    | false      | true                | time limit                | truncated               | frozen until `reset` |

    A termination at the step of the time limit counts as terminated. The steps after the end of an episode, up to the
    end of the chunk, and all steps of frozen rows are not executed: reward 0, both flags False, `executed` False. In
    all four cases `final_obs` holds the last observations of the episodes that ended in the chunk. A row is reset at
    the end of the chunk; a frozen row keeps its last observation. With `ignore_terminations=None`, terminations are
    ignored if the simulator `reports_success`.

    A step that does not report success counts as one without success if another step of its episode reports it, and in
    every episode that ends after an episode with a report.

    Seeds: `reset(seeds=...)` makes each seed a row's first seed; the k-th episode from then on has
    `episode_seed(first_seed, k, num_scenes)`.
    """

    num_scenes: int = 1
    """Seeds of a row keep their remainder modulo this number, with which the row keeps its scene."""

    def __init__(
        self,
        simulator: Simulator,
        *,
        auto_reset: bool = True,
        ignore_terminations: bool | None = False,
        max_episode_steps: int | None = None,
    ) -> None:
        limit = max_episode_steps or simulator.max_episode_steps
        if not limit:
            raise NoTimeLimitError(
                f"{simulator.task_id} has no time limit of its own: set max_episode_steps in env.train and env.eval."
            )
        self.simulator = simulator
        self.auto_reset = auto_reset
        self.ignore_terminations = ignore_terminations
        self.num_envs = simulator.num_envs
        self.max_episode_steps = int(limit)
        self.action_low = np.asarray(simulator.action_low, np.float32)
        self.action_high = np.asarray(simulator.action_high, np.float32)
        self.action_dim = int(self.action_low.shape[0])

        batch = self.num_envs
        self._all_rows = np.arange(batch)
        self._first_seeds = [env_seed(0, row) for row in range(batch)]
        self._episode_index = [-1] * batch  # before the first reset
        self._seeds = list(self._first_seeds)
        self._ended = np.ones(batch, np.bool_)
        self._obs: Obs | None = None  # after the last chunk, all rows
        self._obs_given_out = False

        # state of the current episode, by row
        self._length = np.zeros(batch, np.int64)
        self._return = np.zeros(batch, np.float64)
        self._success_once = np.full(batch, -1, np.int8)
        self._success_at_end = np.full(batch, -1, np.int8)
        self._steps_to_success = np.zeros(batch, np.int64)  # 0: none yet
        self._history = np.zeros((batch, self.max_episode_steps, self.action_dim), np.float32)
        self._out = StepOutputs.empty(batch)
        self._reports_success = False  # whether some episode has reported success or failure

    @property
    def state_names(self) -> Sequence[str] | None:
        """Names of the state's dimensions; None if the simulator has none."""
        return getattr(self.simulator, "state_names", None)

    @property
    def action_names(self) -> Sequence[str] | None:
        """Names of the action's dimensions; None if the simulator has none."""
        return getattr(self.simulator, "action_names", None)

    def reset(self, seeds: Sequence[int] | None = None, env_ids: Sequence[int] | None = None) -> Obs:
        """Start new episodes in rows `env_ids` (default: all); see `VecEnv.reset`."""
        rows = self._all_rows if env_ids is None else np.asarray(env_ids, np.int64)
        if seeds is not None:
            if len(seeds) != len(rows):
                raise ValueError(f"{len(seeds)} seeds for {len(rows)} rows: reset takes one seed per row")
            for row, seed in zip(rows.tolist(), seeds, strict=True):
                self._first_seeds[row], self._episode_index[row] = int(seed), -1
        if self._obs is None and len(rows) < self.num_envs:
            raise ValueError("the first reset must be of all rows: call reset() without env_ids")
        self._begin(rows)
        self._observe(rows)
        return self._pending()

    def chunk_step(self, actions: FloatArray) -> ChunkResult:
        """Execute actions [B, C, D], clipped to the action bounds; see `VecEnv.chunk_step`.

        Raises NonFiniteError for a reward, an observation or an action that is NaN or infinite, and SimulatorError for
        errors of the simulator's own code; both name the row, the step and the episode.
        """
        if self._obs is None:
            raise RuntimeError("chunk_step before the first reset")
        actions = self._clipped(actions)
        num_steps = actions.shape[1]
        shape = (self.num_envs, num_steps)
        result = ChunkResult(
            obs={},
            rewards=np.zeros(shape, np.float32),
            terminated=np.zeros(shape, np.bool_),
            truncated=np.zeros(shape, np.bool_),
            executed=np.zeros(shape, np.bool_),
        )
        rows = np.flatnonzero(~self._ended)
        ended: list[IntArray] = []
        for step in range(num_steps):
            if not rows.size:
                break
            self._simulate(rows, actions[:, step])
            result.rewards[rows, step] = self._out.reward[rows]
            result.executed[rows, step] = True
            ends = truncated = (self._length[rows] >= self.max_episode_steps) | self._out.truncated[rows]
            if not self.ignore_terminations:
                terminated = self._out.terminated[rows]
                ends, truncated = truncated | terminated, truncated & ~terminated
                result.terminated[rows, step] = terminated
            result.truncated[rows, step] = truncated
            if ends.any():
                ended.append(rows[ends])
                self._observe(ended[-1])
                result.episodes.extend(self._record(row) for row in ended[-1].tolist())
                self._ended[ended[-1]] = True
                rows = rows[~ends]
        bad = first_non_finite(result.rewards)
        if bad is not None:  # checked before rows that ended are reset
            row, column = bad
            step = int(self._length[row] - result.executed[row].sum()) + column + 1
            self._not_finite(row, step, f"the reward is {result.rewards[bad]}: {WHY_NOT_FINITE}")
        if rows.size:
            self._observe(rows)
        if ended:
            self._finish(np.sort(np.concatenate(ended)), result)
        result.obs = self._pending()
        return result

    def expert_actions(self, num_actions: int) -> FloatArray:
        """The next actions of the simulator's expert [B, n, D], zeros in frozen rows; see `Demonstrator`."""
        if not isinstance(self.simulator, Demonstrator):
            raise EnvContractError(
                f"{self.simulator.task_id} has no scripted expert; give its Simulator expert_actions(num_actions)."
            )
        actions: FloatArray = self._call(self._all_rows, self.simulator.expert_actions, num_actions)
        actions[self._ended] = 0
        return actions

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of each row: a dict of numbers and the actions of the current episode, float32 [L, D].

        Loading replays these actions, so that it is exact for every simulator that is deterministic. A row may be
        loaded into any row of any environment with the same task and settings.
        """
        return [
            {
                "first_seed": self._first_seeds[row],
                "episode_index": self._episode_index[row],
                "frozen": bool(self._ended[row]),
                "return": float(self._return[row]),
                "reports_success": self._reports_success,
                "actions": self._history[row, : self._length[row]].copy(),
            }
            for row in range(self.num_envs)
        ]

    def load_state_dict(self, rows: Sequence[dict[str, Any]]) -> Obs:
        """Replay the saved actions of every row and return the pending observation, as it was when they were saved.

        All replays end at the same step, because a batched simulation steps all rows at once.
        """
        if len(rows) != self.num_envs:
            raise ValueError(f"{len(rows)} saved rows for an environment of {self.num_envs}")
        self._first_seeds = [int(row["first_seed"]) for row in rows]
        self._episode_index = [int(row["episode_index"]) - 1 for row in rows]
        actions = [np.asarray(row["actions"], np.float32).reshape(-1, self.action_dim) for row in rows]
        lengths = np.array([len(part) for part in actions])
        longest = int(lengths.max())
        padded = np.zeros((self.num_envs, longest, self.action_dim), np.float32)
        for row, part in enumerate(actions):
            padded[row, longest - len(part) :] = part
        if self._obs is None:  # a batched simulator needs all rows in its first reset
            self._call(self._all_rows, self.simulator.reset, self._all_rows, list(self._first_seeds))
        for step in range(longest + 1):
            starting = np.flatnonzero(longest - lengths == step)
            if starting.size:
                self._begin(starting)
            if step < longest:
                playing = np.flatnonzero(longest - lengths <= step)
                self._simulate(playing, padded[:, step])
        self._ended = np.array([bool(row["frozen"]) for row in rows])
        saved = [float(row["return"]) for row in rows]
        drifted = [row for row in range(self.num_envs) if saved[row] != self._return[row]]
        if drifted:
            row = drifted[0]
            log.warning(
                "%d of %d rows replayed their episode to another return (row %d: %r, was %r): %s does not repeat "
                "itself exactly, and the run goes on from the replayed states",
                len(drifted), self.num_envs, row, float(self._return[row]), saved[row], self.simulator.task_id,
            )  # fmt: skip
        self._reports_success |= any(row.get("reports_success", False) for row in rows)
        self._observe(self._all_rows)
        return self._pending()

    @property
    def last_success(self) -> FloatArray:
        """Success that the last step reported, by row [B]: 1 success, 0 none, -1 not reported. For `check_env`."""
        return self._out.success

    def close(self) -> None:
        self.simulator.close()

    def _clipped(self, actions: FloatArray) -> FloatArray:
        if actions.ndim != 3 or actions.shape[0] != self.num_envs or actions.shape[2] != self.action_dim:
            raise ValueError(f"actions must be [B={self.num_envs}, C, D={self.action_dim}], got {list(actions.shape)}")
        bad = first_non_finite(actions)  # before clipping, which hides infinity
        if bad is not None:
            row, step, dimension = bad
            self._not_finite(
                row,
                int(self._length[row]) + step + 1,
                f"dimension {dimension} of the action is {actions[bad]}, from a finite observation: the policy has "
                "diverged, or what it computes of this observation divides by zero or overflows",
            )
        clipped: FloatArray = np.clip(actions, self.action_low, self.action_high, dtype=np.float32)
        return clipped

    def _begin(self, rows: IntArray) -> None:
        """Start the next episode of `rows`."""
        report_progress()
        for row in rows.tolist():
            self._episode_index[row] += 1
            self._seeds[row] = episode_seed(self._first_seeds[row], self._episode_index[row], self.num_scenes)
        self._length[rows] = 0
        self._call(rows, self.simulator.reset, rows, [self._seeds[row] for row in rows.tolist()])
        if self.ignore_terminations is None:
            self.ignore_terminations = bool(getattr(self.simulator, "reports_success", False))
        self._ended[rows] = False
        self._return[rows] = 0.0
        self._success_once[rows] = -1
        self._success_at_end[rows] = -1
        self._steps_to_success[rows] = 0

    def _simulate(self, rows: IntArray, actions: FloatArray) -> None:
        """Take one env step of `rows`; the results are in `self._out`."""
        out = self._out
        self._call(rows, self.simulator.step, rows, actions, out)
        self._history[rows, self._length[rows]] = actions[rows]
        self._length[rows] += 1
        report_progress()
        self._return[rows] += out.reward[rows]
        success = out.success[rows]
        wrong = np.flatnonzero((success != 0) & (np.abs(success) != 1))  # NaN, too
        if wrong.size:
            row = int(rows[wrong[0]])
            text = f"success is {success[wrong[0]]:g}; a simulator reports 1, 0, or -1 where it does not know."
            raise EpisodeContractError(text, [row], int(self._length[row]), self._seeds[row])
        first = rows[(success == 1) & (self._success_once[rows] < 1)]
        self._steps_to_success[first] = self._length[first]
        self._success_once[rows] = np.maximum(self._success_once[rows], success)
        self._success_at_end[rows] = success

    def _finish(self, rows: IntArray, result: ChunkResult) -> None:
        assert self._obs is not None
        result.final_obs = (rows, take_rows(self._obs, rows))
        if self.auto_reset:
            self._begin(rows)
            self._observe(rows)

    def _record(self, row: int) -> EpisodeRecord:
        once, at_end = int(self._success_once[row]), int(self._success_at_end[row])
        if once >= 0:
            self._reports_success = True
        if self._reports_success:
            once, at_end = max(once, 0), max(at_end, 0)
        task_ids = getattr(self.simulator, "task_ids", None)  # a reset may have changed them
        return EpisodeRecord(
            env_id=row,
            task_id=task_ids[row] if task_ids else self.simulator.task_id,
            seed=self._seeds[row],
            length=int(self._length[row]),
            return_=float(self._return[row]),
            success_once=None if once < 0 else bool(once),
            success_at_end=None if at_end < 0 else bool(at_end),
            steps_to_success=int(self._steps_to_success[row]) or None,
        )

    def _call(self, rows: IntArray, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the simulator; errors that it raises name the rows that it was called for."""
        try:
            return method(*args)
        except EnvError:
            raise
        except (Exception, SystemExit) as error:  # any error of the simulator's own code
            cause: BaseException = error
            found, name = rows.tolist(), method.__name__
            if isinstance(error, RowError) and error.__cause__ is not None:
                cause, found = error.__cause__, [error.row]
            step, seed = None, None
            if len(found) == 1:
                step, seed = int(self._length[found[0]]) + (name == "step"), self._seeds[found[0]]
            if isinstance(cause, EnvContractError):
                raise EpisodeContractError(" ".join(cause.problems), found, step, seed) from cause
            if isinstance(cause, EnvError | MemoryError) or type(cause).__name__ == "OutOfMemoryError":  # torch
                raise cause from cause.__cause__
            raise SimulatorError(name, cause, found, step, seed) from cause

    def _not_finite(self, row: int, step: int, what: str) -> NoReturn:
        raise NonFiniteError(what, [row], step, self._seeds[row])

    def _observe(self, rows: IntArray) -> None:
        """Store the present observations of `rows` as their pending ones."""
        part: Obs = self._call(rows, self.simulator.observe, rows)
        state, bad = part.get("state"), None
        if state is not None and state.dtype.kind == "f" and state.ndim == 2:  # check_env reports other mistakes
            bad = first_non_finite(state)
        if state is not None and bad is not None:
            row, column = int(rows[bad[0]]), bad[1]
            name = getattr(self.simulator, "state_key", lambda column: "")(column)
            key = f"state[{column}]" + (f" ({name})" if name else "")
            self._not_finite(row, int(self._length[row]), f"{key} is {state[bad]}: {WHY_NOT_FINITE}")
        if len(rows) == self.num_envs and np.array_equal(rows, self._all_rows):
            self._obs, self._obs_given_out = part, False
            return
        assert self._obs is not None
        if self._obs_given_out:
            self._obs, self._obs_given_out = take_rows(self._obs, self._all_rows), False
        put_rows(self._obs, rows, part)

    def _pending(self) -> Obs:
        assert self._obs is not None
        self._obs_given_out = True
        return self._obs
