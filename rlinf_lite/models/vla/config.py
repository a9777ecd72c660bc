"""The settings of OpenVLA policies: architecture, behaviour and statistics. Importable without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from rlinf_lite.cards import Observed, Problem, ProblemError
from rlinf_lite.config.resources import start_dir

if TYPE_CHECKING:
    from rlinf_lite.config.schema import Config, ModelConfig

STATISTICS = "dataset_statistics.json"
OPENVLA_PROMPT = "In: What action should the robot take to {instruction}?\nOut: "


@dataclass(frozen=True)
class TowerConfig:
    """Sizes of a vision transformer. `num_layers` counts the published blocks; the last is not used and not built."""

    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_size: int


@dataclass(frozen=True)
class VLAConfig:
    """Architecture, behaviour and statistics of one policy; JSON. Defaults are those of the published 7B OpenVLA."""

    # architecture
    dino: TowerConfig | None = TowerConfig(1024, 24, 16, 4096)
    siglip: TowerConfig | None = TowerConfig(1152, 27, 16, 4304)
    image_size: int = 224
    patch_size: int = 14
    num_registers: int = 4
    text: dict[str, Any] = field(
        default_factory=lambda: {"model_type": "llama", "vocab_size": 32064, "pad_token_id": 32000}
    )
    """Arguments of the language model's transformers config class."""
    pad_to_multiple_of: int = 64
    """Rows at the end of the vocabulary that belong to no token; action tokens are the `n_action_bins` before them."""
    n_action_bins: int = 256
    value_hidden_sizes: tuple[int, ...] = (512, 128)
    learned_slots: bool = False
    """Each action slot has a learned embedding, instead of the published zeros; parallel decoding only."""
    sincos_positions: bool = False
    """Image positions start as 2D sines and cosines instead of random numbers."""

    lora: dict[str, Any] = field(default_factory=dict)
    """Adapters in the policy: `rank`, `alpha`, `targets` and `also_train` of `model.options.lora`; empty: none."""

    # actions and observations
    action_dim: int = 7
    num_action_chunks: int = 8
    cameras: tuple[str, ...] = ("image",)
    """Names of the environment's cameras, in the order in which their patches enter the sequence."""
    proprio_dim: int = 0
    """State numbers, which the proprio projector turns into one token; 0: no state is read."""
    center_crop: bool = False
    """Crop to the central 90% of the image's area, the average crop of the checkpoint's training augmentation."""

    # prompt
    prompt: str = OPENVLA_PROMPT
    """`{instruction}` is replaced by the lower-case instruction."""
    max_prompt_length: int = 64
    """Number of tokens that a prompt is padded to, first (`<s>`) and last (the empty token) included."""
    bos_token_id: int | None = 1
    """The first token of every prompt; None: the tokenizer adds none (Qwen2)."""
    stop_token_id: int = 2
    empty_token_id: int = 29871
    """The last token of every prompt."""

    # decoding
    parallel_decoding: bool = True
    """True: OpenVLA-OFT, all action tokens in one bidirectional pass. False: OpenVLA, one by one, causal."""
    append_stop: bool = True
    """Append the stop token's embedding to the action slots; parallel decoding only; publishers differ in this."""
    value_type: Literal["chunk_level", "action_level"] = "chunk_level"
    temperature: float = 1.0

    # statistics
    norm_type: Literal["bounds_q99", "bounds"] = "bounds_q99"
    """The range of actions that [-1, 1] maps onto: q01 to q99, or min to max."""
    unnorm_key: str | None = None
    """Name of the entry of `norm_stats` to use; None: its only one."""
    norm_stats: dict[str, Any] = field(default_factory=dict)
    """{dataset: {"action": {"q01", "q99", "min", "max", "mask"}, "proprio": {...}}}, as published."""

    @property
    def num_action_tokens(self) -> int:
        return self.num_action_chunks * self.action_dim

    @property
    def first_action_id(self) -> int:
        """Id of the first action token, which stands for the largest value; the last id is 31999 in Llama-2."""
        return int(self.text["vocab_size"]) - self.pad_to_multiple_of - self.n_action_bins

    @property
    def pad_token_id(self) -> int:
        return int(self.text.get("pad_token_id") or 0)

    @property
    def num_patches(self) -> int:
        """Patches per camera."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def vision_dim(self) -> int:
        """Width of a patch: the sum of both towers' widths."""
        return sum(tower.hidden_size for tower in (self.dino, self.siglip) if tower is not None)

    @property
    def tied_embeddings(self) -> bool:
        """Whether the output layer shares the embedding's weights."""
        return bool(self.text.get("tie_word_embeddings"))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` gives an equal config."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Raises TypeError for a key that is no field of this class."""
        arguments = dict(config)
        for name in ("dino", "siglip"):
            if isinstance(arguments.get(name), dict):
                arguments[name] = TowerConfig(**arguments[name])
        for name in ("value_hidden_sizes", "cameras"):
            if name in arguments:
                arguments[name] = tuple(arguments[name])
        return cls(**arguments)


def with_run_settings(cfg: VLAConfig, model: ModelConfig) -> VLAConfig:
    """`cfg` changed by a run's `model` section; options that are null there keep their values.

    Raises:
        ProblemError: if the weights of `cfg` do not allow what the run asks for.
    """
    options = model.options
    if cfg.learned_slots and model.num_action_chunks != cfg.num_action_chunks:
        text = (
            f"is {model.num_action_chunks}, and the policy learned slots for {cfg.num_action_chunks} actions. Set it "
            f"to {cfg.num_action_chunks}"
        )
        raise ProblemError(Problem("model.num_action_chunks", text))
    if options.use_proprio and not cfg.proprio_dim:
        text = (
            "is true, and there is no state to read: the environment gives none, or the checkpoint has no proprio "
            "projector. Set it to false, or to null"
        )
        raise ProblemError(Problem("model.options.use_proprio", text))
    names = ("parallel_decoding", "append_stop", "unnorm_key", "norm_type", "center_crop")
    changes = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.max_prompt_length is not None:
        changes["max_prompt_length"] = options.max_prompt_length
    if options.cameras is not None:
        changes["cameras"] = tuple(options.cameras)
    if options.use_proprio is False:
        changes["proprio_dim"] = 0
    return replace(
        cfg,
        num_action_chunks=model.num_action_chunks,
        value_type=model.value_type,
        temperature=model.temperature,
        **changes,
    )


def vla_config(config: Config, seen: Observed) -> VLAConfig:
    """Settings of a run's policy: those of its checkpoint, or of `model.options.size`, changed by the run's options. A
    published checkpoint is taken for OpenVLA's 7B with the language model in its config.json.

    Raises:
        ProblemError: if the checkpoint does not allow what the run asks for.
    """
    model, directory = config.model, start_dir(config)
    if directory is not None and (directory / "config.json").is_file():
        content, published = json.loads((directory / "config.json").read_text()), preset("7b")
        if "rlinf_lite" in content:
            return with_run_settings(VLAConfig.from_dict(content["rlinf_lite"]["settings"]), model)
        text, statistics = published.text | content.get("text_config", {}), published_statistics(directory, content)
        return with_run_settings(replace(published, text=text, action_dim=published_action_dim(statistics)), model)
    return with_run_settings(fresh_config(model, seen), model)


def fresh_config(model: ModelConfig, seen: Observed) -> VLAConfig:
    """Settings of random weights of `model.options.size`, for an environment that shows `seen`; without statistics."""
    tiny = preset("tiny")  # random weights of all sizes have its tokenizer
    return replace(
        preset(model.options.size),
        prompt=tiny.prompt,
        empty_token_id=tiny.empty_token_id,
        action_dim=seen.action_dim,
        num_action_chunks=model.num_action_chunks,
        cameras=tuple(seen.cameras),
        proprio_dim=seen.state_dim if model.options.use_proprio else 0,
        norm_type="bounds",
    )


def published_statistics(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics by dataset, from config.json and `dataset_statistics.json`; the latter, a fine-tuning's, win."""
    file = directory / STATISTICS
    return {**(config.get("norm_stats") or {}), **(json.loads(file.read_text()) if file.is_file() else {})}


def published_action_dim(statistics: Mapping[str, Any]) -> int:
    sizes = (len(entry["action"]["q01"]) for entry in statistics.values() if "q01" in entry.get("action", {}))
    return next(sizes, VLAConfig.action_dim)


def preset(size: str) -> VLAConfig:
    """The architecture that `model.options.size` names: tiny (0.9 M parameters), small (5 M) or 7b (OpenVLA's)."""
    return _PRESETS[size]


def _cpu_sized(hidden: int, layers: int, tower: TowerConfig) -> VLAConfig:
    """Settings small enough for a CPU, with the changes that let random weights train."""
    text = {
        "model_type": "llama",
        "vocab_size": 512 + 64,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
        "max_position_embeddings": 512,
        "initializer_range": 0.08,
    }
    return VLAConfig(
        dino=None,
        siglip=tower,
        image_size=64,
        patch_size=16,
        text=text,
        value_hidden_sizes=(hidden, hidden // 2),
        learned_slots=True,
        sincos_positions=True,
        num_action_chunks=4,
        prompt="{instruction}",
        max_prompt_length=16,
        empty_token_id=3,
        append_stop=False,
        norm_type="bounds",
    )


_PRESETS = {
    "tiny": _cpu_sized(128, 3, TowerConfig(96, 2, 4, 384)),
    "small": _cpu_sized(256, 4, TowerConfig(192, 5, 4, 768)),
    "7b": VLAConfig(),
}
