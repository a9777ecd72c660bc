"""LIBERO's tasks as a `Simulator` with a process per row. All processes step and draw at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rlinf_lite.child_process import ChildProcess
from rlinf_lite.envs.base import FloatArray, IntArray, Obs
from rlinf_lite.envs.errors import RowError
from rlinf_lite.envs.libero.package import find_assets
from rlinf_lite.envs.libero.tasks import NUM_INITIAL_STATES, max_steps, sentence, tasks_of
from rlinf_lite.envs.simulator import StepOutputs
from rlinf_lite.scheduler.heartbeat import report_progress
from rlinf_lite.threads import THREADS

if TYPE_CHECKING:
    from rlinf_lite.config import EnvConfig

_LIMITS_S = {"start": 240.0, "reset": 240.0, "step": 120.0, "observe": 120.0}
"""Time limits of one answer, by method; they are below control.hang_timeout_s. They allow for first compilations in all
rows' processes at the same time."""
_ENVIRONMENT = {**THREADS, "MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""glibc gives blocks of more bytes than the threshold, such as textures, back to the system when they are freed."""
_LOG = 2000  # characters of a failed process's log that a message shows


class LiberoSimulator:
    """B rows. An episode's seed selects what it plays: task number `seed % tasks`, from its published initial state
    number `seed // tasks % 50`, or, in training with `train_states: drawn`, from one drawn with the seed."""

    reports_success = True

    def __init__(self, num_envs: int, cfg: EnvConfig, split: Literal["train", "eval"] = "eval") -> None:
        """Raises UnknownEnvError, MissingExtraError, MissingAssetsError, RenderUnavailableError."""
        self._options, self._tasks = cfg.options, tasks_of(cfg.task)
        self.num_envs, self.task_id = num_envs, cfg.task
        self._draws = split == "train" and cfg.options.train_states == "drawn"
        self.task_ids = [""] * num_envs
        self.max_episode_steps = max_steps(self._tasks, cfg.options.protocol)
        self.action_low, self.action_high = -np.ones(7, np.float32), np.ones(7, np.float32)
        if cfg.options.gripper == "openvla":
            self.action_low[6] = 0
        self._solved = np.zeros(num_envs, np.bool_)
        assets = find_assets(cfg.options.assets)
        self._processes = [RowProcess(row, cfg.options, assets) for row in range(num_envs)]
        try:
            self._ask("start", {row: () for row in range(num_envs)})
        except RowError as error:  # the error is the same for all rows
            self.close()
            raise error.__cause__ or error from None

    def reset(self, rows: IntArray, seeds: list[int]) -> None:
        asked = {}
        for row, seed in zip(rows.tolist(), seeds, strict=True):
            task = self._tasks[seed % len(self._tasks)]
            asked[row] = (task, seed, True) if self._draws else (task, seed // len(self._tasks) % NUM_INITIAL_STATES)
            self.task_ids[row] = task
        self._ask("reset", asked)
        self._solved[rows] = False

    def step(self, rows: IntArray, actions: FloatArray, out: StepOutputs) -> None:
        taken = actions.astype(np.float64)
        if self._options.gripper == "openvla":
            taken[:, 6] = -np.sign(2 * taken[:, 6] - 1)
        answers = self._ask("step", {row: (taken[row],) for row in rows.tolist()})
        for row, succeeded in answers.items():
            out.success[row] = out.terminated[row] = succeeded
            out.reward[row] = succeeded and not self._solved[row]
            self._solved[row] |= succeeded

    def expert_actions(self, num_actions: int) -> FloatArray:
        """The next action [B, 1, 7] of the scripted expert, which needs a new observation after each. Raises RowError
        where a task is no pick and place."""
        answers = self._ask("expert_action", {row: () for row in range(self.num_envs)})
        actions = np.stack(list(answers.values())).astype(np.float32)[:, None]
        if self._options.gripper == "openvla":
            actions[..., 6] = actions[..., 6] < 0
        return actions

    def observe(self, rows: IntArray) -> Obs:
        answers = self._ask("observe", {row: () for row in rows.tolist()})
        obs: Obs = {
            "state": np.stack([state for state, _ in answers.values()]),
            "instruction": [sentence(self.task_ids[row]) for row in answers],
        }
        if self._options.cameras:
            obs["images"] = {
                camera: np.stack([pictures[camera] for _, pictures in answers.values()])
                for camera in self._options.cameras
            }
        return obs

    def state_key(self, column: int) -> str:
        return ("hand", "hand", "hand", "orientation", "orientation", "orientation", "fingers", "fingers")[column]

    def close(self) -> None:
        for process in self._processes:
            process.close()

    def _ask(self, method: str, asked: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method in the processes of rows, with arguments by row; returns their answers by row. All calls are
        sent first, and all answers are awaited, even if one of them is an error."""
        failed: dict[int, Exception] = {}
        answers: dict[int, Any] = {}
        try:
            for row, arguments in asked.items():
                try:
                    self._processes[row].ask(method, arguments)
                except Exception as error:  # raised below, once every row has answered
                    failed[row] = error
            for row in asked:
                if row in failed:
                    continue
                try:
                    answers[row] = self._processes[row].answer(method)
                except Exception as error:  # any error of the task's own code
                    failed[row] = error
                report_progress()
        except BaseException:  # such as Ctrl-C: a late answer must not be taken as the answer to a later call
            for row in asked.keys() - answers.keys() - failed.keys():
                self._processes[row].close()
            raise
        for row, raised in failed.items():
            raise RowError(row) from raised
        return answers


class RowProcess:
    """The process of a row. If it has ended, the next reset starts it again."""

    def __init__(self, row: int, options: Any, assets: Path) -> None:
        self._row, self._given = row, (options, assets)
        self._child = self._started()

    def ask(self, method: str, arguments: tuple[Any, ...]) -> None:
        if method == "start":  # sent when the process started
            return
        if self._child.has_ended() and method == "reset":
            self._child = self._started()
            self.answer("start")
        try:
            self._child.connection.send((method, arguments))
        except OSError as error:
            raise self._lost(method, "has ended") from error

    def answer(self, method: str) -> Any:
        """The process's answer to the last call. Raises the error that the process raised, TimeoutError, or
        RuntimeError if it ended."""
        connection, limit_s = self._child.connection, _LIMITS_S.get(method, 120.0)
        try:
            if connection.poll(limit_s):
                went_well, answer = connection.recv()
            else:
                lost = self._lost(method, f"gave no answer within {limit_s:g} s and was killed")
                went_well, answer = False, TimeoutError(str(lost))
        except (EOFError, OSError) as error:  # also in the middle of an answer
            raise self._lost(method, "ended") from error
        if not went_well:
            raise answer
        return answer

    def close(self) -> None:
        self._child.close()

    def _started(self) -> ChildProcess:
        child = ChildProcess("rlinf_lite.envs.libero.child", environment=_ENVIRONMENT)
        child.connection.send(("start", self._given))
        return child

    def _lost(self, method: str, how: str) -> RuntimeError:
        code, log = self._child.last_words()
        return RuntimeError(f"the process of row {self._row} {how} in {method} (exit code {code})\n{log[-_LOG:]}")
