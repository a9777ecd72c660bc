"""Conversion of a config to the arguments of `sb3_worker.py`."""

from __future__ import annotations

from rlinf_lite.config import Config


def sb3_arguments(cfg: Config, seed: int) -> list[str]:
    """Arguments for all settings that affect speed and learning. Raises ValueError for settings that Stable-Baselines3
    does not have."""
    algorithm, optim, mlp = cfg.algorithm, cfg.actor.optim, cfg.model.options
    if algorithm.adv_type != "gae" or cfg.model.num_action_chunks != 1 or cfg.rollout.num_chunks is None:
        raise ValueError("Stable-Baselines3's PPO has gae, one action per decision and rollouts of a fixed length only")
    if optim.lr_scheduler == "cosine" or algorithm.clip_ratio_low != algorithm.clip_ratio_high:
        raise ValueError("Stable-Baselines3's PPO is compared with a constant or linear rate and one clip range")
    success = "continue" if cfg.env.train.ignore_terminations else "terminate"
    if algorithm.bootstrap_type == "always" and success == "terminate":
        success = "bootstrap"
    values: dict[str, object] = {
        "seed": seed,
        "num-envs": cfg.env.train.num_envs,
        "num-steps": cfg.rollout.num_chunks,
        "epochs": algorithm.update_epochs,
        "batch-size": cfg.actor.global_batch_size,
        "lr": optim.lr,
        "lr-schedule": optim.lr_scheduler,
        "min-lr-ratio": optim.min_lr_ratio,
        "gamma": algorithm.gamma,
        "gae-lambda": algorithm.gae_lambda,
        "clip": algorithm.clip_ratio_low,
        "value-coef": algorithm.value_coef,
        "clip-grad": optim.clip_grad,
        "activation": mlp.activation,
        "log-std-init": mlp.log_std_init,
        "success": success,
        "eval-seed": cfg.env.eval.seed,
        "eval-episodes": cfg.env.eval.num_episodes,
    }
    if cfg.env.train.max_episode_steps is not None:
        values["max-episode-steps"] = cfg.env.train.max_episode_steps
    if algorithm.target_kl is not None:
        values["target-kl"] = algorithm.target_kl
    arguments = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    return [*arguments, "--hidden-sizes", *map(str, mlp.hidden_sizes)]
