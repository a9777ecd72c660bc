"""OpenVLA policies as directories: the published layout, and our own additions in files of their own.

    config.json                 as published, and in it `policy_id` and `rlinf_lite`: this policy's settings
    model*.safetensors          as published, in shards of at most 5 GB
    rlinf_lite.safetensors      value head, slot embeddings, adapters, a proprio projector that no published file had
    dataset_statistics.json, proprio_projector--*.pt, tokenizer files and what else came with the weights

So a fine-tuned policy loads wherever its base model does. A policy with adapters is an exception: others read its base
weights from these files; `merge_adapters` gives one whose weights are its own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor

from rlinf_lite.models.base import check_tensors, read_policy_config
from rlinf_lite.models.vla.config import VLAConfig
from rlinf_lite.models.vla.keymap import DINO_CLASS, DINO_POSITIONS, KeyMap
from rlinf_lite.models.vla.published import (
    ADDITIONS,
    INDEX,
    PROPRIO,
    STATISTICS,
    part_file,
    read_published_config,
    read_published_tensors,
    read_statistics,
    read_tensors,
)

_OWN_KEYS = ("policy_id", "rlinf_lite")  # of config.json
_CARRIED = (
    "*.json",
    "*.py",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.md",
    "action_head--*.pt",
    "noisy_action_projector--*.pt",
)
_LEFT_OUT = ("config.json", INDEX, "adapter_config.json")


@dataclass
class Origin:
    """What came with a policy's weights, is no part of it, and goes out with them again."""

    config: dict[str, Any] = field(default_factory=dict)
    """Published `config.json`."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Tokenizer, statistics, code for others, heads that this policy does not use."""
    proprio_file: str | None = None
    weights_dir: Path | None = None
    """Where the published tensors were read."""
    unread: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that no forward pass reads."""
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """Types of the tensors in the files, by published name."""

    @classmethod
    def of(cls, directory: Path) -> Origin:
        """Of a directory, without the tensors."""
        files = sorted({file for pattern in _CARRIED for file in directory.glob(pattern)})
        config_file, proprio = directory / "config.json", part_file(directory, PROPRIO)
        config = json.loads(config_file.read_text()) if config_file.is_file() else {}
        return cls(
            config={name: value for name, value in config.items() if name not in _OWN_KEYS},
            files={file.name: file.read_bytes() for file in files if file.name not in _LEFT_OUT},
            proprio_file=None if proprio is None else proprio.name,
        )


def read_config(directory: Path) -> VLAConfig:
    """The settings of the policy in `directory`, ours or a published one.

    Raises:
        CheckpointFormatError: where there is no `config.json`, or what it names is not supported.
    """
    config = read_policy_config(directory)
    if "rlinf_lite" not in config:
        return read_published_config(directory, config)
    settings = VLAConfig.from_dict(config["rlinf_lite"]["settings"])
    return replace(settings, norm_stats=read_statistics(directory, config))


def read_state(directory: Path, cfg: VLAConfig, own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Origin]:
    """The state dict that is stored in `directory`, named and shaped as `own`, and what came with it.

    A published directory has no additions (see `KeyMap`), and neither has its state dict.

    Raises:
        CheckpointFormatError: listing missing, foreign and misshapen tensors.
    """
    entry = read_policy_config(directory).get("rlinf_lite")
    origin = Origin.of(directory)
    origin.weights_dir = Path(entry["base"]) if entry and entry["base"] else directory
    keys = KeyMap(cfg, own, with_proprio=part_file(origin.weights_dir, PROPRIO) is not None)
    tensors = read_published_tensors(origin.weights_dir)
    origin.unread = {name: tensor for name, tensor in tensors.items() if keys.is_unread(name)}
    origin.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    expected = keys.to_published({name: torch.empty(x.shape, device="meta") for name, x in own.items()})
    read = {name: tensor for name, tensor in tensors.items() if name not in origin.unread}
    check_tensors(expected, read, str(origin.weights_dir))
    state = keys.to_policy(read)
    if entry:
        additions = read_tensors(directory / ADDITIONS)
        known = {*keys.additions, *(state.keys() & additions.keys())}
        check_tensors({name: own[name] for name in known}, additions, str(directory / ADDITIONS))
        state |= additions
    return state, origin


def write(
    directory: Path,
    policy_id: str,
    cfg: VLAConfig,
    state: Mapping[str, Tensor],
    origin: Origin,
    without_base: Collection[str] | None = None,
) -> None:
    """Write the policy whose state dict is `state`.

    `without_base`: names of tensors that trained; the others are those of the directory that the policy came from, and
    are left there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in origin.files.items():
        (directory / name).write_bytes(content)
    if read_statistics(directory, origin.config) != cfg.norm_stats:
        (directory / STATISTICS).write_text(json.dumps(cfg.norm_stats, indent=2) + "\n")
    settings = {name: value for name, value in cfg.to_dict().items() if name != "norm_stats"}
    base = None if without_base is None else str(_base(origin))
    own = {"policy_id": policy_id, "rlinf_lite": {"settings": settings, "base": base}}
    (directory / "config.json").write_text(json.dumps({**origin.config, **own}, indent=2) + "\n")

    state = {name: tensor.detach().cpu() for name, tensor in state.items()}
    keys = KeyMap(cfg, state, with_proprio=origin.proprio_file is not None)
    additions = {*keys.additions, *(without_base or ())} | _not_exact(state)
    _save({name: state[name] for name in additions}, directory / ADDITIONS)
    if without_base is None:
        _write_published(directory, keys.to_published(state), origin)


def _write_published(directory: Path, tensors: dict[str, Tensor], origin: Origin) -> None:
    tensors = {name: _as_read(tensor, origin.dtypes.get(name)) for name, tensor in tensors.items()} | origin.unread
    if origin.proprio_file is not None:
        prefix = f"{PROPRIO}."
        part = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
        torch.save(part, directory / origin.proprio_file)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_torch_state_dict(contiguous, directory, metadata={"format": "pt"})


def _base(origin: Origin) -> Path:
    if origin.weights_dir is None:
        raise ValueError(
            "model.options.lora.save_base: false needs base weights in a directory. Start from one "
            "(rollout.model_dir), or save them with the checkpoint (true)"
        )
    return origin.weights_dir.absolute()


def _not_exact(state: Mapping[str, Tensor]) -> set[str]:
    """Tensors that the published ones would give back otherwise: timm's class token has no position of its own."""
    trained = DINO_POSITIONS in state and bool(state[DINO_POSITIONS][:, 0].any())
    return {DINO_CLASS, DINO_POSITIONS} if trained else set()


def _as_read(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """In the type that it had in the file, unless its values do not fit that."""
    if dtype is None or dtype == tensor.dtype:
        return tensor
    narrow = tensor.to(dtype)
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in sorted(tensors.items())}, file, metadata={"format": "pt"})
