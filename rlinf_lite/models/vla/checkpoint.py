"""Reads and writes directories of OpenVLA policies: the published layout, and our additions in extra files.

    config.json                 as published, with `policy_id` and `rlinf_lite` (this policy's settings) added
    model*.safetensors          as published, in shards of at most 5 GB
    rlinf_lite.safetensors      value head, slot embeddings, adapters, a proprio projector that no published file had
    dataset_statistics.json, proprio_projector--*.pt, tokenizer files and other files that came with the weights

So other programs that load the base model load a fine-tuned policy too. They ignore adapters, and would see the base
weights: call `merge_adapters` before saving for them.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor

from rlinf_lite.models.base import CheckpointFormatError, check_tensors
from rlinf_lite.models.tensor_files import read_tensors, write_tensors
from rlinf_lite.models.vla.config import (
    STATISTICS,
    TowerConfig,
    VLAConfig,
    published_action_dim,
    published_statistics,
)
from rlinf_lite.models.vla.keymap import DINO_CLASS, DINO_POSITIONS, EMBEDDING, LM_HEAD, KeyMap

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADDITIONS = "rlinf_lite.safetensors"
"""File of the tensors that the published layout does not have; see `KeyMap.additions`."""
PROPRIO = "proprio_projector"
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")

# sizes by the beginning of timm's name, since weights do not show the number of heads
_TOWERS = {
    "vit_large_patch14_reg4_dinov2": TowerConfig(1024, 24, 16, 4096),
    "vit_so400m_patch14_siglip": TowerConfig(1152, 27, 16, 4304),
    "vit_base_patch16_siglip": TowerConfig(768, 12, 12, 3072),
}
# first and last token of every prompt, by the language model's type
_PROMPT_ENDS: dict[str, tuple[int | None, int]] = {"llama": (1, 29871), "qwen2": (None, 220)}
_OWN_KEYS = ("policy_id", "rlinf_lite")  # our keys in config.json
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
    """Files and tensors that were loaded with a policy's weights, are not part of it, and are saved with it again."""

    config: dict[str, Any] = field(default_factory=dict)
    """The published `config.json`."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Tokenizer, statistics, published code, heads that this policy does not use."""
    proprio_file: str | None = None
    weights_dir: Path | None = None
    """Directory from which the published tensors were read."""
    unread: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that no forward pass reads."""
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """Types of the tensors in the files, by published name."""
    trained: list[str] = field(default_factory=list)
    """Names of base weights that differ from those in `weights_dir`; the policy was saved with `save_base: false`."""

    @classmethod
    def of(cls, directory: Path, config: Mapping[str, Any]) -> Origin:
        """The files of a directory, without the tensors. `config`: the result of `read_policy_config`."""
        files = sorted({file for pattern in _CARRIED for file in directory.glob(pattern)})
        proprio = _part_file(directory, PROPRIO)
        return cls(
            config={name: value for name, value in config.items() if name not in _OWN_KEYS},
            files={file.name: file.read_bytes() for file in files if file.name not in _LEFT_OUT},
            proprio_file=None if proprio is None else proprio.name,
        )


def read_config(directory: Path, config: Mapping[str, Any]) -> VLAConfig:
    """The settings of the policy in `directory`, ours or a published one. `config`: the result of `read_policy_config`.

    Raises:
        CheckpointFormatError: if the policy has an unsupported part.
    """
    if "rlinf_lite" not in config:
        return _published_config(directory, config)
    settings = VLAConfig.from_dict(config["rlinf_lite"]["settings"])
    return replace(settings, norm_stats=published_statistics(directory, config))


def read_state(
    directory: Path, config: Mapping[str, Any], cfg: VLAConfig, own: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Origin]:
    """The state dict stored in `directory`, with the names and shapes of `own`, and the other files and tensors there.

    For a published directory the state dict lacks the additions (see `KeyMap`).

    Raises:
        CheckpointFormatError: listing tensors that are missing, unexpected or of the wrong shape.
    """
    entry = config.get("rlinf_lite")
    origin = Origin.of(directory, config)
    origin.weights_dir = Path(entry["base"]) if entry and entry["base"] else directory
    keys = KeyMap(cfg, own, with_proprio=_part_file(origin.weights_dir, PROPRIO) is not None)
    tensors = _published_tensors(origin.weights_dir, cfg.tied_embeddings)
    origin.unread = {name: tensor for name, tensor in tensors.items() if keys.is_unread(name)}
    origin.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    expected = keys.to_published({name: torch.empty(x.shape, device="meta") for name, x in own.items()})
    read = {name: tensor for name, tensor in tensors.items() if name not in origin.unread}
    check_tensors(expected, read, str(origin.weights_dir))
    state = keys.to_policy(read)
    if entry:
        additions = _read_tensors(directory / ADDITIONS)
        known = {*keys.additions, *(state.keys() & additions.keys())}
        check_tensors({name: own[name] for name in known}, additions, str(directory / ADDITIONS))
        origin.trained = sorted(additions.keys() - {*keys.additions, DINO_CLASS, DINO_POSITIONS})
        state |= additions
        if cfg.tied_embeddings:  # the additions may have a trained embedding, under its first name only
            state[LM_HEAD] = state[EMBEDDING]
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

    `without_base`: names of the trained tensors. If given, only they and the additions are written, with the path of
    the directory that has the other weights.
    """
    base = None
    if without_base is not None:
        if origin.weights_dir is None:
            raise ValueError(
                "model.options.lora.save_base: false needs base weights in a directory. Start from one "
                "(rollout.model_dir), or save them with the checkpoint (true)"
            )
        base = str(origin.weights_dir.absolute())
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in origin.files.items():
        (directory / name).write_bytes(content)
    if published_statistics(directory, origin.config) != cfg.norm_stats:
        (directory / STATISTICS).write_text(json.dumps(cfg.norm_stats, indent=2) + "\n")
    settings = {name: value for name, value in cfg.to_dict().items() if name != "norm_stats"}
    own = {"policy_id": policy_id, "rlinf_lite": {"settings": settings, "base": base}}
    (directory / "config.json").write_text(json.dumps({**origin.config, **own}, indent=2) + "\n")

    state = {name: tensor.detach().cpu() for name, tensor in state.items()}
    keys = KeyMap(cfg, state, with_proprio=origin.proprio_file is not None)
    additions = {*keys.additions, *(without_base or ())}
    if DINO_POSITIONS in state and bool(state[DINO_POSITIONS][:, 0].any()):
        additions |= {DINO_CLASS, DINO_POSITIONS}  # the published layout has only the sum of the two
    write_tensors({name: state[name] for name in sorted(additions)}, directory / ADDITIONS, {"format": "pt"})
    if without_base is not None:
        return
    tensors = {}
    for name, tensor in keys.to_published(state).items():  # in the file's type, if that holds the values exactly
        narrow = tensor.to(origin.dtypes.get(name, tensor.dtype))
        fits = narrow is tensor or torch.equal(narrow.to(tensor.dtype), tensor)
        tensors[name] = (narrow if fits else tensor).contiguous()
    tensors |= origin.unread
    if origin.proprio_file is not None:
        prefix = f"{PROPRIO}."
        part = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
        file = io.BytesIO()
        torch.save(part, file)  # not to disk: its error would not say that the disk is full
        (directory / origin.proprio_file).write_bytes(file.getvalue())
    save_torch_state_dict(tensors, directory, metadata={"format": "pt"})


def _published_config(directory: Path, config: Mapping[str, Any]) -> VLAConfig:
    """Settings from a published `config.json` and the files beside it; other fields have `VLAConfig`'s defaults.

    Raises:
        CheckpointFormatError: if the policy has an unsupported part.
    """
    if config.get("image_resize_strategy", "resize-naive") != "resize-naive":
        raise _unsupported(directory, f"image_resize_strategy {config['image_resize_strategy']!r}", "resize-naive")
    text = {"model_type": "llama", "vocab_size": 32064, **config["text_config"]}
    if text["model_type"] not in _PROMPT_ENDS:
        raise _unsupported(directory, f"a language model of type {text['model_type']}", ", ".join(_PROMPT_ENDS))
    for name in ("torch_dtype", "dtype"):  # the file's type, in which transformers would build the model
        text.pop(name, None)
    bos, empty = _PROMPT_ENDS[text["model_type"]]
    if _part_file(directory, "vision_backbone") is not None:
        raise _unsupported(directory, "a vision backbone with FiLM (vision_backbone--*.pt)", "plain ones")
    names = config["timm_model_ids"]
    towers = dict(zip(names, config.get("vit_dims") or [None] * len(names), strict=True))
    patch = re.search(r"patch(\d+)", names[0])
    statistics = published_statistics(directory, config)
    proprio = _read_part(directory, PROPRIO)
    return VLAConfig(
        dino=_tower(directory, towers, "dinov2"),
        siglip=_tower(directory, towers, "siglip"),
        image_size=config["image_sizes"][0],
        patch_size=int(patch[1]) if patch else VLAConfig.patch_size,
        text=text,
        pad_to_multiple_of=config.get("pad_to_multiple_of", VLAConfig.pad_to_multiple_of),
        n_action_bins=config.get("n_action_bins", VLAConfig.n_action_bins),
        action_dim=published_action_dim(statistics),
        proprio_dim=int(proprio["fc1.weight"].shape[1]) if proprio else 0,
        bos_token_id=bos,
        empty_token_id=empty,
        stop_token_id=text.get("eos_token_id", VLAConfig.stop_token_id),
        norm_stats=statistics,
    )


def _tower(directory: Path, towers: Mapping[str, list[int] | None], kind: str) -> TowerConfig | None:
    names = [name for name in towers if kind in name]
    if not names:
        return None
    sizes = towers[names[0]]
    found = [TowerConfig(*sizes)] if sizes else [tower for name, tower in _TOWERS.items() if names[0].startswith(name)]
    if not found:
        raise _unsupported(directory, f"the vision tower {names[0]}", ", ".join(_TOWERS))
    return found[0]


def _published_tensors(directory: Path, tied: bool) -> dict[str, Tensor]:
    """All tensors by published name, with the proprio projector's, and with peft's adapters merged.

    Raises:
        CheckpointFormatError: if files are missing, damaged or unsupported.
    """
    if (directory / WEIGHTS).is_file():  # before shards, as in transformers
        names = [WEIGHTS]
    elif (directory / INDEX).is_file():
        names = sorted(set(json.loads((directory / INDEX).read_text())["weight_map"].values()))
    else:
        names = sorted(file.name for file in directory.glob("*.safetensors") if file.name not in (*_ADAPTER, ADDITIONS))
    missing = [name for name in names if not (directory / name).is_file()]
    if missing or not names:
        what = f"{INDEX} names {', '.join(missing)}, which is not there" if missing else "it has no *.safetensors"
        raise CheckpointFormatError(f"{directory} lacks files of its weights: {what}. Download it again")
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors |= _read_tensors(directory / name)
    if all((directory / name).is_file() for name in _ADAPTER):
        _merge_adapter(tensors, directory, tied)
    return tensors | {f"{PROPRIO}.{name}": tensor for name, tensor in _read_part(directory, PROPRIO).items()}


def _read_tensors(file: Path) -> dict[str, Tensor]:
    """`read_tensors`. Raises CheckpointFormatError, which names the file."""
    try:
        return read_tensors(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointFormatError(f"{file} cannot be read: {error}") from error


def _part_file(directory: Path, part: str) -> Path | None:
    """OpenVLA-OFT's file `<part>--<step>_checkpoint.pt`, or None. Raises CheckpointFormatError if there are several."""
    files = sorted(directory.glob(f"{part}--*.pt"))
    if len(files) > 1:
        raise CheckpointFormatError(f"{directory} has {' and '.join(f.name for f in files)}. Leave the one to use")
    return files[0] if files else None


def _read_part(directory: Path, part: str) -> dict[str, Tensor]:
    """The tensors in the file of a part (see `_part_file`); empty if there is none."""
    file = _part_file(directory, part)
    tensors = {} if file is None else torch.load(file, map_location="cpu", weights_only=True)
    return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}


def _merge_adapter(tensors: dict[str, Tensor], directory: Path, tied: bool) -> None:
    """Merge peft's low-rank adapters in `directory` into the published weights, in place.

    W += alpha / r * B @ A, computed in fp32. Adapters of published checkpoints have timm's names, so this comes before
    any renaming. `tied`: the output layer shares the embedding's weights.

    Raises:
        CheckpointFormatError: listing adapter tensors that belong to no weight, or do not belong to plain LoRA.
    """
    config_file, weights_file = (directory / name for name in _ADAPTER)
    config, adapter = json.loads(config_file.read_text()), _read_tensors(weights_file)
    if config.get("alpha_pattern"):
        raise _unsupported(directory, "alpha_pattern in adapter_config.json", "one lora_alpha")
    if (start := config.get("init_lora_weights", True)) not in (True, False, "gaussian"):  # others change base weights
        raise _unsupported(directory, f"init_lora_weights {start!r} in adapter_config.json", "true, false, 'gaussian'")
    matrices = {re.sub(r"^base_model\.model\.|(?<=lora_[AB])\.default", "", name): x for name, x in adapter.items()}
    unexpected = []
    for name, matrix in matrices.items():
        module, _, kind = name.rpartition(".lora_")
        weight = f"{module}.weight"
        other = f"{module}.lora_{'B' if kind == 'A.weight' else 'A'}.weight"
        if kind not in ("A.weight", "B.weight") or weight not in tensors or other not in matrices:
            unexpected.append(name)
        elif tied and weight == LM_HEAD:
            what = "an adapter of the output layer, which shares the embedding's weights (tie_word_embeddings)"
            raise _unsupported(directory, what, "adapters of other layers")
        elif kind == "A.weight":
            rank = len(matrix)
            scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
            product = matrices[other].float().flatten(1) @ matrix.float().flatten(1)
            base = tensors[weight]
            tensors[weight] = (base.float() + scale * product.view(base.shape)).to(base.dtype)
    if unexpected:
        raise CheckpointFormatError(f"{weights_file} does not fit the weights beside it: {', '.join(unexpected)}")


def _unsupported(directory: Path, what: str, known: str) -> CheckpointFormatError:
    return CheckpointFormatError(f"{directory} has {what}, which is not supported. Supported: {known}")
