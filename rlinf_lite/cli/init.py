"""`rlinf-lite init env|policy NAME`: a file that trains, to be changed step by step. Imports neither torch nor ray.

The files are the examples `custom_env.py` and `custom_network.py` under names of one's own.
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
"""The example, and what in it a config names."""


def init(arguments: Sequence[str]) -> int:
    """Write `NAME.py` into the working directory; returns 2 where that cannot be done."""
    parser = argparse.ArgumentParser(prog="rlinf-lite init", description="Write a file that trains, to be changed.")
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
        print(f"{path} is there already, and is left as it is. Choose another name, or move it away", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{path} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{path} is written. It trains as it is:")
    print(f"  {train_command(kind, name)}")
    print(f"and is checked by: python {path}")
    return 0


def content_of(kind: str, name: str) -> str:
    """The example under names of `name`."""
    module, part = KINDS[kind]
    text = (shipped("examples") / "embodiment" / f"{module}.py").read_text(encoding="utf-8")
    text = text.replace("python examples/embodiment/train_embodied_agent.py --config-name ", "rlinf-lite train ")
    text = text.replace(f"examples/embodiment/{module}.py", f"{name}.py").replace(f"examples.embodiment.{module}", name)
    text = text.replace('"puck_push"', f'"{name}"').replace("puck_push keeps", f"{name} keeps")
    return re.sub(rf'(?<!=){part}\b(?!")', class_name(name), text)  # in quotes, and after env.task=, it is the task


def class_name(name: str) -> str:
    """`my_env` is MyEnv."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def train_command(kind: str, name: str) -> str:
    """What trains it; Pendulum's scale of rewards is not that of the example's environment."""
    what = {"env": "env.id={} env.task=PuckPush algorithm.reward_scale=1", "policy": "model.id={}"}[kind]
    return f"rlinf-lite train {CONFIG} {what.format(f'{name}:{class_name(name)}')}"


def _problem_of(name: str) -> str | None:
    """Why a module cannot be called that; None: it can."""
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name) or not class_name(name).isidentifier():
        return "is no identifier of Python. Use letters, digits and _, and begin with a letter"
    if name in ENVIRONMENTS.names():
        return "is the name of an environment that is there already. Choose another one"
    if not Path(f"{name}.py").exists() and find_spec(name) is not None:  # that file is refused for its own reason
        return "is the name of a module that is there already, and would be hidden. Choose another one"
    return None
