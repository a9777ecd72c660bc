"""Reads and writes directories of flow policies: openpi's PyTorch layout or LeRobot's, with our additions in own files.

    config.json            as published, byte for byte: LeRobot refuses fields that it does not know
    rlinf_lite.json        `policy_id`, and this policy's settings
    model.safetensors      as published: same names and types; tensors that no forward pass reads stay as they were
    rlinf_lite.safetensors value and noise head, adapters
    assets/, tokenizer files, processors and other files that came with the weights

Published loaders silently use random numbers for missing tensors and drop unknown ones. Here an error names every
tensor that is missing, unexpected or of another shape.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from rlinf_lite.config.resources import OWN_CONFIG
from rlinf_lite.models.base import CheckpointFormatError, check_tensors
from rlinf_lite.models.flow.config import FlowConfig
from rlinf_lite.models.flow.files import INDEX, WEIGHTS, own_files, weight_files
from rlinf_lite.models.flow.new_files import published_files
from rlinf_lite.models.flow.published import NAMES, TIED, UNREAD
from rlinf_lite.models.tensor_files import write_tensors

log = logging.getLogger(__name__)

ADDITIONS = "rlinf_lite.safetensors"
_HEADS = ("value_head", "noise_head")
_CARRIED = ("*.json", "*.model", "*.txt", "*.jinja", "*.md", "*.yaml", "LICENSE*", "policy_*processor*.safetensors")


@dataclass
class Origin:
    """Files and tensors that were loaded with a policy's weights, are not part of it, and are saved with it again."""

    files: dict[str, bytes] = field(default_factory=dict)
    """`config.json`, tokenizer, statistics, processors; by path within the directory."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Metadata of the weights' file."""
    unread: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that no forward pass reads."""
    added: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of our additions that this policy lacks: a noise head that the run's method does not use."""
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """Types of the tensors in the file, by published name; a tied tensor under each of its names that the file has."""

    @classmethod
    def of(cls, directory: Path) -> Origin:
        """The files of a directory, without the tensors."""
        found = own_files(directory, *_CARRIED)
        left_out = {directory / name for name in (OWN_CONFIG, INDEX)}
        return cls({one.relative_to(directory).as_posix(): one.read_bytes() for one in found if one not in left_out})


def published_name(name: str, cfg: FlowConfig) -> str:
    """The published name of a tensor of a policy's state dict, which must not be one of our additions."""
    name = name.removeprefix("network.").replace(".base_layer.", ".")
    for ours, published in NAMES[cfg.family].items():
        if name.startswith(ours):
            name = published + name.removeprefix(ours)
            break
    return cfg.prefix + name


def _is_added(name: str) -> bool:
    """Whether a tensor has no place in the published layout."""
    return name.startswith(_HEADS) or ".lora_" in name


def _tied(cfg: FlowConfig) -> list[tuple[str, str]]:
    """The two names of the embedding in the weights' file; empty if it is not tied."""
    return [(cfg.prefix + one, cfg.prefix + other) for one, other in TIED.items() if cfg.tied_embeddings]


def read_state(
    directory: Path, config: Mapping[str, Any], cfg: FlowConfig, own: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Origin]:
    """The state dict stored in `directory`, with the names and shapes of `own`, and the other files and tensors there.
    Heads that a published directory lacks are not in the state dict.

    Raises:
        CheckpointFormatError: listing tensors that are missing, unexpected or of the wrong shape.
    """
    if (directory / "adapter_model.safetensors").is_file():
        text = "has adapters beside its weights (adapter_model.safetensors). Merge them with peft's merge_and_unload"
        raise CheckpointFormatError(f"{directory} {text}, and remove them and adapter_config.json")
    origin, files = Origin.of(directory), weight_files(directory)
    tensors: dict[str, Tensor] = {}
    if not files:
        raise CheckpointFormatError(f"{directory} has no {WEIGHTS}. Download it again")
    for file in files:
        found, metadata = _read(file)
        tensors |= found
        origin.metadata |= metadata
    origin.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    for name, tied in _tied(cfg):
        if tied in tensors and (name not in tensors or torch.equal(tensors[name], tensors[tied])):
            tensors[name] = tensors.pop(tied)
    for name in UNREAD:
        if cfg.prefix + name in tensors:
            origin.unread[cfg.prefix + name] = tensors.pop(cfg.prefix + name)

    names = {name: published_name(name, cfg) for name in own if not _is_added(name)}
    heads = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_HEADS)}  # RLinf's
    check_tensors({published: own[name] for name, published in names.items()}, tensors, str(directory))
    state = {name: tensors[published] for name, published in names.items()}
    ours = _read(directory / ADDITIONS)[0] if (directory / ADDITIONS).is_file() else {}
    if "rlinf_lite" in config:
        written = published_files(FlowConfig.from_dict(config["rlinf_lite"]["settings"]))
        if origin.files.get("config.json") == written["config.json"]:  # we wrote it, and `write` does it again
            origin.files = {name: content for name, content in origin.files.items() if name not in written}
        needed = _HEADS if config["rlinf_lite"]["settings"].get("method") == "flow_noise" else _HEADS[:1]
        lost = [f"{head}.*" for head in needed if not any(name.startswith(f"{head}.") for name in ours)]
        if lost:
            raise CheckpointFormatError(f"{directory / ADDITIONS} has no {', '.join(lost)}. Copy it again")
    adapters = {name: x for name, x in ours.items() if not name.startswith(_HEADS)}
    check_tensors({name: x for name, x in own.items() if ".lora_" in name}, adapters, str(directory / ADDITIONS))
    state |= adapters
    origin.added = {name: x for name, x in ours.items() if name.startswith(_HEADS) and name not in own}
    for head in _HEADS:
        state |= _head(f"{head}.", own, ours, str(directory / ADDITIONS), must_fit=True)
        taken = _head(f"{head}.", own, heads, str(directory), must_fit=False)
        state |= taken
        origin.unread |= {name: x for name, x in heads.items() if name.startswith(head) and name not in taken}
    return state, origin


def _head(
    prefix: str, own: Mapping[str, Tensor], found: Mapping[str, Tensor], source: str, must_fit: bool
) -> dict[str, Tensor]:
    """The tensors of a head, under the names of the policy. Empty if the policy or the file lacks the head. For other
    shapes an error if it `must_fit`, else empty with a warning."""
    wanted = {name: x for name, x in own.items() if name.startswith(prefix)}
    given = {name: x for name, x in found.items() if name.startswith(prefix)}
    if not wanted or not given:
        return {}
    if must_fit:
        check_tensors(wanted, given, source)
    if all(name in given and given[name].shape == x.shape for name, x in wanted.items()):
        return {name: given[name] for name in wanted}
    log.warning("%s: %s* has another architecture; ours starts from random weights", source, prefix)
    return {}


def write(directory: Path, policy_id: str, cfg: FlowConfig, state: Mapping[str, Tensor], origin: Origin) -> None:
    """Write the policy whose state dict is `state`, in the layout in which it was read."""
    directory.mkdir(parents=True, exist_ok=True)
    files = origin.files if "config.json" in origin.files else {**origin.files, **published_files(cfg)}
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    own = {"policy_id": policy_id, "rlinf_lite": {"settings": cfg.to_dict()}}
    (directory / OWN_CONFIG).write_text(json.dumps(own, indent=2) + "\n")

    state = {name: tensor.detach().cpu() for name, tensor in state.items()}
    tensors = {published_name(name, cfg): x for name, x in state.items() if not _is_added(name)}
    for name, tied in _tied(cfg):
        # openpi's files have the second name only
        if name in tensors and (tied in origin.dtypes or not origin.dtypes):
            tensors[tied] = tensors[name].clone()  # a file cannot have two names for one memory
            if name not in origin.dtypes:
                del tensors[name]
    for name, tensor in tensors.items():  # in the file's type, if that holds the values exactly
        narrow = tensor.to(origin.dtypes.get(name, tensor.dtype))
        fits = narrow is tensor or torch.equal(narrow.to(tensor.dtype), tensor)
        tensors[name] = narrow if fits else tensor
    added = {name: tensor for name, tensor in state.items() if _is_added(name)}
    # our heads are additions, also those that were read from RLinf's; RLinf's that did not fit are in `unread`
    write_tensors(tensors | origin.unread, directory / WEIGHTS, origin.metadata or {"format": "pt"})
    write_tensors(origin.added | added, directory / ADDITIONS, {"format": "pt"})
    for file in (directory / INDEX, *directory.glob("model-*-of-*.safetensors")):  # shards of earlier weights
        file.unlink(missing_ok=True)


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file. Raises CheckpointFormatError, which names the file."""
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
        return load_file(file), metadata
    except (OSError, SafetensorError) as error:
        raise CheckpointFormatError(f"{file} cannot be read: {error}") from error
