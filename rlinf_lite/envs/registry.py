"""Environments by name: `@register_env("name")`, or `env.id: my_pkg.my_env:make_env` without registering anything."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rlinf_lite.envs.base import VecEnv
from rlinf_lite.envs.chunked import ChunkedEnv
from rlinf_lite.envs.errors import EnvContractError, UnknownEnvError
from rlinf_lite.envs.simulator import Simulator

if TYPE_CHECKING:
    from rlinf_lite.config import EnvConfig

Split = Literal["train", "eval"]
MakeEnv = Callable[..., Any]
"""`make_env(num_envs, cfg)` or `make_env(num_envs, cfg, split)`: returns a VecEnv, a Simulator, a
gymnasium.vector.VectorEnv or a gymnasium.Env."""
M = TypeVar("M", bound=MakeEnv)

_registered: dict[str, MakeEnv] = {}
_built_in = {
    "gymnasium": "rlinf_lite.envs.gymnasium.simulator:make_env",
    "maniskill": "rlinf_lite.envs.maniskill:make_env",
    "tabletop": "rlinf_lite.envs.tabletop:make_env",
}


def register_env(name: str) -> Callable[[M], M]:
    """Registers a make_env under a name for `env.id`. The module has to be imported wherever the name is used."""

    def register(make_env: M) -> M:
        known = _registered.get(name)
        reloaded = known is not None and known.__module__ == make_env.__module__
        if name in _built_in or (known is not None and not reloaded):
            raise ValueError(f"an environment named {name!r} is registered already: choose another name")
        _registered[name] = make_env
        return make_env

    return register


def env_names() -> list[str]:
    """Names that `env.id` may have, besides `pkg.module:make_env`."""
    return sorted({*_registered, *_built_in})


def make_vec_env(cfg: EnvConfig, split: Split, num_envs: int) -> VecEnv:
    """Builds `num_envs` environments of `cfg.id` under the rules of `cfg.train` or `cfg.eval`.

    Raises UnknownEnvError, MissingExtraError, RenderUnavailableError, or EnvContractError where what make_env returned
    cannot be used.
    """
    return build_vec_env(_resolve(cfg.id), cfg, split, num_envs, cfg.id)


def build_vec_env(make_env: MakeEnv, cfg: EnvConfig, split: Split, num_envs: int, what: str) -> VecEnv:
    """What `make_env` returns, as a VecEnv; `what` names it in errors."""
    made = _call(make_env, num_envs, cfg, split)
    if callable(getattr(made, "chunk_step", None)):
        env: VecEnv = made
    else:
        rules = getattr(cfg, split)
        env = ChunkedEnv(
            made if isinstance(made, Simulator) else _adapted(made, make_env, num_envs, cfg, split, what),
            auto_reset=rules.auto_reset,
            ignore_terminations=rules.ignore_terminations,
            max_episode_steps=rules.max_episode_steps,
        )
    if env.num_envs != num_envs:
        raise EnvContractError([f"make_env was asked for {num_envs} environments and made {env.num_envs}."], what)
    return env


def _resolve(env_id: str) -> MakeEnv:
    if env_id in _registered:
        return _registered[env_id]
    path = _built_in.get(env_id, env_id)
    module_name, colon, attribute = path.partition(":")
    if not colon:
        raise UnknownEnvError("env.id", env_id, env_names(), "Or give `pkg.module:make_env`.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        hint = f"No module named {error.name!r}: is its folder on PYTHONPATH?"
        raise UnknownEnvError("env.id", env_id, env_names(), hint) from error
    make_env = getattr(module, attribute, None)
    if not callable(make_env):
        functions = [name for name, value in vars(module).items() if callable(value)]
        raise UnknownEnvError(f"env.id: {env_id}: {module.__name__}", attribute, functions)
    found: MakeEnv = make_env
    return found


def _call(make_env: MakeEnv, num_envs: int, cfg: EnvConfig, split: Split) -> Any:
    takes_split = "split" in inspect.signature(make_env).parameters
    return make_env(num_envs, cfg, split) if takes_split else make_env(num_envs, cfg)


def _adapted(made: Any, make_env: MakeEnv, num_envs: int, cfg: EnvConfig, split: Split, what: str) -> Simulator:
    import gymnasium
    import gymnasium.vector

    from rlinf_lite.envs.gymnasium.simulator import GymnasiumSimulator, simulator_of_vector_env

    if isinstance(made, gymnasium.vector.VectorEnv):
        return simulator_of_vector_env(made, what)
    if isinstance(made, gymnasium.Env):
        more = [_call(make_env, num_envs, cfg, split) for _ in range(num_envs - 1)]
        return GymnasiumSimulator([made, *more], what)
    raise EnvContractError(
        [
            f"make_env returned {type(made).__module__}.{type(made).__qualname__}; it must return a VecEnv (reset, "
            "chunk_step), a Simulator (reset, step, observe by row), a gymnasium.vector.VectorEnv or a gymnasium.Env."
        ],
        what,
    )
