"""Notes for the user on the dataset of an imitation run: parts that are not read, or that may not fit the run.

Datasets that are certainly wrong are refused (`demonstrations.open_dataset`); what is noted here may be right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlinf_lite.cards import Observed
from rlinf_lite.config import Config
from rlinf_lite.config.schema import KeysConfig
from rlinf_lite.data.demonstrations import keys_of, matched_keys, strange_tasks
from rlinf_lite.dimensions import flat_names
from rlinf_lite.registry import env_card

if TYPE_CHECKING:
    from rlinf_lite.data.lerobot.reader import LeRobotDataset
    from rlinf_lite.envs import EnvSpec
    from rlinf_lite.models.base import PolicyInputs


def dataset_notes(
    cfg: Config, dataset: LeRobotDataset, seen: Observed | EnvSpec | None, reads: PolicyInputs | None
) -> list[str]:
    """Notes on a dataset, one line each. `seen`: the environment's observations; `reads`: the policy's inputs. If one
    is None (not known), the notes that need it are left out."""
    lines = strange_tasks(cfg, dataset) if cfg.data.source == "folder" else []
    if seen is not None:
        lines += _names(cfg, dataset, seen)
    if cfg.data.source == "folder":
        lines += [*_unread_state(cfg, dataset, seen, reads), *_sentences(dataset, seen, reads)]
        lines += [*_pictures(cfg, dataset, seen), *_other_rate(cfg, dataset, seen), *_failures(dataset)]
    return lines


def _names(cfg: Config, dataset: LeRobotDataset, seen: Observed | EnvSpec) -> Iterator[str]:
    keys = matched_keys(cfg, dataset, seen)
    for name, key in (("state", keys.state), ("action", keys.action)):
        if key is None:
            continue
        feature = dataset.info.features[key]
        there = flat_names(feature.names, feature.width) or ()
        if feature.names and not there and flat_names(feature.names, 1) is None:  # a single name names the feature
            yield f"info.json does not have a name for each of the {feature.width} columns of {key}: none is used"
        if name in keys.order:
            here = [there[column] for column in keys.order[name]]
            yield f"the columns of {key} are {', '.join(there)}, and are put in the run's order: {', '.join(here)}"


def _unread_state(
    cfg: Config, dataset: LeRobotDataset, seen: Observed | EnvSpec | None, reads: PolicyInputs | None
) -> Iterator[str]:
    key = cfg.data.keys.state
    if key is None or key not in dataset.info.features:
        return
    named = f"data.keys.state is {key}, and " if key != KeysConfig.model_fields["state"].default else ""
    if reads is not None and not reads.state_dim:
        yield f"{named}the policy reads no state: {key} of the dataset is not used"
    elif seen is not None and not seen.state_dim and named:
        yield f"{named}the environment shows no state: it is not used"


def _sentences(dataset: LeRobotDataset, seen: Observed | EnvSpec | None, reads: PolicyInputs | None) -> Iterator[str]:
    if reads is None or not reads.has_instruction:
        return
    empty = sum(not task.strip() for task in dataset.tasks)
    if seen is not None and not seen.has_instruction:
        if empty < len(dataset.tasks):
            yield "the environment gives no instruction: the dataset's sentences are left out"
    elif empty == len(dataset.tasks):
        yield f'every task of the dataset is "" ({empty} of {empty}): the policy learns nothing from instructions'
    elif empty:
        yield f'{empty} of {len(dataset.tasks)} tasks of the dataset are "", which the policy reads as an instruction'


def _pictures(cfg: Config, dataset: LeRobotDataset, seen: Observed | EnvSpec | None) -> Iterator[str]:
    for key in [] if seen is None else keys_of(cfg, seen).cameras.values():
        shape = dataset.info.features[key].shape
        if 3 not in (shape[0], shape[2]):
            yield f"pictures of {key} have shape {list(shape)}, not three colours, and are taken as colours"


def _other_rate(cfg: Config, dataset: LeRobotDataset, seen: Observed | EnvSpec | None) -> Iterator[str]:
    rate = None if seen is None else env_card(cfg.env.id).steps_per_s(cfg.env.task, cfg.env.options)
    if rate is not None and round(rate) != round(dataset.info.fps):
        yield f"a frame is 1/{dataset.info.fps:g} s there, and a step of the environment 1/{rate:g} s"


def _failures(dataset: LeRobotDataset) -> Iterator[str]:
    failed = dataset.num_failures()
    if failed:
        yield f"{failed} of {dataset.info.num_episodes} episodes did not succeed, and are imitated as the others are"
