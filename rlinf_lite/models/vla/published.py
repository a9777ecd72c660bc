"""Reading published OpenVLA and OpenVLA-OFT directories: config, statistics, weights in shards and parts, adapters."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rlinf_lite.models.base import CheckpointFormatError
from rlinf_lite.models.vla.config import TowerConfig, VLAConfig

INDEX = "model.safetensors.index.json"
STATISTICS = "dataset_statistics.json"
ADDITIONS = "rlinf_lite.safetensors"
"""What the published layout has no place for; see `KeyMap.additions`."""
PROPRIO = "proprio_projector"
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")

# heads cannot be told from the weights, so sizes follow from the beginning of timm's name
_TOWERS = {
    "vit_large_patch14_reg4_dinov2": TowerConfig(1024, 24, 16, 4096),
    "vit_so400m_patch14_siglip": TowerConfig(1152, 27, 16, 4304),
    "vit_base_patch16_siglip": TowerConfig(768, 12, 12, 3072),
}
# of the tokenizer: (first token of every prompt, last token of every prompt)
_PROMPT_ENDS: dict[str, tuple[int | None, int]] = {"llama": (1, 29871), "qwen2": (None, 220)}


def read_published_config(directory: Path, config: dict[str, Any]) -> VLAConfig:
    """What a published `config.json` and its neighbours say; the rest has `VLAConfig`'s defaults.

    Raises:
        CheckpointFormatError: where the policy has a part that is not supported.
    """
    if config.get("image_resize_strategy", "resize-naive") != "resize-naive":
        raise _unsupported(directory, f"image_resize_strategy {config['image_resize_strategy']!r}", "resize-naive")
    names = config["timm_model_ids"]
    towers = dict(zip(names, config.get("vit_dims") or [None] * len(names), strict=True))
    text = _text_config(directory, config)
    bos, empty = _PROMPT_ENDS[text["model_type"]]
    statistics = read_statistics(directory, config)
    patch = re.search(r"patch(\d+)", names[0])
    return VLAConfig(
        dino=_tower(directory, towers, "dinov2"),
        siglip=_tower(directory, towers, "siglip"),
        image_size=config["image_sizes"][0],
        patch_size=int(patch[1]) if patch else VLAConfig.patch_size,
        text=text,
        pad_to_multiple_of=config.get("pad_to_multiple_of", VLAConfig.pad_to_multiple_of),
        n_action_bins=config.get("n_action_bins", VLAConfig.n_action_bins),
        action_dim=_num_action_dims(statistics),
        proprio_dim=_num_proprio_dims(directory),
        bos_token_id=bos,
        empty_token_id=empty,
        stop_token_id=text.get("eos_token_id", VLAConfig.stop_token_id),
        norm_stats=statistics,
    )


def read_statistics(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """By dataset; those of a fine-tuning come before those of its base model."""
    file = directory / STATISTICS
    return {**(config.get("norm_stats") or {}), **(json.loads(file.read_text()) if file.is_file() else {})}


def read_published_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors by their published names, those of the proprio projector included and adapters merged.

    Raises:
        CheckpointFormatError: where files are missing, damaged, or of a kind that is not supported.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(directory):
        tensors |= read_tensors(file)
    if all((directory / name).is_file() for name in _ADAPTER):
        merge_adapter(tensors, directory)
    part = part_file(directory, PROPRIO)
    if part is not None:
        tensors |= {f"{PROPRIO}.{name}": tensor for name, tensor in _read_part(part).items()}
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """The shards that the index names, else the safetensors files that there are."""
    if (directory / INDEX).is_file():
        names = sorted(set(json.loads((directory / INDEX).read_text())["weight_map"].values()))
    else:
        names = sorted(file.name for file in directory.glob("*.safetensors") if file.name not in (*_ADAPTER, ADDITIONS))
    missing = [name for name in names if not (directory / name).is_file()]
    if missing or not names:
        what = f"{INDEX} names {', '.join(missing)}, which is not there" if missing else "it has no *.safetensors"
        raise CheckpointFormatError(f"{directory} has no whole set of weights: {what}. Download it again")
    return [directory / name for name in names]


def read_tensors(file: Path) -> dict[str, Tensor]:
    """`load_file` with an error that names the file."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointFormatError(f"{file} cannot be read: {error}") from error


def part_file(directory: Path, part: str) -> Path | None:
    """The one file of OpenVLA-OFT's `<part>--<step>_checkpoint.pt`, or None."""
    files = sorted(directory.glob(f"{part}--*.pt"))
    if len(files) > 1:
        raise CheckpointFormatError(f"{directory} has {' and '.join(f.name for f in files)}. Leave the one to use")
    return files[0] if files else None


def merge_adapter(tensors: dict[str, Tensor], directory: Path) -> None:
    """Add peft's low-rank adapters in `directory` to the published weights that they were trained on, in place.

    W += alpha / r * B @ A, computed in fp32. Adapters of published checkpoints name timm's modules, so this comes
    before any renaming.

    Raises:
        CheckpointFormatError: listing adapter tensors that belong to no weight, or are none of plain LoRA.
    """
    config_file, weights_file = (directory / name for name in _ADAPTER)
    config, adapter = json.loads(config_file.read_text()), read_tensors(weights_file)
    if config.get("alpha_pattern"):
        raise _unsupported(directory, "alpha_pattern in adapter_config.json", "one lora_alpha")
    matrices = {re.sub(r"^base_model\.model\.|(?<=lora_[AB])\.default", "", name): x for name, x in adapter.items()}
    unexpected = []
    for name, matrix in matrices.items():
        module, _, kind = name.rpartition(".lora_")
        weight = f"{module}.weight"
        if kind not in ("A.weight", "B.weight") or weight not in tensors:
            unexpected.append(name)
        elif kind == "A.weight":
            rank = len(matrix)
            scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
            product = matrices[f"{module}.lora_B.weight"].float().flatten(1) @ matrix.float().flatten(1)
            base = tensors[weight]
            tensors[weight] = (base.float() + scale * product.view(base.shape)).to(base.dtype)
    if unexpected:
        raise CheckpointFormatError(f"{weights_file} does not fit the weights beside it: {', '.join(unexpected)}")


def _read_part(file: Path) -> dict[str, Tensor]:
    tensors = torch.load(file, map_location="cpu", weights_only=True)
    return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}


def _num_proprio_dims(directory: Path) -> int:
    if part_file(directory, "vision_backbone") is not None:
        raise _unsupported(directory, "a vision backbone with FiLM (vision_backbone--*.pt)", "plain ones")
    file = part_file(directory, PROPRIO)
    return 0 if file is None else int(_read_part(file)["fc1.weight"].shape[1])


def _num_action_dims(statistics: Mapping[str, Any]) -> int:
    entries = [entry["action"] for entry in statistics.values() if "q01" in entry.get("action", {})]
    return len(entries[0]["q01"]) if entries else VLAConfig.action_dim


def _tower(directory: Path, towers: Mapping[str, list[int] | None], kind: str) -> TowerConfig | None:
    names = [name for name in towers if kind in name]
    if not names:
        return None
    sizes = towers[names[0]]
    found = [TowerConfig(*sizes)] if sizes else [tower for name, tower in _TOWERS.items() if names[0].startswith(name)]
    if not found:
        raise _unsupported(directory, f"the vision tower {names[0]}", ", ".join(_TOWERS))
    return found[0]


def _text_config(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    text = {"model_type": "llama", "vocab_size": 32064, **config["text_config"]}
    if text["model_type"] not in _PROMPT_ENDS:
        raise _unsupported(directory, f"a language model of type {text['model_type']}", ", ".join(_PROMPT_ENDS))
    for name in ("torch_dtype", "dtype"):  # of the file; transformers would build the model in it
        text.pop(name, None)
    return text


def _unsupported(directory: Path, what: str, known: str) -> CheckpointFormatError:
    return CheckpointFormatError(f"{directory} has {what}, which is not supported. Supported: {known}")
