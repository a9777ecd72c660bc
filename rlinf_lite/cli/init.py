"""`rlinf-lite init env|policy NAME`: write a file that trains as it is, for the user to change. Imports neither torch
nor ray.

The file is a copy of the example `custom_env.py` or `custom_network.py`, under the user's names.
"""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rlinf_lite.registry import ENVIRONMENTS
from rlinf_lite.shipped import shipped

CONFIG = "gym_pendulum_ppo_mlp"
KINDS = {"env": ("custom_env", "PuckPush"), "policy": ("custom_network", "StatePolicy")}
"""Module of the example by kind, and its class that a config names."""


def init(arguments: Sequence[str]) -> int:
    """Write `NAME.py` into the working directory. Returns the exit code: 2 where that is not possible."""
    parser = argparse.ArgumentParser(prog="rlinf-lite init", description="Write a file that trains, for you to change.")
    parser.add_argument("kind", choices=KINDS, help="an environment, or a policy")
    parser.add_argument("name", metavar="NAME", help="the file to write is NAME.py, in the working directory")
    options = parser.parse_args(arguments)
    kind, name, path = options.kind, options.name, Path(f"{options.name}.py")
    if problem := _problem_of(name):
        print(f"{name}: {problem}", file=sys.stderr)
        return 2
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(content_of(kind, name))
    except FileExistsError:
        print(f"{path} exists already and was not changed. Choose another name, or move that file", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{path} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{path} is written. It trains as it is:")
    print(f"  {train_command(kind, name)}")
    print(f"To check it: python {path}")
    return 0


def content_of(kind: str, name: str) -> str:
    """Text of the example of a kind, with its names made from `name`."""
    module, part = KINDS[kind]
    text = (shipped("examples") / "embodiment" / f"{module}.py").read_text(encoding="utf-8")
    text = text.replace("python examples/embodiment/train_embodied_agent.py --config-name ", "rlinf-lite train ")
    text = text.replace(f"examples/embodiment/{module}.py", f"{name}.py").replace(f"examples.embodiment.{module}", name)
    text = text.replace('"puck_push"', f'"{name}"').replace("puck_push keeps", f"{name} keeps")
    return re.sub(rf'(?<!=){part}\b(?!")', class_name(name), text)  # not task names: in quotes or after =


def class_name(name: str) -> str:
    """Name of the class for a module: `my_env` gives MyEnv."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def train_command(kind: str, name: str) -> str:
    """The command that trains it. It resets the reward scale, which the config sets for Pendulum."""
    overrides = {"env": "env.id={} env.task=PuckPush algorithm.reward_scale=1", "policy": "model.id={}"}[kind]
    return f"rlinf-lite train {CONFIG} {overrides.format(f'{name}:{class_name(name)}')}"


def _problem_of(name: str) -> str | None:
    """Why a module cannot have this name; None if it can."""
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name) or not class_name(name).isidentifier():
        return "is not a Python identifier. Use letters, digits and _, and begin with a letter"
    if name in ENVIRONMENTS.names():
        return "is the name of an environment that exists already. Choose another one"
    if not Path(f"{name}.py").exists() and find_spec(name) is not None:  # an existing file has its own message
        return "is the name of a module, which the new file would hide. Choose another one"
    return None
