"""What a flow policy is made of and how it behaves: read from a published directory, a run's options, or both.

JSON, and importable without torch. Sizes come from the shapes of a checkpoint's tensors; what shapes do not say,
numbers of heads and of a patch's place, from `config.json` or the variant that it names.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from rlinf_lite.cards import Observed, Problem, ProblemError
from rlinf_lite.config.resources import start_dir

if TYPE_CHECKING:
    from rlinf_lite.config.schema import Config, ModelConfig

log = logging.getLogger(__name__)

Family = Literal["pi0", "pi05", "smolvla"]
Layout = Literal["openpi", "lerobot"]
Norm = Literal["mean_std", "quantiles", "min_max", "identity"]
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
OPENPI_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
_OPENPI_DELTA_DIMS = 6  # of its LIBERO transform: all but the gripper
_LEROBOT_NORMS: dict[str, Norm] = {
    "MEAN_STD": "mean_std",
    "QUANTILES": "quantiles",
    "MIN_MAX": "min_max",
    "IDENTITY": "identity",
}


class UnsupportedFlowError(ValueError):
    """A published directory with a part that is not built here, or that says too little of itself."""


@dataclass(frozen=True)
class Tower:
    """A SigLIP vision transformer over square images."""

    width: int
    depth: int
    mlp_size: int
    num_heads: int
    image_size: int
    patch_size: int


@dataclass(frozen=True)
class Transformer:
    """A Gemma (pi0, pi0.5) or Llama (SmolVLA), the language model or the expert."""

    width: int
    depth: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class FlowConfig:
    """Architecture, behaviour and statistics of one policy. Defaults are those of the published pi0."""

    family: Family = "pi0"
    layout: Layout = "openpi"

    # architecture
    vision: Tower = Tower(1152, 27, 4304, 16, 224, 14)
    text: Transformer = Transformer(2048, 18, 16384, 8, 1, 256)
    expert: Transformer = Transformer(1024, 18, 4096, 8, 1, 256)
    vocab_size: int = 257_152
    rms_eps: float = 1e-6
    pixel_shuffle: int = 1
    """Patches of that many rows and columns become one token (SmolVLA)."""
    cross_every: int = 0
    """SmolVLA: in layers whose number this divides, actions attend to actions too, in others to the prefix alone; 0: in
    none."""
    max_action_dim: int = 32
    max_state_dim: int = 32
    min_period: float = 4e-3
    max_period: float = 4.0
    initializer_range: float = 0.02
    """Of random weights."""
    value_hidden_sizes: tuple[int, ...] = (512, 256, 128)
    noise_hidden_sizes: tuple[int, ...] = (128, 64)
    value_type: Literal["chunk_level", "action_level"] = "chunk_level"

    # observations and actions
    action_dim: int = 7
    state_dim: int = 8
    horizon: int = 50
    num_action_chunks: int = 50
    slots: tuple[str, ...] = OPENPI_CAMERAS
    """Cameras that the policy knows, in order."""
    cameras: dict[str, str] | None = None
    """The environment's camera by slot; None: that of the same name."""
    resize_to: tuple[int, int] = (224, 224)
    """Width and height."""
    delta_dims: int = 0
    action_bounds: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """Actions are clipped to these; None: what acts clips."""

    # prompt
    max_prompt_length: int = 48
    state_in_prompt: bool = False
    long_prompts: Literal["error", "cut"] = "error"

    # statistics
    state_norm: Norm = "mean_std"
    action_norm: Norm = "mean_std"
    asset_id: str | None = None
    statistics: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Of `state` and `actions`, each `mean`, `std`, `q01`, `q99`, `min`, `max`, or some of them."""

    # flow
    num_steps: int = 10
    method: Literal["flow_sde", "flow_noise", "flow_cps"] = "flow_sde"
    noise_level: float = 0.5
    noise_range: tuple[float, float] = (0.08, 0.16)
    ignore_last: bool = False
    joint: Literal["sum", "mean"] = "sum"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` gives an equal config."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Raises TypeError for a key that is none of this class's."""
        given = dict(config)
        for name, kind in (("vision", Tower), ("text", Transformer), ("expert", Transformer)):
            if isinstance(given.get(name), dict):
                given[name] = kind(**given[name])
        for name in [one.name for one in fields(cls) if str(one.type).startswith("tuple")]:
            if given.get(name) is not None:
                given[name] = tuple(given[name])
        if given.get("action_bounds") is not None:
            low, high = given["action_bounds"]
            given["action_bounds"] = (tuple(low), tuple(high))
        return cls(**given)


# from random weights

_TINY: dict[str, Any] = {
    "vision": Tower(96, 3, 192, 4, 64, 16),
    "text": Transformer(96, 3, 192, 4, 1, 24),
    "expert": Transformer(96, 3, 192, 4, 1, 24),
    "vocab_size": 512,
    "resize_to": (64, 64),
    "max_prompt_length": 16,
    "initializer_range": 0.08,
    "value_hidden_sizes": (96, 48),
    "noise_hidden_sizes": (64, 32),
    "num_steps": 4,
}
_SMOLVLM: dict[str, Any] = {  # SmolVLM2-500M-Video-Instruct, of which SmolVLA keeps half the layers
    "vision": Tower(768, 12, 3072, 12, 512, 16),
    "text": Transformer(960, 16, 2560, 15, 5, 64),
    "expert": Transformer(720, 16, 2048, 15, 5, 64),
    "vocab_size": 49_280,
    "rms_eps": 1e-5,
    "pixel_shuffle": 4,
    "cross_every": 2,
    "resize_to": (512, 512),
    "layout": "lerobot",
}
_PUBLISHED: dict[str, dict[str, Any]] = {
    "pi0": {},
    "pi05": {"max_prompt_length": 200, "state_in_prompt": True, "state_norm": "quantiles", "action_norm": "quantiles"},
    "smolvla": _SMOLVLM,
}
_VARIANTS = {"gemma_2b": FlowConfig.text, "gemma_300m": FlowConfig.expert}  # of openpi's and LeRobot's config.json
_SMOLVLM_NAMES = ("HuggingFaceTB/SmolVLM2-500M-Video-Instruct", "HuggingFaceTB/SmolVLM2-500M-Instruct")


def fresh_config(family: str, model: ModelConfig, seen: Observed) -> FlowConfig:
    """Of random weights, at `model.options.size`, for what an environment shows. Raises ProblemError."""
    base = FlowConfig(**{**_PUBLISHED[family], "family": family})
    if model.options.size == "tiny":
        # the expert is as wide as the language model, so that its keys and values are those of a published one's
        base = replace(base, **{"pixel_shuffle": 2 if family == "smolvla" else 1, **_TINY})
        base = replace(base, max_prompt_length=48 if base.state_in_prompt else base.max_prompt_length)
    cfg = replace(
        base,
        action_dim=seen.action_dim,
        state_dim=seen.state_dim,
        max_action_dim=max(seen.action_dim, 32 if model.options.size == "published" else 1),
        max_state_dim=max(seen.state_dim, 32 if model.options.size == "published" else 1),
        horizon=model.options.horizon or model.num_action_chunks,
        num_steps=4,
        slots=tuple(seen.cameras),
    )
    return with_run_settings(cfg, model)


def with_run_settings(cfg: FlowConfig, model: ModelConfig) -> FlowConfig:
    """`cfg` with what a run's `model` section says of it; null there keeps what is here.

    Raises:
        ProblemError: where the weights of `cfg` cannot serve what the run wants.
    """
    options = model.options
    names = [name for name in type(options).model_fields if name in {one.name for one in fields(cfg)}]
    changes = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    for name in ("noise_range", "value_hidden_sizes"):
        if name in changes:
            changes[name] = tuple(changes[name])
    if model.num_action_chunks > changes.get("horizon", cfg.horizon):
        horizon = changes.get("horizon", cfg.horizon)
        text = f"is {model.num_action_chunks}, and the policy thinks of {horizon} (its horizon). Set it to {horizon}"
        raise ProblemError(Problem("model.num_action_chunks", f"{text} or less"))
    if options.state_in_prompt and cfg.family != "pi05":
        text = f"is true, and {cfg.family} has no state in its prompt. Set it to null"
        raise ProblemError(Problem("model.options.state_in_prompt", text))
    unknown = [name for name in options.cameras or {} if name not in cfg.slots]
    if unknown:
        text = f"the policy knows no camera {', '.join(unknown)}. It knows {', '.join(cfg.slots)}"
        raise ProblemError(Problem("model.options.cameras", text))
    for name in ("num_steps", "method", "noise_level", "noise_range"):
        if name in changes and changes[name] != getattr(cfg, name):
            log.info("model.options.%s: %s, where the policy was %s", name, changes[name], getattr(cfg, name))
    return replace(cfg, num_action_chunks=model.num_action_chunks, value_type=model.value_type, **changes)


def flow_config(config: Config, seen: Observed) -> FlowConfig:
    """That of the checkpoint which a run starts from, or of `model.options.size`, with what the run says of it.

    Raises:
        ProblemError: where the checkpoint cannot serve what the run wants.
    """
    model, directory = config.model, start_dir(config)
    if directory is None or not (directory / "config.json").is_file():
        cfg = fresh_config(model.id, model, seen)
    else:
        try:
            cfg = with_run_settings(read_config(directory, model.options.asset_id), model)
        except (ValueError, OSError) as error:
            if isinstance(error, ProblemError):
                raise
            raise ProblemError(Problem("rollout.model_dir", str(error))) from error
    problem = unseen_cameras(cfg, seen.cameras)
    if problem:
        raise ProblemError(Problem("model.options.cameras", problem))
    return cfg


def present_slots(cfg: FlowConfig, cameras: Mapping[str, Any]) -> dict[str, str]:
    """The environment's camera of every slot that has one."""
    if cfg.cameras is not None:
        return {slot: cfg.cameras[slot] for slot in cfg.slots if slot in cfg.cameras}
    return {slot: slot for slot in cfg.slots if slot in cameras}


def unseen_cameras(cfg: FlowConfig, cameras: Mapping[str, Any]) -> str | None:
    """What is wrong with an environment's cameras; None: nothing."""
    has, present = ", ".join(cameras) or "none", present_slots(cfg, cameras)
    unknown = [name for name in present.values() if name not in cameras]
    if unknown:
        return f"there is no {', '.join(unknown)}; the environment has {has}"
    if not present:
        return (
            f"the policy knows {', '.join(cfg.slots)}, and the environment has {has}. Say which is which, "
            f"{{{cfg.slots[0]}: {next(iter(cameras), '...')}}}"
        )
    return None


# published directories


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Of the weights in a directory, from the files' headers alone; empty where there are none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(directory):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def weight_files(directory: Path) -> list[Path]:
    """`model.safetensors`, or the shards that its index names; those that are there."""
    index = directory / INDEX
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {WEIGHTS}
    return [directory / name for name in sorted(names) if (directory / name).is_file()]


def published_family(directory: Path) -> Family | None:
    """Whose weights are in a directory, by the names of its tensors; None: of no flow policy."""
    try:
        names = tensor_shapes(directory)
    except (OSError, ValueError, struct.error):
        return None
    return _family(names)


def _family(names: Mapping[str, Any]) -> Family | None:
    plain = {name.removeprefix("model.") for name in names}
    if any(name.startswith("vlm_with_expert.") for name in plain):
        return "smolvla"
    if any(name.startswith("paligemma_with_expert.") for name in plain):
        return "pi05" if "time_mlp_in.weight" in plain else "pi0"
    return None


def read_config(directory: Path, asset_id: str | None = None) -> FlowConfig:
    """The settings of the policy in `directory`, ours or a published one; `asset_id` as in the options.

    Raises:
        UnsupportedFlowError: where there is no flow policy, or one with a part that is not built here.
        StatisticsError: where there are no statistics, or those that are named are not there.
    """
    config = json.loads((directory / "config.json").read_text())
    if "rlinf_lite" in config:
        return FlowConfig.from_dict(config["rlinf_lite"]["settings"])
    try:
        return _published_config(directory, config, asset_id)
    except KeyError as missing:
        text = f"{directory}: neither config.json nor the tensors of {WEIGHTS} have {missing}"
        raise UnsupportedFlowError(text) from missing


def _published_config(directory: Path, config: Mapping[str, Any], asset_id: str | None) -> FlowConfig:
    shapes = tensor_shapes(directory)
    family = _family(shapes)
    if family is None:
        raise UnsupportedFlowError(f"{directory}: the tensors of {WEIGHTS} are not those of pi0, pi05 or smolvla")
    if config.get("type", family) != family:
        raise UnsupportedFlowError(f"{directory}: config.json says {config['type']}, and the tensors are {family}'s")
    published = ("model.paligemma_with_expert.", "model.vlm_with_expert.")
    layout: Layout = "lerobot" if any(name.startswith(published) for name in shapes) else "openpi"
    plain = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    cfg = FlowConfig(**{**_PUBLISHED[family], "family": family, "layout": layout})
    sizes = _smolvla_sizes if family == "smolvla" else _pi_sizes
    cfg = replace(cfg, **sizes(directory, config, plain))
    if cfg.text.depth != cfg.expert.depth or cfg.text.head_dim != cfg.expert.head_dim:
        raise UnsupportedFlowError(
            f"{directory}: the expert has {cfg.expert.depth} layers with heads of {cfg.expert.head_dim}, and the "
            f"language model {cfg.text.depth} with heads of {cfg.text.head_dim}. They must be alike"
        )
    said = _lerobot(directory, config, cfg) if layout == "lerobot" else _openpi(directory, config, cfg, asset_id)
    heads = {"value_hidden_sizes": "value_head.mlp.", "noise_hidden_sizes": "noise_head.mlp_logvar.moduleList."}
    found = {name: _hidden_sizes(plain, prefix) for name, prefix in heads.items()}
    said |= {name: hidden for name, hidden in found.items() if hidden}
    return replace(cfg, **said)


class StatisticsError(ValueError):
    """The statistics that normalise states and actions are missing, or of another robot."""


def _pi_sizes(directory: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    vlm, tiny = "paligemma_with_expert.paligemma", config.get("tiny", {})

    def transformer(prefix: str, variant: str) -> Transformer:
        name = str(config.get(variant))
        said = tiny.get("text" if variant.startswith("pali") else "expert")
        if said is None and name not in _VARIANTS:
            raise UnsupportedFlowError(
                f"{directory}: config.json names the {variant} {name!r}. Known: {_known(_VARIANTS)}"
            )
        heads = said["num_heads"] if said else _VARIANTS[name].num_heads
        return _transformer(prefix, shapes, heads)

    vision = f"{vlm}.model.vision_tower.vision_model"
    image_heads = tiny["vision"]["num_attention_heads"] if tiny else FlowConfig.vision.num_heads
    tower = _tower(vision, shapes, image_heads)
    state = shapes.get("state_proj.weight")
    max_action_dim = shapes["action_in_proj.weight"][1]
    embedding = shapes.get(f"{vlm}.lm_head.weight") or shapes[f"{vlm}.model.language_model.embed_tokens.weight"]
    return {
        "vision": tower,
        "text": transformer(f"{vlm}.model.language_model", "paligemma_variant"),
        "expert": transformer("paligemma_with_expert.gemma_expert.model", "action_expert_variant"),
        "vocab_size": embedding[0],
        "max_action_dim": max_action_dim,
        "max_state_dim": state[1] if state else max_action_dim,
        "resize_to": (tower.image_size, tower.image_size),
    }


def _smolvla_sizes(directory: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    named = config["vlm_model_name"]
    file = directory / named / "config.json"
    vlm = json.loads(file.read_text()) if file.is_file() else None
    if vlm is None and named not in _SMOLVLM_NAMES:
        raise UnsupportedFlowError(
            f"{directory}: vlm_model_name is {named!r}, whose sizes are not known. Put its config.json into "
            f"{directory / 'vlm'} and set vlm_model_name to ./vlm"
        )
    text = vlm["text_config"] if vlm else {}
    heads = text.get("num_attention_heads", 15)
    found = {
        "vision": _tower(
            "vlm_with_expert.vlm.model.vision_model", shapes, vlm["vision_config"]["num_attention_heads"] if vlm else 12
        ),
        "text": _transformer("vlm_with_expert.vlm.model.text_model", shapes, heads),
        "expert": _transformer("vlm_with_expert.lm_expert", shapes, heads),
        "vocab_size": shapes["vlm_with_expert.vlm.model.text_model.embed_tokens.weight"][0],
        "rms_eps": text.get("rms_norm_eps", 1e-5),
        "pixel_shuffle": vlm.get("scale_factor", 4) if vlm else 4,
        "max_action_dim": shapes["action_in_proj.weight"][1],
        "max_state_dim": shapes["state_proj.weight"][1],
        "resize_to": tuple(config["resize_imgs_with_padding"]),
    }
    cross = config.get("attention_mode", "cross_attn") == "cross_attn"
    found["cross_every"] = max(config.get("self_attn_every_n_layers", 2), 0) if cross else 1
    if config.get("add_image_special_tokens"):
        raise UnsupportedFlowError(f"{directory}: add_image_special_tokens is true, which is not supported")
    if config.get("adapt_to_pi_aloha"):
        raise UnsupportedFlowError(f"{directory}: adapt_to_pi_aloha is true, which is not supported")
    return found


def _transformer(prefix: str, shapes: Mapping[str, tuple[int, ...]], num_heads: int) -> Transformer:
    depth = _count(f"{prefix}.layers.", shapes)
    first = f"{prefix}.layers.0"
    queries, width = shapes[f"{first}.self_attn.q_proj.weight"]
    head_dim = queries // num_heads
    kv_heads = shapes[f"{first}.self_attn.k_proj.weight"][0] // head_dim
    return Transformer(width, depth, shapes[f"{first}.mlp.gate_proj.weight"][0], num_heads, kv_heads, head_dim)


def _tower(prefix: str, shapes: Mapping[str, tuple[int, ...]], num_heads: int) -> Tower:
    width, _, patch, _ = shapes[f"{prefix}.embeddings.patch_embedding.weight"]
    side = isqrt(shapes[f"{prefix}.embeddings.position_embedding.weight"][0])
    mlp = shapes[f"{prefix}.encoder.layers.0.mlp.fc1.weight"][0]
    return Tower(width, _count(f"{prefix}.encoder.layers.", shapes), mlp, num_heads, side * patch, patch)


def _count(prefix: str, shapes: Mapping[str, Any]) -> int:
    return len({name[len(prefix) :].partition(".")[0] for name in shapes if name.startswith(prefix)})


def _hidden_sizes(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> tuple[int, ...]:
    """Of an MLP whose layers are `<prefix><number>...weight`; empty where there is none."""
    layers = {
        int(name[len(prefix) :].partition(".")[0]): shape[0]
        for name, shape in shapes.items()
        if name.startswith(prefix) and name.endswith(".weight")
    }
    return tuple(layers[number] for number in sorted(layers)[:-1])


def _openpi(directory: Path, config: Mapping[str, Any], cfg: FlowConfig, asset_id: str | None) -> dict[str, Any]:
    """What openpi's config.json says, which is little, and its statistics."""
    tiny = config.get("tiny", {})
    files = {}
    for file in sorted(directory.glob("**/norm_stats.json")):
        files[file.parent.relative_to(directory).as_posix().removeprefix("assets/")] = file
    named = asset_id or tiny.get("asset_id") or (next(iter(files)) if len(files) == 1 else None)
    if named not in files:
        wanted = f"no statistics of {named!r}" if named else "no one set of statistics"
        raise StatisticsError(
            f"{directory}: there are {wanted} (assets/<id>/norm_stats.json). It has {', '.join(files) or 'none'}. Set "
            "model.options.asset_id"
        )
    statistics = json.loads(files[named].read_text())["norm_stats"]
    action_dim, state_dim = (tiny.get(name) for name in ("action_env_dim", "state_dim"))
    found = {
        "statistics": statistics,
        "asset_id": named,
        "action_dim": min(action_dim or len(statistics["actions"]["mean"]), cfg.max_action_dim),
        "state_dim": min(state_dim or len(statistics["state"]["mean"]), cfg.max_state_dim),
        "horizon": config["action_horizon"],
        "slots": tuple(tiny.get("image_keys", OPENPI_CAMERAS)),
        "max_prompt_length": config.get("max_token_len", cfg.max_prompt_length),
        "state_in_prompt": config.get("discrete_state_input", cfg.state_in_prompt) and cfg.family == "pi05",
        "delta_dims": _OPENPI_DELTA_DIMS if tiny.get("extra_delta_transform") else 0,
    }
    return {**found, "num_action_chunks": found["horizon"]}


def _lerobot(directory: Path, config: Mapping[str, Any], cfg: FlowConfig) -> dict[str, Any]:
    """What LeRobot's config.json and its processors say."""
    if config.get("use_relative_actions") or config.get("use_delta_joint_actions_aloha"):
        raise UnsupportedFlowError(f"{directory}: relative actions of LeRobot are not supported")
    if (alpha := config.get("time_sampling_beta_alpha", 1.5)) != 1.5 or config.get("time_sampling_beta_beta", 1.0) != 1:
        raise UnsupportedFlowError(f"{directory}: times of Beta({alpha}, ...) are not supported; Beta(1.5, 1) is")
    inputs, outputs = config["input_features"], config["output_features"]
    pictures = [name for name, feature in inputs.items() if feature["type"] == "VISUAL"]
    slots = [name.removeprefix("observation.").removeprefix("images.") for name in pictures]
    norms = {name: _LEROBOT_NORMS.get(kind) for name, kind in config["normalization_mapping"].items()}
    if None in (norms["STATE"], norms["ACTION"]):
        raise UnsupportedFlowError(f"{directory}: normalization_mapping has kinds other than {_known(_LEROBOT_NORMS)}")
    found = {
        "statistics": _lerobot_statistics(directory),
        "action_dim": outputs["action"]["shape"][0],
        "state_dim": inputs["observation.state"]["shape"][0] if "observation.state" in inputs else 0,
        "state_norm": norms["STATE"],
        "action_norm": norms["ACTION"],
        "horizon": config["chunk_size"],
        "slots": tuple(name for name in slots if not name.startswith("empty_camera_")),
        "max_prompt_length": config.get("tokenizer_max_length", cfg.max_prompt_length),
        "num_steps": config.get("num_inference_steps", config.get("num_steps", cfg.num_steps)),
        "min_period": config.get("min_period", cfg.min_period),
        "max_period": config.get("max_period", cfg.max_period),
    }
    if "image_resolution" in config:
        found["resize_to"] = tuple(reversed(config["image_resolution"]))  # height and width
    return {**found, "num_action_chunks": min(config.get("n_action_steps", found["horizon"]), found["horizon"])}


def _lerobot_statistics(directory: Path) -> dict[str, dict[str, list[float]]]:
    """Of the normaliser's file, wherever the preprocessor's steps say that it is."""
    file = directory / "policy_preprocessor.json"
    steps = json.loads(file.read_text())["steps"] if file.is_file() else []
    named = [
        step["state_file"] for step in steps if "normalizer" in step.get("registry_name", "") and "state_file" in step
    ]
    if not named or not (directory / named[0]).is_file():
        raise StatisticsError(
            f"{directory}: there are no statistics: policy_preprocessor.json names "
            f"{named[0] + ', which is not there' if named else 'no file of a normalizer_processor'}"
        )
    with (directory / named[0]).open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header, content = json.loads(stream.read(length)), stream.read()
    found: dict[str, dict[str, list[float]]] = {"state": {}, "actions": {}}
    for name, entry in header.items():
        feature, _, statistic = name.rpartition(".")
        kind = {"observation.state": "state", "action": "actions"}.get(feature)
        if kind is not None and entry["dtype"] == "F32":
            first, last = entry["data_offsets"]
            found[kind][statistic] = list(struct.unpack(f"<{(last - first) // 4}f", content[first:last]))
    return found


def _known(names: Mapping[str, Any]) -> str:
    return ", ".join(names)
