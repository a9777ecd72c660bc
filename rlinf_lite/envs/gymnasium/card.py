"""gymnasium's card: options are arguments of `gymnasium.make`, tasks are all environments that are registered there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rlinf_lite.cards import EnvCard, Observed, Problem, Task


class Gymnasium(EnvCard):
    """All environments of gymnasium with continuous actions."""

    simulator = "rlinf_lite.envs.gymnasium.simulator:make_simulator"
    tasks = {"Pendulum-v1": Task(200, 3, 1)}
    has_other_tasks = True
    simulator_bytes = (8 * 2**20, 4096)

    def observed(self, task: str, options: dict[str, Any]) -> Observed | None:
        found = None if options else super().observed(task, options)
        return found and replace(found, has_instruction=False)

    def steps_per_s(self, task: str, options: dict[str, Any]) -> float | None:
        """Frame rate from the environment's metadata (`render_fps`)."""
        import gymnasium

        env = gymnasium.make(task, disable_env_checker=True, **options)
        found: float | None = env.metadata.get("render_fps")
        env.close()
        return found

    def lacks_expert(self, task: str, options: dict[str, Any]) -> str:
        return "gymnasium has no expert of its own"

    def problems(self, config: Any) -> Iterator[Problem]:
        """Problems with making one environment: its id, the package it needs, its arguments, its action space."""
        from gymnasium.error import DependencyNotInstalled

        from rlinf_lite.envs.errors import EnvContractError
        from rlinf_lite.envs.gymnasium.simulator import make_simulator
        from rlinf_lite.registry import UnknownEnvError

        env = config.env
        try:
            make_simulator(1, env).close()
        except UnknownEnvError as error:
            yield Problem("env.task", error.text)
        except EnvContractError as error:
            yield Problem("env.task", f"{env.task}: {' '.join(error.problems)}")
        except (DependencyNotInstalled, ImportError) as error:
            yield Problem("env.task", f"{env.task} cannot be made: {error}", of_machine=True)
        except (Exception, SystemExit) as error:  # any error of the environment's own code
            key, given = ("env.options", f" with {env.options}") if env.options else ("env.task", "")
            text = (
                f"{env.task} cannot be made{given}: {type(error).__name__}: {' '.join(str(error).split())}. Correct it"
            )
            yield Problem(key, text)
