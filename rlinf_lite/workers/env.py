"""The env worker: it steps its environments stage by stage, in the order in which the policy answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from rlinf_lite.config import Config
from rlinf_lite.config.names import builds_training_envs
from rlinf_lite.config.plan import kept_scenes
from rlinf_lite.envs import (
    ChunkedEnv,
    ChunkResult,
    EnvContractError,
    EnvSpec,
    EpisodeError,
    EpisodeRecord,
    Obs,
    SimulatorError,
    VecEnv,
    balanced_seed,
    ensure_valid_env,
    episode_order,
    episode_seed,
    get_env_spec,
    make_env,
)
from rlinf_lite.envs.check import array_problems, check_ends, check_episodes, check_finite
from rlinf_lite.envs.errors import EpisodeContractError
from rlinf_lite.envs.observations import take_rows
from rlinf_lite.envs.rewards import ObservedReward
from rlinf_lite.registry import env_card
from rlinf_lite.scheduler import Worker
from rlinf_lite.threads import torch_threads
from rlinf_lite.workers.layout import Layout, StagePiece
from rlinf_lite.workers.messages import ActionMessage, ObsMessage, StepResult
from rlinf_lite.workers.recording import EpisodeRecorder

if TYPE_CHECKING:
    from rlinf_lite.workers.collecting import Collector

log = logging.getLogger(__name__)


@runtime_checkable
class _Resumable(Protocol):
    """The methods of a VecEnv that an exact resume needs; optional in custom environments."""

    def state_dict(self) -> list[dict[str, Any]]: ...
    def load_state_dict(self, rows: Sequence[dict[str, Any]]) -> Obs: ...


@dataclass
class _Stage:
    """One slice of this worker's environments, and its progress in the current phase (rollouts or evaluation)."""

    index: int
    env: VecEnv
    env_ids: np.ndarray
    pieces: list[StagePiece]
    num_threads: int
    reward: ObservedReward | None = None
    """Gives the rewards; None: the environment does."""
    actions: dict[int, np.ndarray] = field(default_factory=dict)  # by first row of the piece
    obs: Obs = field(default_factory=Obs)
    t: int = 0
    done: bool = False
    ended: set[int] = field(default_factory=set)
    """Rows in which an episode has ended since the phase began."""

    def begin(self) -> None:
        """Begin a phase; forget the rest of an interrupted one."""
        self.actions, self.t, self.done, self.ended = {}, 0, False, set()

    def reset(self, seeds: Sequence[int]) -> None:
        with self.simulating():
            self.obs = self.env.reset(seeds)
            if not isinstance(self.env, ChunkedEnv):
                check_finite("after reset", self.obs)

    def step(self, actions: np.ndarray) -> ChunkResult:
        """Play a chunk, count it in `t`, and put the next observations into `obs`."""
        with self.simulating():
            before = None if self.reward is None else self.reward.before(self.obs)
            result = self.env.chunk_step(actions)
            if not isinstance(self.env, ChunkedEnv):
                if problems := array_problems(result, actions.shape[:2]):
                    raise EpisodeContractError(" ".join(problems), range(len(self.env_ids)))
                when = f"in chunk {self.t + 1} since the phase began"
                check_ends(when, result)
                check_episodes(when, result, len(self.env_ids))
                check_finite(when, result.obs, result)
            if self.reward is not None and before is not None:
                result = self.reward.judged(result, before)
        self.obs = result.obs
        self.t += 1
        self.ended.update(record.env_id for record in result.episodes)
        return result

    @contextmanager
    def simulating(self) -> Iterator[None]:
        """A context for simulation, with `env.num_threads` threads; errors name the environments by their ids in the
        run."""
        try:
            with torch_threads(self.num_threads):
                yield
        except EpisodeError as error:
            error.number(self.env_ids.tolist())
            raise
        except SystemExit as error:  # raised by a VecEnv: it would end the worker without a message
            raised = SimulatorError(type(self.env).__name__, error, range(len(self.env_ids)))
            raised.number(self.env_ids.tolist())
            raise raised from error


class EnvWorker(Worker):
    """Owns a contiguous block of environments, in `rollout.pipeline_stage_num` stages that take turns with the policy.

    While the policy chooses actions for one stage, another stage is simulated. Observations go to the rollout workers
    that `Layout` names; the driver gets only episode records, timings and environment states.
    """

    failover = "worker"

    cfg: Config
    layout: Layout
    eval_layout: Layout
    num_chunks: int
    num_scenes: int
    next_step: int
    stages: list[_Stage]
    eval_stages: list[_Stage]
    collector: Collector | None
    """Writer of demonstrations, from the first wave to the last."""

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.num_scenes = kept_scenes(cfg)
        self.eval_stages = []
        self.collector = None

    def init(self, layout: Layout) -> EnvSpec:
        """Build the environments (those of training; of evaluation, if training plays nothing) and return their spec.

        Raises:
            EnvContractError: if an environment breaks the protocol; the message explains how.
        """
        self.layout, self.next_step = layout, 0
        self.eval_layout = layout.of_evaluation(self.cfg.env.eval.num_envs)
        if not builds_training_envs(self.cfg):
            self.stages = self.eval_stages = self._build_stages("eval", self.eval_layout)
        else:
            self.stages = self._build_stages("train", layout)
        first = self.stages[0]
        ensure_valid_env(first.env, self.cfg.env.id)
        first.reset(self._first_seeds(first))
        if first.reward is not None:
            with first.simulating():
                first.reward.of(first.obs)  # what it cannot judge is said before anything is played
        spec = get_env_spec(first.env, first.obs)
        self.num_chunks = self.cfg.rollout.num_chunks or -(-spec.max_episode_steps // self.cfg.model.num_action_chunks)
        for stage in self.stages[1:]:
            stage.reset(self._first_seeds(stage))
        return spec

    def interact(self, step: int | None = None) -> dict[str, Any]:
        """Play `num_chunks` decisions in every environment; their indices begin at `step * num_chunks`. `step=None`:
        the step after that of the last call (a restarted worker does not know that one).

        Returns the finished episodes, the number of env steps, this worker's spans, and `state_dict` at the end.
        """
        step = self.next_step if step is None else step
        self.next_step = step + 1
        for stage in self.stages:
            if not self.cfg.env.train.auto_reset:
                with self.timer("reset"):
                    stage.reset([episode_seed(seed, step, self.num_scenes) for seed in self._first_seeds(stage)])
            stage.begin()
            self._send_obs(stage, stage.env_ids, step * self.num_chunks, tag=step)
        records: list[EpisodeRecord] = []
        num_env_steps = 0
        for stage, result in self._answers(self.stages):
            num_env_steps += int(result.executed.sum())
            stage.done = stage.t == self.num_chunks
            self._send_obs(stage, stage.env_ids, step * self.num_chunks + stage.t, result, stage.done, tag=step)
            records += [replace(record, env_id=int(stage.env_ids[record.env_id])) for record in result.episodes]
        states = self.state_dict()
        return {"episodes": records, "num_env_steps": num_env_steps, "spans": self.pop_spans(), "states": states}

    def evaluate(self) -> dict[str, Any]:
        """Play the evaluation's seeded episodes, in waves of `env.eval.num_envs`.

        Returns one record per episode, videos of the first `env.eval.num_videos`, and the rules of the game: the time
        limit in env steps, and whether terminations were ignored. Raises EnvContractError if an episode does not end
        within its time limit.
        """
        cfg, card = self.cfg.env.eval, env_card(self.cfg.env.id)
        num_tasks = card.num_tasks(self.cfg.env.task)
        waves = episode_order(cfg.num_episodes, cfg.num_envs, card.num_scenes(self.cfg.env.task))
        if not self.eval_stages:
            self.eval_stages = self._build_stages("eval", self.eval_layout)
        records: dict[int, EpisodeRecord] = {}  # by number of the episode
        num_decisions = -(-self.eval_stages[0].env.max_episode_steps // self.cfg.model.num_action_chunks)
        recorder = EpisodeRecorder(min(cfg.num_videos, cfg.num_episodes), num_decisions)
        for number, wave in enumerate(waves, 1):
            for stage in self.eval_stages:
                episodes = self._episodes(stage, wave)
                stage.begin()
                stage.reset([balanced_seed(cfg.seed, int(episode), num_tasks) for episode in episodes])
                self._send_obs(stage, episodes, 0)
                recorder.begin(episodes, stage.obs)
            for stage, result in self._answers(self.eval_stages):
                episodes = self._episodes(stage, wave)
                for record in result.episodes:
                    episode = int(episodes[record.env_id])
                    if episode < cfg.num_episodes:  # a VecEnv may play on with another episode, which does not count
                        records.setdefault(episode, replace(record, env_id=episode))
                stage.done = len(stage.ended) == len(stage.env_ids) or stage.t == num_decisions
                last = stage.done and number == len(waves)
                if last or not stage.done:
                    self._send_obs(stage, episodes, stage.t, result, last=last)
                recorder.add(episodes, stage.t, result)
            for stage in self.eval_stages:
                if len(stage.ended) < len(stage.env_ids):
                    row = min(set(range(len(stage.env_ids))) - stage.ended)
                    limit = stage.env.max_episode_steps
                    text = f"no episode of row {row} ended within max_episode_steps={limit}; set truncated there."
                    raise EnvContractError(text, self.cfg.env.id)
        self.pop_spans()
        env = self.eval_stages[0].env
        ignored = getattr(env, "ignore_terminations", cfg.ignore_terminations)  # if null, the env decides
        played = {"max_episode_steps": env.max_episode_steps, "ignore_terminations": ignored}
        return {"episodes": list(records.values()), "videos": recorder.videos, "played": played}

    def _episodes(self, stage: _Stage, wave: np.ndarray) -> np.ndarray:
        """The numbers of the evaluation episodes that a stage plays in a wave. Environments that only pad the stages to
        equal size get numbers that do not count."""
        ids = stage.env_ids
        return np.where(ids < len(wave), wave[np.minimum(ids, len(wave) - 1)], self.cfg.env.eval.num_episodes + ids)

    def begin_demonstrations(self, directory: str, student: str | None = None, first_episode: int = 0) -> None:
        """Begin this worker's part of the dataset in `directory`, and forget that of an interrupted collection. For
        `student` and `first_episode` see `Collector`."""
        from rlinf_lite.workers.collecting import Collector  # needs torch, which nothing else here needs

        first = self.stages[0]
        acts = None if student is None else Path(student)
        where = Path(directory), self.rank, self.device
        self.collector = Collector(self.cfg, first.env, first.obs, *where, acts, first_episode)

    def collect_demonstrations(self, wave: np.ndarray) -> None:
        """Let the expert play one episode in each of this worker's environments, and write them. `wave`: the numbers of
        the episodes of all environments [num_envs]; see `episode_order`."""
        assert self.collector is not None, "collect_demonstrations before begin_demonstrations"
        for stage in self.stages:
            self.check_abort("collecting demonstrations")
            with stage.simulating():
                self.collector.play(stage.env, wave[stage.env_ids])

    def finish_demonstrations(self) -> dict[str, Any]:
        """Finish this worker's part of the dataset. Returns the episode records and the number of env steps."""
        assert self.collector is not None, "finish_demonstrations before begin_demonstrations"
        collector, self.collector = self.collector, None
        return collector.finish()

    def state_dict(self) -> list[dict[str, Any]]:
        """The present state of the environments, one entry each, for an exact resume on any placement."""
        if not self.cfg.env.train.auto_reset:
            return []  # every step begins with a reset; its seeds depend on the step only
        return [
            {**row, "env_id": int(env_id)}
            for stage in self.stages
            if isinstance(stage.env, _Resumable)
            for env_id, row in zip(stage.env_ids, stage.env.state_dict(), strict=True)
        ]

    def load_state_dict(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Restore this worker's environments from `state_dict` entries, by replay. `rows` may include those of other
        workers; environments without an entry are reset. Returns the new `state_dict`."""
        by_id = {row["env_id"]: row for row in rows}
        for stage in self.stages if self.cfg.env.train.auto_reset else ():
            if not isinstance(stage.env, _Resumable):
                log.warning("%s has no state_dict: unfinished episodes start again, the resume is not exact", stage.env)
                continue
            missing = [env_id for env_id in stage.env_ids.tolist() if env_id not in by_id]
            if missing:
                log.warning("%d environments have no saved state and start again: %s", len(missing), missing)
                with stage.simulating():
                    stage.obs = stage.env.reset(self._first_seeds(stage))
                by_id |= dict(zip(stage.env_ids.tolist(), stage.env.state_dict(), strict=True)) | by_id
            if len(missing) < len(stage.env_ids):
                with stage.simulating():
                    stage.obs = stage.env.load_state_dict([by_id[env_id] for env_id in stage.env_ids.tolist()])
        return self.state_dict()

    def _build_stages(self, split: Literal["train", "eval"], layout: Layout) -> list[_Stage]:
        pieces = [piece for piece in layout.pieces() if piece.env_rank == self.rank]
        own = self.cfg.env.train.reward
        reward = ObservedReward(own) if split == "train" and own.id is not None else None
        return [
            _Stage(
                stage,
                self._made(split, layout.stage_size),
                layout.env_ids(self.rank, stage),
                [piece for piece in pieces if piece.stage == stage],
                self.cfg.env.num_threads,
                reward,
            )
            for stage in range(layout.num_stages)
        ]

    def _made(self, split: Literal["train", "eval"], num_envs: int) -> VecEnv:
        try:
            env = make_env(self.cfg.env, split, num_envs)
        except SystemExit as error:
            raise SimulatorError(self.cfg.env.id, error, range(num_envs)) from error
        if split == "train" and isinstance(env, ChunkedEnv):
            env.num_scenes = self.num_scenes
        return env

    def _first_seeds(self, stage: _Stage) -> list[int]:
        group_size = self.cfg.algorithm.group_size
        return [
            balanced_seed(self.cfg.runner.seed, int(env_id) // group_size, self.num_scenes) for env_id in stage.env_ids
        ]

    def _answers(self, stages: list[_Stage]) -> Iterator[tuple[_Stage, ChunkResult]]:
        """Step each stage as soon as all its rollout workers have sent their actions, until every stage is done."""
        timeout_s = self.cfg.runner.phase_timeout_s
        while not all(stage.done for stage in stages):
            message: ActionMessage
            _, message = self.recv_any("rollout", timeout_s)
            stage = stages[message.stage]
            stage.actions[message.start] = message.actions
            if len(stage.actions) < len(stage.pieces):
                continue
            actions = np.concatenate([stage.actions[piece.start] for piece in stage.pieces])
            stage.actions = {}
            with self.timer(f"step stage {stage.index}"):
                result = stage.step(actions)
            yield stage, result

    def _send_obs(
        self,
        stage: _Stage,
        noise_ids: np.ndarray,
        decision: int,
        result: ChunkResult | None = None,
        last: bool = False,
        tag: int | None = None,
    ) -> None:
        """Send each rollout worker its rows, with the results of their last chunk; `tag` is the training step."""
        success = np.full(len(stage.env_ids), -1, np.int8)
        for record in () if result is None else result.episodes:
            if record.success_once is not None:
                success[record.env_id] = record.success_once
        for piece in stage.pieces:
            rows, answer = slice(piece.start, piece.stop), None
            if result is not None:
                final_rows, final_obs = np.empty(0, dtype=np.int64), None
                if result.final_obs is not None:
                    ended, obs_of_ended = result.final_obs
                    inside = np.flatnonzero((ended >= piece.start) & (ended < piece.stop))
                    final_rows, final_obs = ended[inside] - piece.start, take_rows(obs_of_ended, inside)
                played = (result.rewards[rows], result.terminated[rows], result.truncated[rows], result.executed[rows])
                answer = StepResult(*played, success[rows], final_rows, final_obs)
            obs = take_rows(stage.obs, rows)
            message = ObsMessage(stage.index, piece.start, stage.t, obs, noise_ids[rows], decision, answer, last)
            self.send(message, "rollout", piece.rollout_rank, tag)
