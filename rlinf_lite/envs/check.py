"""`check_env`: does an environment keep the protocol? In sentences that say what is wrong and how to mend it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_lite.cards import EnvCard
from rlinf_lite.envs.base import ChunkResult, IntArray, Obs, VecEnv, first_non_finite
from rlinf_lite.envs.chunked import ChunkedEnv
from rlinf_lite.envs.errors import WHY_NOT_FINITE, EnvContractError, NonFiniteError, SimulatorError

if TYPE_CHECKING:
    from rlinf_lite.config import EnvConfig

_MAX_STEPS = 2000  # of the search for an episode's end


def check_env(env_or_factory: Any, cfg: EnvConfig | None = None, num_envs: int = 2, quick: bool = False) -> list[str]:
    """Everything that is wrong, one sentence each; an empty list is good news.

    Takes a VecEnv, a Simulator, a gymnasium environment, or a card or `make_env`, called for `num_envs` rows and `cfg`.
    The quick check takes a few steps and looks at shapes, types, bounds and seeding; the full one also at whether
    seeds make a difference, at actions beyond the bounds and at how episodes end. Both leave the environment to be
    reset.
    """
    problems: list[str] = []
    env = _attempt(problems, "making the environment", lambda: _as_vec_env(env_or_factory, cfg, num_envs))
    if env is None:
        return problems
    problems += _attribute_problems(env)
    if problems:
        return problems
    seeds = list(range(1, env.num_envs + 1))
    first = _attempt(problems, f"reset(seeds={seeds})", lambda: env.reset(seeds=seeds))
    if first is None:
        return problems
    problems += obs_problems(first, env.num_envs, "reset")
    middle = (_bound(env, "action_low", -1.0) + _bound(env, "action_high", 1.0)) / 2
    result = _step(problems, env, middle)
    if result is not None:
        problems += chunk_problems(result, env, 1)
        problems += _changed_shapes(first, getattr(result, "obs", None))
    if not problems:
        problems += _seeding_problems(env, seeds, middle)
    if not quick and not problems:
        problems += _variety_problems(env, seeds)
        problems += _bound_problems(env)
        problems += _ending_problems(env, middle)
    return problems


def ensure_valid_env(env: Any, what: str = "the environment", quick: bool = True) -> None:
    """Raises EnvContractError with `check_env`'s sentences, if there are any."""
    problems = check_env(env, quick=quick)
    if problems:
        raise EnvContractError(problems, what)


def obs_problems(obs: Any, num_envs: int, where: str) -> list[str]:
    """What is wrong with an observation of `num_envs` rows that `where` returned."""
    if not isinstance(obs, dict):
        return [f"{where} returns {_kind(obs)}; return a dict with images, state or both, and instruction."]
    problems = []
    unknown = set(obs) - {"images", "state", "instruction"}
    if unknown:
        problems.append(
            f"{where} returns unknown keys {sorted(unknown)}; put pixels under images, numbers into state, text into "
            "instruction."
        )
    if not obs.get("images") and "state" not in obs:
        problems.append(f"{where} returns neither images nor state; a policy needs at least one of them.")
    for name, image in dict(obs.get("images", {})).items():
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 4 or image.shape[3] != 3:
            problems.append(
                f"image {name!r} from {where} is {_kind(image)}; return uint8 [B, H, W, 3] with values 0 to 255."
            )
        elif image.shape[0] != num_envs:
            problems.append(f"image {name!r} from {where} has {image.shape[0]} rows; return {num_envs}, one per row.")
    if "state" in obs:
        problems += _state_problems(obs["state"], num_envs, where)
    text = obs.get("instruction", [""] * num_envs)
    if not isinstance(text, list) or len(text) != num_envs or not all(isinstance(one, str) for one in text):
        problems.append(f'instruction from {where} must be a list of {num_envs} strings ("" where there is none).')
    return problems


def chunk_problems(result: Any, env: VecEnv, num_steps: int) -> list[str]:
    """What is wrong with the result of a chunk of `num_steps` actions."""
    if not isinstance(result, ChunkResult):
        return [f"chunk_step returns {_kind(result)}; return a rlinf_lite.envs.ChunkResult."]
    shape, problems = (env.num_envs, num_steps), []
    for name, dtype in {"rewards": "float32", "terminated": "bool", "truncated": "bool", "executed": "bool"}.items():
        array = getattr(result, name)
        if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != dtype:
            problems.append(f"{name} from chunk_step is {_kind(array)}; return {dtype} of shape {shape} (B, C).")
        elif dtype == "float32" and not np.isfinite(array).all():
            problems.append(
                "rewards from chunk_step are not finite; look for a division by zero or a diverged simulation."
            )
    if not problems and (result.terminated & result.truncated).any():
        problems.append("a step is both terminated and truncated; where both hold, set terminated alone.")
    return problems + obs_problems(result.obs, env.num_envs, "chunk_step")


def check_finite(when: str, obs: Obs, result: ChunkResult | None = None) -> None:
    """Raises NonFiniteError where what a VecEnv returned is NaN or infinite. (`ChunkedEnv` sees to that by itself.)"""
    if result is not None:
        bad = first_non_finite(result.rewards)
        if bad is not None:
            what = f"the reward of action {bad[1] + 1} {when} is {result.rewards[bad]}: {WHY_NOT_FINITE}"
            raise NonFiniteError(what, [bad[0]])
        if result.final_obs is not None:
            _check_state(f"in final_obs {when}", *result.final_obs)
    _check_state(when, None, obs)


def _check_state(when: str, rows: IntArray | None, obs: Obs) -> None:
    bad = first_non_finite(obs["state"]) if "state" in obs else None
    if bad is not None:
        row = bad[0] if rows is None else int(rows[bad[0]])
        raise NonFiniteError(f"state[{bad[1]}] {when} is {obs['state'][bad]}: {WHY_NOT_FINITE}", [row])


def _state_problems(state: Any, num_envs: int, where: str) -> list[str]:
    if not isinstance(state, np.ndarray) or state.dtype != np.float32 or state.ndim != 2:
        return [f"state from {where} is {_kind(state)}; return float32 [B, S], flattened to one vector per row."]
    if state.shape[0] != num_envs:
        return [f"state from {where} has {state.shape[0]} rows; return {num_envs}, one per environment."]
    if not np.isfinite(state).all():
        columns = np.flatnonzero(~np.isfinite(state).all(axis=0)).tolist()
        return [f"state from {where} is not finite in columns {columns}; policies cannot use NaN or infinity."]
    return []


def _attribute_problems(env: Any) -> list[str]:
    problems = []
    for name in ("num_envs", "action_dim", "max_episode_steps"):
        value = getattr(env, name, None)
        if not isinstance(value, int) or value <= 0:
            problems.append(f"{name} is {value!r}; set it to a positive int.")
    if problems:
        return problems
    low, high = _bound(env, "action_low", -1.0), _bound(env, "action_high", 1.0)
    if low.shape != (env.action_dim,) or high.shape != (env.action_dim,):
        problems.append(f"action bounds have shapes {low.shape} and {high.shape}; both must be ({env.action_dim},).")
    elif not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        problems.append("action bounds must be finite, with low below high in every dimension.")
    return problems


def _seeding_problems(env: VecEnv, seeds: Sequence[int], middle: Any) -> list[str]:
    problems: list[str] = []
    first = env.reset(seeds=seeds)
    for _ in range(3):
        _step(problems, env, middle)
    if _differing(first, env.reset(seeds=seeds)):
        problems.append(
            "the same seeds gave other first observations the second time; draw everything random in reset from the "
            "seed (gymnasium: call super().reset(seed=seed) and use self.np_random), and reset all that a step changes."
        )
    same = env.reset(seeds=[seeds[0]] * env.num_envs)
    rows = [_row(same, row) for row in range(env.num_envs)]
    if any(_differing(rows[0], row) for row in rows[1:]):
        problems.append(
            "one seed gave different first observations in different rows; a row's initial state must be a function of "
            "its seed alone."
        )
    return problems


def _variety_problems(env: VecEnv, seeds: Sequence[int]) -> list[str]:
    first = env.reset(seeds=seeds)
    if _differing(first, env.reset(seeds=[seed + 1000 for seed in seeds])):
        return []
    return ["other seeds gave the same first observations; let reset use its seed to vary the initial state."]


def _bound_problems(env: VecEnv) -> list[str]:
    problems: list[str] = []
    low, high = _bound(env, "action_low", -1.0), _bound(env, "action_high", 1.0)
    for action, name in ((low, "low"), (high, "high"), (high + (high - low), "high, exceeded,")):
        result = _step(problems, env, action, f"chunk_step with the bound {name} as action")
        if result is not None:
            problems += [f"at the action bound {name}: {one}" for one in chunk_problems(result, env, 1)]
    return problems


def _ending_problems(env: VecEnv, middle: Any) -> list[str]:
    """Plays until an episode ends, and looks at what is reported there."""
    env.reset(seeds=list(range(1, env.num_envs + 1)))
    problems: list[str] = []
    limit = min(env.max_episode_steps, _MAX_STEPS)
    silent, reported = False, False  # steps that say nothing of success, and that do
    for _ in range(limit):
        result = _step(problems, env, middle)
        if result is None:
            return problems
        if isinstance(env, ChunkedEnv):
            said = env.last_success[result.executed[:, 0]]
            silent, reported = silent or bool((said < 0).any()), reported or bool((said >= 0).any())
        ended = np.flatnonzero((result.terminated | result.truncated).any(axis=1))
        if not ended.size:
            continue
        recorded = sorted(record.env_id for record in result.episodes)
        if recorded != ended.tolist():
            problems.append(
                f"rows {ended.tolist()} ended and episodes has records of rows {recorded}; add one for each."
            )
        if result.final_obs is None or sorted(np.asarray(result.final_obs[0]).tolist()) != ended.tolist():
            problems.append(f"rows {ended.tolist()} ended; final_obs must hold these rows and their last observations.")
        else:
            problems += obs_problems(result.final_obs[1], len(ended), "final_obs")
        if silent and reported:
            problems.append(
                'success is reported at some steps only (in gymnasium, info["success"]), and a step that says nothing '
                "counts as one without success; report it at every step, False where there is none."
            )
        return problems + _after_the_end(env, ended, middle)
    if limit == env.max_episode_steps:
        problems.append(f"no episode ended within max_episode_steps={limit} steps; set truncated there.")
    return problems


def _after_the_end(env: VecEnv, ended: Any, middle: Any) -> list[str]:
    """With auto_reset, ended rows play on; without it, they are frozen. Both are fine, but one has to be the case."""
    problems: list[str] = []
    result = _step(problems, env, middle)
    if result is None:
        return problems
    executed = result.executed[ended, 0]
    auto_reset = getattr(env, "auto_reset", None)
    if auto_reset is not None and (executed != auto_reset).any():
        stepped = "stepped" if executed.any() else "not stepped"
        problems.append(
            f"auto_reset is {auto_reset} and rows {ended.tolist()} were {stepped} after their end; reset them at the "
            "end of the chunk, or freeze them."
        )
    if (result.rewards[ended, 0][~executed] != 0).any():
        problems.append("rows that are not executed carry rewards; they must be 0.")
    return problems


def _as_vec_env(given: Any, cfg: EnvConfig | None, num_envs: int) -> Any:
    from rlinf_lite.config import EnvConfig
    from rlinf_lite.envs.registry import build_vec_env

    if callable(getattr(given, "chunk_step", None)):
        return given
    if callable(getattr(given, "reset", None)) and not isinstance(given, type):
        num_envs, built = getattr(given, "num_envs", 1), given
        given = lambda num_envs, cfg: built  # noqa: E731
    card = EnvCard.of(given, "the environment")
    if cfg is None:
        own = {"id": card.name, "task": next(iter(card.tasks), ""), "options": card.options({})}
        cfg = EnvConfig().model_copy(update=own)
    return build_vec_env(card, cfg, "train", num_envs)


def _attempt(problems: list[str], what: str, call: Callable[[], Any]) -> Any:
    """The call's result, or None with a sentence added."""
    try:
        return call()
    except EnvContractError as error:
        problems.extend(error.problems)
    except NonFiniteError as error:
        problems.append(f"{what}: {error}.")
    except SimulatorError as error:
        problems.append(f"{what}: {error}.")
    except Exception as error:
        problems.append(f"{what} raised {type(error).__name__}: {error}")
    return None


def _step(problems: list[str], env: VecEnv, action: Any, what: str = "chunk_step") -> ChunkResult | None:
    actions = np.broadcast_to(np.asarray(action, np.float32), (env.num_envs, 1, env.action_dim)).copy()
    result: ChunkResult | None = _attempt(problems, what, lambda: env.chunk_step(actions))
    return result


def _bound(env: Any, name: str, default: float) -> Any:
    bound = getattr(env, name, None)
    return np.full(env.action_dim, default, np.float32) if bound is None else np.asarray(bound, np.float32)


def _leaves(obs: Any) -> dict[str, Any]:
    return {**obs.get("images", {}), **({"state": obs["state"]} if "state" in obs else {})}


def _row(obs: Any, row: int) -> Any:
    return {"images": {name: array[row] for name, array in _leaves(obs).items()}}


def _differing(one: Any, other: Any) -> bool:
    return any(not np.array_equal(array, _leaves(other)[name]) for name, array in _leaves(one).items())


def _changed_shapes(first: Any, later: Any) -> list[str]:
    if not isinstance(first, dict) or not isinstance(later, dict):
        return []
    before = {name: getattr(array, "shape", None) for name, array in _leaves(first).items()}
    after = {name: getattr(array, "shape", None) for name, array in _leaves(later).items()}
    if before == after:
        return []
    return [f"observations change shape: {before} from reset, {after} from chunk_step; return the same from both."]


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return f"a {type(value).__module__}.{type(value).__qualname__}"
