"""Stable-Baselines3's PPO, kept ready: learns for as many rollouts as a line of stdin says, answers with env steps/s.

Takes the arguments of `sb3_worker.py`; `ppo_vs_sb3.py` starts it, so that both sides live all the time and take turns.
"""

from __future__ import annotations

import sys
import time

from sb3_worker import make_model, make_vec_env, parse_args


def main() -> None:
    args = parse_args()
    env = make_vec_env(args)
    model = make_model(args, env)
    print("ready", flush=True)
    first = True
    for line in sys.stdin:
        num_steps = int(line) * args.num_envs * args.num_steps
        start = time.perf_counter()
        model.learn(num_steps, reset_num_timesteps=first)
        print(num_steps / (time.perf_counter() - start), flush=True)
        first = False
    env.close()


if __name__ == "__main__":
    main()
