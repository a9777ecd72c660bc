"""A trial of a user's own environment while a config is checked, so that mistakes are reported before a run starts."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlinf_lite.cards import EnvCard, Problem
from rlinf_lite.envs.check import check_env
from rlinf_lite.envs.errors import EnvContractError
from rlinf_lite.envs.registry import Split, build_vec_env
from rlinf_lite.registry import PartError

if TYPE_CHECKING:
    from rlinf_lite.config import EnvConfig

_made = set[tuple[str, int, str, str, int]]()
"""Environments that this process has made without a problem. (A config may be checked for many placements.)"""


def problems_of(card: EnvCard, cfg: EnvConfig, split: Split, num_envs: int) -> list[Problem]:
    """Problems with making `num_envs` environments (two if they are separate gymnasium.Envs) and with `check_env`."""
    key = card.name, id(card.part or type(card)), cfg.model_dump_json(), split, num_envs
    if key in _made:
        return []
    found = list(_problems(card, cfg, split, num_envs))
    if not found:
        _made.add(key)
    return found


def _problems(card: EnvCard, cfg: EnvConfig, split: Split, num_envs: int) -> Iterator[Problem]:
    try:
        env: Any = build_vec_env(card, cfg, split, num_envs, every_row=False)
        yield from (Problem("env.id", f"{card.name}: {sentence}") for sentence in check_env(env, quick=True))
        if callable(close := getattr(env, "close", None)):
            close()
    except EnvContractError as error:
        yield Problem("env.id", f"{card.name}: {' '.join(error.problems)}")
    except PartError as error:
        yield Problem(error.key or "env.id", error.text)
    except (Exception, SystemExit) as error:  # any error of the environment's own code
        raised = " ".join(f"{type(error).__name__}: {error}".split())
        text = f"{card.name} cannot be made: {raised}, at {_where(error, card)}. Correct it"
        yield Problem("env.id", text, of_machine=isinstance(error, ImportError))


def _where(error: BaseException, card: EnvCard) -> str:
    """The place of an error: the last line of the user's file in the traceback, else the traceback's last line."""
    frames = traceback.extract_tb(error.__traceback__)
    try:
        own = inspect.getsourcefile(card.part or type(card))
    except TypeError:
        own = None
    frame = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
    return f"{frame.filename}:{frame.lineno}"
