"""Train Stable-Baselines3's PPO on ManiSkill PushCube-v1 from states: the opponent in `ppo_vs_sb3.py`.

    python benchmarks/sb3_worker.py --seed 1 --total-steps 500000 --out sb3.json

The environment is ManiSkill's own, stepped in the usual way; it is built without a renderer, as in this project.
Training and evaluation episodes start from the same seeds as this project's. The numbers of threads are the defaults of
Stable-Baselines3 and torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from rlinf_lite.envs.maniskill.card import ManiSkillOptions
from rlinf_lite.envs.maniskill.setup import import_maniskill, plan_backends
from rlinf_lite.envs.seeding import env_seed, episode_seed


class PushCube(gymnasium.Env[NDArray[np.float32], NDArray[np.float32]]):
    """One ManiSkill environment in numpy, with this project's episode seeds.

    `success` is the effect of reaching the goal: `terminate` ends the episode without a bootstrap value, `bootstrap`
    ends it like a time limit (Stable-Baselines3 then adds gamma * V(last observation)), `continue` plays to the time
    limit.
    """

    def __init__(self, first_seed: int, success: str, max_episode_steps: int) -> None:
        import_maniskill()
        backends = plan_backends(ManiSkillOptions(sim_backend="physx_cpu"))
        made: Any = gymnasium.make(
            "PushCube-v1",
            num_envs=1,
            obs_mode="state",
            control_mode="pd_joint_delta_pos",
            reward_mode="normalized_dense",
            sim_backend=backends.sim,
            render_backend=backends.render,
        )
        self.env: Any = made.unwrapped
        self.first_seed, self.success, self.max_episode_steps = first_seed, success, max_episode_steps
        self.episode, self.elapsed = -1, 0
        size = self.env.single_observation_space.shape
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, size, np.float32)
        self.action_space = self.env.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start the episode of `seed`; None: the next episode of this environment."""
        self.elapsed = 0
        if seed is None:
            self.episode += 1
            seed = episode_seed(self.first_seed, self.episode)
        obs, _ = self.env.reset(seed=seed)
        return obs[0].numpy(), {}

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        obs, reward, _, _, info = self.env.step(action)
        self.elapsed += 1
        succeeded = bool(info["success"])
        terminated = succeeded and self.success == "terminate"
        cut = self.elapsed >= self.max_episode_steps or (succeeded and self.success == "bootstrap")
        return obs[0].numpy(), float(reward), terminated, cut and not terminated, {"success": succeeded}


@dataclass
class Evaluator:
    """Measures the success of the greedy policy over fixed seeded episodes, each played to the time limit."""

    num_episodes: int
    seed: int
    max_episode_steps: int
    envs: list[PushCube] = field(init=False)

    def __post_init__(self) -> None:
        num_envs = min(self.num_episodes, 20)
        self.envs = [PushCube(0, "continue", self.max_episode_steps) for _ in range(num_envs)]

    def __call__(self, model: PPO) -> dict[str, float]:
        once: list[bool] = []
        at_end: list[bool] = []
        for first in range(0, self.num_episodes, len(self.envs)):
            envs = self.envs[: self.num_episodes - first]
            obs = np.stack([env.reset(seed=env_seed(self.seed, first + i))[0] for i, env in enumerate(envs)])
            reached = np.zeros(len(envs), np.bool_)
            success = reached
            for _ in range(self.max_episode_steps):
                actions, _ = model.predict(obs, deterministic=True)  # clipped to the action bounds
                steps = [env.step(action) for env, action in zip(envs, actions, strict=True)]
                obs = np.stack([step[0] for step in steps])
                success = np.array([step[4]["success"] for step in steps])
                reached = reached | success
            once += reached.tolist()
            at_end += success.tolist()
        return {"success_once": float(np.mean(once)), "success_at_end": float(np.mean(at_end))}


class Curve(BaseCallback):
    """Callback that evaluates between updates; evaluations do not count as training time."""

    def __init__(self, evaluate: Evaluator, every: int, save: Callable[[Curve], None]) -> None:
        super().__init__()
        self.evaluate, self.every, self.save_json = evaluate, every, save
        self.rows: list[dict[str, float]] = []
        self.next_at = every
        self.eval_s = 0.0
        self.start = time.perf_counter()

    @property
    def train_s(self) -> float:
        """Seconds of sampling and updating so far."""
        return time.perf_counter() - self.start - self.eval_s

    def _on_step(self) -> bool:
        return True

    def _on_training_start(self) -> None:
        self.start = time.perf_counter()

    def _on_rollout_start(self) -> None:
        if self.num_timesteps >= self.next_at:
            self.next_at += self.every
            self.measure()

    def measure(self) -> None:
        row: dict[str, float] = {"env_steps": self.num_timesteps, "train_s": self.train_s}
        begin = time.perf_counter()
        row |= self.evaluate(self.model)  # type: ignore[arg-type]
        self.eval_s += time.perf_counter() - begin
        self.rows.append(row)
        print(json.dumps({key: round(value, 3) for key, value in row.items()}), flush=True)
        self.save_json(self)


def main() -> None:
    args = parse_args()
    env = make_vec_env(args)
    model = make_model(args, env)
    if args.in_turn:
        learn_in_turn(args, model)
    else:
        evaluator = Evaluator(args.eval_episodes, args.eval_seed, args.max_episode_steps)

        def save(curve: Curve) -> None:
            rate = model.num_timesteps / curve.train_s
            content = {"settings": vars(args), "threads": torch.get_num_threads(), "env_steps_per_s": rate}
            Path(args.out).write_text(json.dumps(content | {"curve": curve.rows}, indent=1))

        curve = Curve(evaluator, args.eval_every, save)
        model.learn(args.total_steps, callback=curve)
        if not curve.rows or curve.rows[-1]["env_steps"] < model.num_timesteps:
            curve.measure()
    env.close()


def learn_in_turn(args: argparse.Namespace, model: PPO) -> None:
    """Read numbers of rollouts from stdin, one per line; learn for each, and print its env steps/s."""
    print("ready", flush=True)
    first = True
    for line in sys.stdin:
        num_steps = int(line) * args.num_envs * args.num_steps
        start = time.perf_counter()
        model.learn(num_steps, reset_num_timesteps=first)
        print(num_steps / (time.perf_counter() - start), flush=True)
        first = False


def make_vec_env(args: argparse.Namespace) -> VecEnv:
    def maker(env_id: int) -> Callable[[], PushCube]:
        return lambda: PushCube(env_seed(args.seed, env_id), args.success, args.max_episode_steps)

    makers = [maker(env_id) for env_id in range(args.num_envs)]
    return DummyVecEnv(makers) if args.vec_env == "dummy" else SubprocVecEnv(makers)  # type: ignore[arg-type]


def make_model(args: argparse.Namespace, env: VecEnv) -> PPO:
    def learning_rate(remaining: float) -> float:
        if args.lr_schedule == "constant":
            return float(args.lr)
        return float(args.lr * (args.min_lr_ratio + (1.0 - args.min_lr_ratio) * remaining))

    return PPO(
        "MlpPolicy",
        env,
        learning_rate=learning_rate,
        n_steps=args.num_steps,
        batch_size=args.batch_size,
        n_epochs=args.epochs,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        clip_range=args.clip,
        vf_coef=args.value_coef / 2,  # its value loss is the squared error, this project's is half of it
        max_grad_norm=args.clip_grad,
        target_kl=None if args.target_kl is None else args.target_kl / 1.5,  # it stops at 1.5 times its target
        policy_kwargs={
            "net_arch": {"pi": args.hidden_sizes, "vf": args.hidden_sizes},
            "activation_fn": {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU, "silu": torch.nn.SiLU}[args.activation],
            "log_std_init": args.log_std_init,
            "optimizer_kwargs": {"eps": 1e-8},
        },
        seed=args.seed,
        device="cpu",
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seed", type=int, default=1)
    add("--total-steps", type=int, default=500_000)
    add("--num-envs", type=int, default=16)
    add("--num-steps", type=int, default=64, help="rollout length, env steps per environment and update")
    add("--epochs", type=int, default=8)
    add("--batch-size", type=int, default=128, help="samples per minibatch")
    add("--lr", type=float, default=3e-4)
    add("--lr-schedule", choices=("constant", "linear"), default="linear")
    add("--min-lr-ratio", type=float, default=0.0)
    add("--gamma", type=float, default=0.8)
    add("--gae-lambda", type=float, default=0.9)
    add("--clip", type=float, default=0.2)
    add("--target-kl", type=float, default=None)
    add("--value-coef", type=float, default=0.5, help="factor of half the squared error")
    add("--clip-grad", type=float, default=0.5)
    add("--hidden-sizes", type=int, nargs="+", default=[256, 256, 256])
    add("--activation", choices=("tanh", "relu", "silu"), default="tanh")
    add("--log-std-init", type=float, default=-0.5)
    add("--success", choices=("terminate", "bootstrap", "continue"), default="bootstrap", help="effect of success")
    add("--max-episode-steps", type=int, default=50)
    add("--vec-env", choices=("dummy", "subproc"), default="dummy")
    add("--eval-every", type=int, default=50_000, help="env steps between evaluations")
    add("--eval-episodes", type=int, default=100)
    add("--eval-seed", type=int, default=10_000)
    add("--out", default="sb3.json", help="JSON file, rewritten at every evaluation")
    add("--in-turn", action="store_true", help="read numbers of rollouts from stdin and learn for each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
