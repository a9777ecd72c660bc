"""`check_env`: a test of whether an environment keeps the protocol. Its sentences name each problem and the remedy."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_lite.cards import EnvCard
from rlinf_lite.envs.base import ChunkResult, Obs, VecEnv, action_bounds, first_non_finite, get_env_spec
from rlinf_lite.envs.chunked import ChunkedEnv
from rlinf_lite.envs.errors import (
    WHY_NOT_FINITE,
    EnvContractError,
    EpisodeContractError,
    NonFiniteError,
    NoTimeLimitError,
    SimulatorError,
)

if TYPE_CHECKING:
    from rlinf_lite.config import EnvConfig

_MAX_STEPS = 2000  # env steps that are played to reach an episode's end


def check_env(env_or_factory: Any, cfg: EnvConfig | None = None, num_envs: int = 2, quick: bool = False) -> list[str]:
    """Problems of an environment, one sentence each; an empty list means that there are none.

    Takes a VecEnv, a Simulator, a gymnasium environment, or a card or `make_env`, which is called with `num_envs` and
    `cfg`. The quick check takes a few steps and tests shapes, types, bounds and seeding. The full one also tests
    whether seeds make a difference, actions beyond the bounds, resets of single rows, and the ends of episodes. After
    both, the environment must be reset before use. Without a time limit the ends of episodes are not tested, and a
    sentence says so.
    """
    problems, skipped = Sentences(), list[str]()
    with problems.of("making the environment"):
        env: VecEnv
        try:
            env = _as_vec_env(env_or_factory, cfg, num_envs)
        except NoTimeLimitError as error:
            skipped = [*error.problems, "how episodes end was not checked, as there is no time limit."]
            env = _as_vec_env(env_or_factory, cfg, num_envs, max_episode_steps=_MAX_STEPS)
        problems += _attribute_problems(env)
    if problems:
        return [*problems, *skipped]
    seeds = list(range(1, env.num_envs + 1))
    with problems.of(f"reset(seeds={seeds})"):
        first = env.reset(seeds=seeds)
    if problems:
        return [*problems, *skipped]
    problems += obs_problems(first, env.num_envs, "reset")
    if not problems:
        with problems.of("state_names and action_names"):
            get_env_spec(env, first)
    low, high = action_bounds(env)
    middle = (low + high) / 2
    with problems.of("chunk_step"):
        result = _step(env, middle)
        problems += chunk_problems(result, env, 1)
        problems += _changed_shapes(first, getattr(result, "obs", None))
    if not problems:
        with problems.of("another reset"):
            _check_seeding(problems, env, seeds, middle)
    if not quick and not problems:
        if not _differing(env.reset(seeds=seeds), env.reset(seeds=[seed + 1000 for seed in seeds])):
            problems.append(
                "other seeds gave the same first observations; let reset use its seed to vary the initial state."
            )
        for action, name in ((low, "low"), (high, "high"), (high + (high - low), "high, exceeded,")):
            with problems.of(f"chunk_step with the bound {name} as action"):
                found = chunk_problems(_step(env, action), env, 1)
                problems += [f"at the action bound {name}: {one}" for one in found]
        if not problems and env.num_envs > 1:
            with problems.of("reset of row 0 alone"):
                _check_neighbours(problems, env, seeds, middle)
        env.reset(seeds=seeds)
        if not skipped:
            _check_ending(problems, env, middle)
    return [*problems, *skipped]


class Sentences(list[str]):
    """A list of problems, one sentence each."""

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """A context in which a raised error becomes a sentence; `what` names the attempt."""
        try:
            yield
        except EnvContractError as error:
            self.extend(error.problems)
        except (NonFiniteError, SimulatorError) as error:
            self.append(f"{what}: {str(error).rstrip('.')}.")
        except (Exception, SystemExit) as error:  # any error of the environment's own code
            self.append(f"{what} raised {type(error).__name__}: {error}")


def kind_of(value: Any) -> str:
    """Text with an array's or tensor's type and shape, or with the class of any other value."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def ensure_valid_env(env: Any, what: str = "the environment", quick: bool = True) -> None:
    """Raise EnvContractError with `check_env`'s sentences, if there are any."""
    problems = check_env(env, quick=quick)
    if problems:
        raise EnvContractError(problems, what)


def obs_problems(obs: Any, num_envs: int, where: str) -> list[str]:
    """Problems of an observation of `num_envs` rows that `where` returned."""
    if not isinstance(obs, dict):
        return [f"{where} returns {kind_of(obs)}; return a dict with images, state or both, and instruction."]
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
                f"image {name!r} from {where} is {kind_of(image)}; return uint8 [B, H, W, 3] with values 0 to 255."
            )
        elif image.shape[0] != num_envs:
            problems.append(f"image {name!r} from {where} has {image.shape[0]} rows; return {num_envs}, one per row.")
    state = obs.get("state", np.zeros((num_envs, 0), np.float32))
    if not isinstance(state, np.ndarray) or state.dtype != np.float32 or state.ndim != 2:
        problems.append(
            f"state from {where} is {kind_of(state)}; return float32 [B, S], flattened to one vector per row."
        )
    elif state.shape[0] != num_envs:
        problems.append(f"state from {where} has {state.shape[0]} rows; return {num_envs}, one per environment.")
    elif not np.isfinite(state).all():
        columns = np.flatnonzero(~np.isfinite(state).all(axis=0)).tolist()
        problems.append(f"state from {where} is not finite in columns {columns}; policies cannot use NaN or infinity.")
    text = obs.get("instruction", [""] * num_envs)
    if not isinstance(text, list) or len(text) != num_envs or not all(isinstance(one, str) for one in text):
        problems.append(f'instruction from {where} must be a list of {num_envs} strings ("" where there is none).')
    return problems


def chunk_problems(result: Any, env: VecEnv, num_steps: int) -> list[str]:
    """Problems of the result of a chunk of `num_steps` actions."""
    if not isinstance(result, ChunkResult):
        return [f"chunk_step returns {kind_of(result)}; return a rlinf_lite.envs.ChunkResult."]
    problems = array_problems(result, (env.num_envs, num_steps))
    if not problems and not np.isfinite(result.rewards).all():
        problems.append("rewards from chunk_step are not finite; look for a division by zero or a diverged simulation.")
    if not problems and (result.terminated & result.truncated).any():
        problems.append("a step is both terminated and truncated; where both hold, set terminated alone.")
    return problems + obs_problems(result.obs, env.num_envs, "chunk_step")


def array_problems(result: ChunkResult, shape: tuple[int, int]) -> list[str]:
    """Sentences on the arrays [B, C] of a chunk's result that have a wrong type or shape."""
    types = {"rewards": "float32", "terminated": "bool", "truncated": "bool", "executed": "bool"}
    return [
        f"{name} from chunk_step is {kind_of(array)}; return {dtype} of shape {shape} (B, C)."
        for name, dtype in types.items()
        if not isinstance(array := getattr(result, name), np.ndarray) or array.shape != shape or array.dtype != dtype
    ]


def check_finite(when: str, obs: Obs, result: ChunkResult | None = None) -> None:
    """Raise NonFiniteError where a reward or state from a VecEnv is NaN or infinite. (`ChunkedEnv` does so itself.)"""
    shown = [] if result is None or result.final_obs is None else [(f"in final_obs {when}", *result.final_obs)]
    bad = None if result is None else first_non_finite(result.rewards)
    if result is not None and bad is not None:
        what = f"the reward of action {bad[1] + 1} {when} is {result.rewards[bad]}: {WHY_NOT_FINITE}"
        raise NonFiniteError(what, [bad[0]])
    for where, rows, seen in (*shown, (when, None, obs)):
        bad = first_non_finite(seen["state"]) if "state" in seen else None
        if bad is not None:
            row = bad[0] if rows is None else int(rows[bad[0]])
            raise NonFiniteError(f"state[{bad[1]}] {where} is {seen['state'][bad]}: {WHY_NOT_FINITE}", [row])


def check_episodes(when: str, result: ChunkResult, num_envs: int) -> None:
    """Raise EpisodeContractError where a record of an ended episode has an impossible value."""
    for record in result.episodes:
        row, length, first = record.env_id, record.length, record.steps_to_success
        once, at_end = record.success_once, record.success_at_end
        wrong = {
            "return_": not _is_number(record.return_) or not abs(_plain(record.return_)) <= sys.float_info.max,
            "length": not _is_whole(length) or length < 1,
            "success_once": not _is_truth(once),
            "success_at_end": not _is_truth(at_end) or (at_end and not once),
            "steps_to_success": first is not None
            and not (once and _is_whole(first) and _is_whole(length) and 1 <= first <= length),
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise EpisodeContractError(
                    f"{name} of the episode that ended {when} is {getattr(record, name)!r}; return_ is a finite "
                    "number, length and steps_to_success are whole numbers from 1 on, success_once and success_at_end "
                    "are True, False or None, and what follows from one another agrees.",
                    [row] if _is_whole(row) and 0 <= row < num_envs else list(range(num_envs)),
                )


def _plain(number: Any) -> Any:
    return number.item() if isinstance(number, np.generic) else number


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int | np.floating | np.integer) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_truth(value: Any) -> bool:
    return value is None or isinstance(value, bool | np.bool_)


def check_ends(when: str, result: ChunkResult) -> None:
    """Raise EpisodeContractError where `final_obs` of a VecEnv's result does not hold exactly the rows that ended."""
    ended = np.flatnonzero((result.terminated | result.truncated).any(axis=1))
    held = ended[:0] if result.final_obs is None else np.asarray(result.final_obs[0])
    wrong = np.setxor1d(ended, held)
    if wrong.size:
        raise EpisodeContractError(
            f"rows {ended.tolist()} ended {when} (terminated or truncated), and final_obs is of rows {held.tolist()}; "
            "it must hold those rows and their last observations, which the values of truncated episodes are "
            "bootstrapped from.",
            [int(wrong[0])],
        )


def _attribute_problems(env: Any) -> list[str]:
    problems = []
    for name in ("num_envs", "action_dim", "max_episode_steps"):
        value = getattr(env, name, None)
        if not isinstance(value, int) or value <= 0:
            problems.append(f"{name} is {value!r}; set it to a positive int.")
    if problems:
        return problems
    with np.errstate(over="ignore"):
        low, high = (bound.astype(np.float32) for bound in action_bounds(env))  # as actions are
    if low.shape != (env.action_dim,) or high.shape != (env.action_dim,):
        problems.append(f"action bounds have shapes {low.shape} and {high.shape}; both must be ({env.action_dim},).")
    elif not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        problems.append("action bounds must be finite, with low below high in every dimension.")
    return problems


def _check_seeding(problems: Sentences, env: VecEnv, seeds: Sequence[int], middle: Any) -> None:
    first = env.reset(seeds=seeds)
    with problems.of("chunk_step"):
        for _ in range(3):
            _step(env, middle)
    if _differing(first, env.reset(seeds=seeds)):
        problems.append(
            "the same seeds gave other first observations the second time; draw everything random in reset from the "
            "seed (gymnasium: call super().reset(seed=seed) and use self.np_random), and reset all that a step changes."
        )
    same = _leaves(env.reset(seeds=[seeds[0]] * env.num_envs))
    if any(not np.array_equal(row, rows[0]) for rows in same.values() for row in rows):
        problems.append(
            "one seed gave different first observations in different rows; a row's initial state must be a function of "
            "its seed alone."
        )


def _check_neighbours(problems: Sentences, env: VecEnv, seeds: Sequence[int], middle: Any) -> None:
    """Check that a reset of row 0 leaves the others alone: play the same steps twice, the second time with the
    reset."""
    env.reset(seeds=seeds)
    played = [_step(env, middle) for _ in range(2)]
    env.reset(seeds=seeds)
    _step(env, middle)
    env.reset(seeds=[seeds[0]], env_ids=[0])
    again = _step(env, middle)
    without, with_reset = ({**_leaves(one.obs), "rewards": one.rewards} for one in (played[1], again))
    # not exact, because a simulation on a GPU may round differently
    if any(not np.allclose(array[1:], with_reset[name][1:], rtol=1e-3, atol=1e-4) for name, array in without.items()):
        problems.append(
            "resetting row 0 changed what the other rows did next; a reset of some rows must leave the others alone, "
            "their random generators too (of a gymnasium VectorEnv: seeds of the others are None, and reset_mask says "
            "which are meant)."
        )


def _check_ending(problems: Sentences, env: VecEnv, middle: Any) -> None:
    """Play until an episode ends, and check the results at its end and after it."""
    limit = min(env.max_episode_steps, _MAX_STEPS)
    silent, reported = False, False  # whether some steps report no success value, and some do
    with problems.of("chunk_step"):
        for _ in range(limit):
            result = _step(env, middle)
            if isinstance(env, ChunkedEnv):
                success = env.last_success[result.executed[:, 0]]
                silent, reported = silent or bool((success < 0).any()), reported or bool((success >= 0).any())
            ended = np.flatnonzero((result.terminated | result.truncated).any(axis=1))
            if ended.size:
                break
        else:
            if limit == env.max_episode_steps:
                problems.append(f"no episode ended within max_episode_steps={limit} steps; set truncated there.")
            return
        recorded, rows = sorted(record.env_id for record in result.episodes), ended.tolist()
        if recorded != rows:
            problems.append(f"rows {rows} ended and episodes has records of rows {recorded}; add one for each.")
        if result.final_obs is None or sorted(np.asarray(result.final_obs[0]).tolist()) != rows:
            problems.append(f"rows {rows} ended; final_obs must hold these rows and their last observations.")
        else:
            problems += obs_problems(result.final_obs[1], len(ended), "final_obs")
        if silent and reported:
            problems.append(
                'success is reported at some steps only (in gymnasium, info["success"]), and a step that says nothing '
                "counts as one without success; report it at every step, False where there is none."
            )
        # with auto_reset, ended rows play on; without it, they are frozen: one of the two has to be the case
        result = _step(env, middle)
        executed, auto_reset = result.executed[ended, 0], getattr(env, "auto_reset", None)
        if auto_reset is not None and (executed != auto_reset).any():
            stepped = "stepped" if executed.any() else "not stepped"
            problems.append(
                f"auto_reset is {auto_reset} and rows {rows} were {stepped} after their end; reset them at the end of "
                "the chunk, or freeze them."
            )
        if (result.rewards[ended, 0][~executed] != 0).any():
            problems.append("rows that are not executed carry rewards; they must be 0.")


def _as_vec_env(given: Any, cfg: EnvConfig | None, num_envs: int, max_episode_steps: int | None = None) -> Any:
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
    if max_episode_steps is not None:
        cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"max_episode_steps": max_episode_steps})})
    return build_vec_env(card, cfg, "train", num_envs)


def _step(env: VecEnv, action: Any) -> ChunkResult:
    actions = np.broadcast_to(np.asarray(action, np.float32), (env.num_envs, 1, env.action_dim)).copy()
    return env.chunk_step(actions)


def _leaves(obs: Any) -> dict[str, Any]:
    return {**obs.get("images", {}), **({"state": obs["state"]} if "state" in obs else {})}


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
