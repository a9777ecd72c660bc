"""Environments by name: `@register_env("name")`, or `env.id: my_pkg.my_env:make_env` without registering anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from rlinf_lite.cards import EnvCard
from rlinf_lite.envs.base import VecEnv
from rlinf_lite.envs.chunked import ChunkedEnv
from rlinf_lite.envs.errors import EnvContractError
from rlinf_lite.envs.simulator import Simulator
from rlinf_lite.registry import ENVIRONMENTS, UnknownEnvError, env_card, import_part

if TYPE_CHECKING:
    from rlinf_lite.config import Config, EnvConfig

Split = Literal["train", "eval"]
MakeEnv = Callable[..., Any]
"""`make_env(num_envs, cfg)` or `make_env(num_envs, cfg, split)`: returns a VecEnv, a Simulator, a
gymnasium.vector.VectorEnv or a gymnasium.Env. An EnvCard's `make` is one."""
M = TypeVar("M", bound="MakeEnv | type[EnvCard]")


def register_env(name: str) -> Callable[[M], M]:
    """Decorator that registers a card or a make_env under a name for `env.id`. Its module has to be imported in every
    process that uses the name."""
    return ENVIRONMENTS.register(name)


def make_env(cfg: EnvConfig | Config, split: Split, num_envs: int) -> VecEnv:
    """Build `num_envs` environments of `cfg.id` with the settings of `cfg.train` or `cfg.eval`. `cfg` is a config, or
    its section `env`.

    Raises ValueError for another split or less than one environment, UnknownEnvError, MissingExtraError,
    RenderUnavailableError, or EnvContractError where the object that make_env returned cannot be used.
    """
    if split not in get_args(Split):
        raise ValueError(f"make_env: there is no split {split!r}. Give 'train' or 'eval'")
    if num_envs < 1:
        raise ValueError(f"make_env: num_envs is {num_envs}. Give 1 or more")
    section: Any = getattr(cfg, "env", cfg)
    return build_vec_env(env_card(section.id), section, split, num_envs)


def build_vec_env(card: EnvCard, cfg: EnvConfig, split: Split, num_envs: int, every_row: bool = True) -> VecEnv:
    """The environment that a card makes, as a VecEnv. `every_row` False: at most two gymnasium.Envs, for a trial."""
    num_separate = num_envs if every_row else min(num_envs, 2)
    if card.simulator and card.part is None:
        card.part = import_part(card.simulator, f"env.id: {card.name}", UnknownEnvError)
    make, what = partial(card.make, num_envs, cfg, split), card.name
    if type(card).make is EnvCard.make and (wrong := _signature_problem(card.part)):
        raise EnvContractError(wrong, what)
    made = make()
    if callable(getattr(made, "chunk_step", None)):
        env: VecEnv = made
    else:
        rules = getattr(cfg, split)
        env = ChunkedEnv(
            made if isinstance(made, Simulator) else _adapted(made, make, num_separate, what),
            auto_reset=rules.auto_reset,
            ignore_terminations=rules.ignore_terminations,
            max_episode_steps=rules.max_episode_steps,
        )
    if env.num_envs not in (num_envs, num_separate):
        raise EnvContractError(f"make_env was asked for {num_envs} environments and made {env.num_envs}.", what)
    return env


def _signature_problem(make_env: Any) -> str | None:
    try:
        signature = inspect.signature(make_env)
    except (TypeError, ValueError):  # Python knows no signature
        return None
    if isinstance(make_env, type) and "cfg" not in signature.parameters:
        import gymnasium

        if issubclass(make_env, gymnasium.Env):
            name = make_env.__name__
            return f"{name} is an environment; name a function: def make_env(num_envs, cfg): return {name}()"
    try:
        signature.bind(*("num_envs", "cfg", "split")[: 3 if "split" in signature.parameters else 2])
    except TypeError as error:
        return f"is called as make_env(num_envs, cfg), and takes {signature}: {error}. Correct its arguments"
    return None


def _adapted(made: Any, make_another: Callable[[], Any], num_envs: int, what: str) -> Simulator:
    import gymnasium
    import gymnasium.vector

    from rlinf_lite.envs.gymnasium.simulator import GymnasiumSimulator, simulator_of_vector_env

    if isinstance(made, gymnasium.vector.VectorEnv):
        return simulator_of_vector_env(made, what)
    if isinstance(made, gymnasium.Env):
        return GymnasiumSimulator([made, *(make_another() for _ in range(num_envs - 1))], what)
    raise EnvContractError(
        f"make_env returned {type(made).__module__}.{type(made).__qualname__}; it must return a VecEnv (reset, "
        "chunk_step), a Simulator (reset, step, observe by row), a gymnasium.vector.VectorEnv or a gymnasium.Env.",
        what,
    )
