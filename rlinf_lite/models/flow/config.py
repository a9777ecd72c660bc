"""The settings of flow policies: architecture, behaviour and statistics. Importable without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import TypeAdapter

from rlinf_lite.cards import Observed, Problem, ProblemError

if TYPE_CHECKING:
    from rlinf_lite.config.schema import ModelConfig

Family = Literal["pi0", "pi05", "smolvla"]
Layout = Literal["openpi", "lerobot"]
Norm = Literal["mean_std", "quantiles", "min_max", "identity"]
LeRobotRules = Literal["v0.4", "v0.5"]
OPENPI_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


class StatisticsError(ValueError):
    """The statistics that normalise states and actions are missing, or belong to another robot."""


@dataclass(frozen=True)
class Tower:
    """Sizes of a SigLIP vision transformer over square images."""

    width: int
    depth: int
    mlp_size: int
    num_heads: int
    image_size: int
    patch_size: int


@dataclass(frozen=True)
class Transformer:
    """Sizes of a Gemma (pi0, pi0.5) or Llama (SmolVLA): the language model or the expert."""

    width: int
    depth: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class FlowConfig:
    """Architecture, behaviour and statistics of one policy; JSON. Defaults are those of the published pi0."""

    family: Family = "pi0"
    layout: Layout = "openpi"
    prefix: Literal["", "model."] = ""
    """Beginning of the tensors' names in the file; LeRobot reads its own with and without it."""

    # architecture
    vision: Tower = Tower(1152, 27, 4304, 16, 224, 14)
    text: Transformer = Transformer(2048, 18, 16384, 8, 1, 256)
    expert: Transformer = Transformer(1024, 18, 4096, 8, 1, 256)
    vocab_size: int = 257_152
    tied_embeddings: bool = True
    """The file of weights may hold the embedding under the name of the language model's head."""
    rms_eps: float = 1e-6
    vision_eps: float = 1e-6
    pixel_shuffle: int = 1
    """SmolVLA: a square of this many by this many patches becomes one token."""
    cross_every: int = 0
    """SmolVLA: in every such layer (numbers 0, n, 2 n, ...) actions attend to the prefix and to actions, in the other
    layers only to the prefix; 0: only to the prefix in all layers."""
    max_action_dim: int = 32
    max_state_dim: int = 32
    min_period: float = 4e-3
    max_period: float = 4.0
    initializer_range: float = 0.02
    """Standard deviation of random weights."""
    value_hidden_sizes: tuple[int, ...] = (512, 256, 128)
    noise_hidden_sizes: tuple[int, ...] = (128, 64)
    value_type: Literal["chunk_level", "action_level"] = "chunk_level"
    lora: dict[str, Any] = field(default_factory=dict)
    """Adapters in the policy, as in `model.options.lora`; empty: none."""

    # observations and actions
    action_dim: int = 7
    state_dim: int = 8
    horizon: int = 50
    num_action_chunks: int = 50
    slots: tuple[str, ...] = OPENPI_CAMERAS
    """Cameras that the policy knows, in order."""
    cameras: dict[str, str] | None = None
    """The environment's camera by slot; None: cameras of the same names."""
    resize_to: tuple[int, int] = (224, 224)
    """Width and height."""
    delta_dims: int = 0
    """Number of leading action dimensions that are relative to the state at the beginning of the chunk."""
    lerobot_preprocessing: LeRobotRules | None = None
    """LeRobot's pi0 and pi0.5: the release whose prompts and pictures the policy was trained on, 0.4, or 0.5 and later.
    None: not known, and read as v0.5; also for all other policies."""
    action_bounds: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """Low and high, to which actions are clipped; None: the environment clips."""

    # prompt
    max_prompt_length: int = 48
    state_in_prompt: bool = False
    long_prompts: Literal["error", "cut"] = "error"

    guidance: float | None = None
    """w: the policy acts with RECAP's positive condition in its prompt, and v = (1 - w) v_plain + w v_conditioned.
    None: its prompts have no condition."""

    # statistics
    state_norm: Norm = "mean_std"
    action_norm: Norm = "mean_std"
    norm_eps: float = 1e-6
    """Added to divisors; in LeRobot, only to standard deviations and to ranges that are 0."""
    asset_id: str | None = None
    statistics: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Statistics by dimension of `state` and `actions`: some of `mean`, `std`, `q01`, `q99`, `min`, `max`."""

    # flow
    num_steps: int = 10
    method: Literal["flow_sde", "flow_noise", "flow_cps"] = "flow_sde"
    noise_level: float = 0.5
    noise_range: tuple[float, float] = (0.08, 0.16)
    ignore_last: bool = False
    joint: Literal["sum", "mean"] = "sum"

    @property
    def knows_lerobots_rules(self) -> bool:
        """Whether `lerobot_preprocessing` matters: all releases of LeRobot read other policies alike."""
        return self.layout == "lerobot" and self.family != "smolvla"

    def fitting(self, width: int, height: int) -> tuple[int, int]:
        """The largest width and height within `resize_to` that keep a picture's aspect ratio; the rest is padding."""
        ratio = max(width / self.resize_to[0], height / self.resize_to[1])
        return max(1, int(width / ratio)), max(1, int(height / ratio))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` gives an equal config."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Raises ValueError for a value that does not fit."""
        found: Self = TypeAdapter(cls).validate_python(dict(config))
        return found


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
    "tied_embeddings": False,
    "rms_eps": 1e-5,
    "pixel_shuffle": 4,
    "cross_every": 2,
    "resize_to": (512, 512),
    "layout": "lerobot",
    "prefix": "model.",
    "norm_eps": 1e-8,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "pi0": {},
    "pi05": {"max_prompt_length": 200, "state_in_prompt": True, "state_norm": "quantiles", "action_norm": "quantiles"},
    "smolvla": _SMOLVLM,
}


def fresh_config(family: str, model: ModelConfig, seen: Observed) -> FlowConfig:
    """Settings of random weights of `model.options.size`, for an environment that shows `seen`. Raises ProblemError."""
    base = FlowConfig(**{**PUBLISHED[family], "family": family})
    if model.options.size == "tiny":
        # equal widths of expert and language model give keys and values of equal width, as in published policies
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
        slots=tuple(model.options.cameras or seen.cameras),
    )
    return with_run_settings(cfg, model)


def with_run_settings(cfg: FlowConfig, model: ModelConfig) -> FlowConfig:
    """`cfg` changed by a run's `model` section; options that are null there keep their values.

    Raises:
        ProblemError: if the weights of `cfg` do not allow what the run asks for.
    """
    options = model.options
    rules = options.lerobot_preprocessing or cfg.lerobot_preprocessing
    given = {
        "num_steps": options.num_steps,
        "method": options.method,
        "noise_level": options.noise_level,
        "noise_range": options.noise_range,
        "ignore_last": options.ignore_last,
        "joint": options.joint,
        "horizon": options.horizon,
        "cameras": options.cameras,
        "action_dim": options.action_dim,
        "state_dim": options.state_dim,
        "asset_id": options.asset_id,
        "delta_dims": options.delta_dims,
        "state_in_prompt": options.state_in_prompt,
        # the run's rules are saved with the policy
        "lerobot_preprocessing": rules or ("v0.5" if cfg.knows_lerobots_rules else None),
        "max_prompt_length": options.max_prompt_length,
        "long_prompts": options.long_prompts,
        "guidance": options.guidance,
        "value_hidden_sizes": None if options.value_hidden_sizes is None else tuple(options.value_hidden_sizes),
    }
    for name in ("action_dim", "state_dim"):
        value, own = getattr(options, name), getattr(cfg, name)
        if value is not None and value > own:
            text = f"is {value}, and the policy has {own}: it has no statistics for more"
            raise ProblemError(Problem(f"model.options.{name}", text))
    changes = {name: value for name, value in given.items() if value is not None}
    horizon = options.horizon or cfg.horizon
    if model.num_action_chunks > horizon:
        text = f"is {model.num_action_chunks}, and the policy's horizon is {horizon} actions. Set it to {horizon}"
        raise ProblemError(Problem("model.num_action_chunks", f"{text} or less"))
    if options.state_in_prompt and cfg.family != "pi05":
        text = f"is true, and {cfg.family} has no state in its prompt. Set it to null"
        raise ProblemError(Problem("model.options.state_in_prompt", text))
    if options.lerobot_preprocessing and not cfg.knows_lerobots_rules:
        text = f"is {options.lerobot_preprocessing}, and this {cfg.family} has {cfg.layout}'s layout: all releases of "
        text += "LeRobot read pictures and prompts of SmolVLA alike, and openpi is not LeRobot. Set it to null"
        raise ProblemError(Problem("model.options.lerobot_preprocessing", text))
    unknown = [name for name in options.cameras or {} if name not in cfg.slots]
    if unknown:
        text = f"the policy knows no camera {', '.join(unknown)}. It knows {', '.join(cfg.slots)}"
        raise ProblemError(Problem("model.options.cameras", text))
    cfg = replace(cfg, num_action_chunks=model.num_action_chunks, value_type=model.value_type, **changes)
    if cfg.method == "flow_cps" and cfg.num_steps == 1:
        text = "is 1, and flow_cps has no noise in its last step: nothing would train. Set it to 2 or more, or "
        raise ProblemError(Problem("model.options.num_steps", f"{text}model.options.method to flow_sde"))
    if cfg.delta_dims > min(cfg.action_dim, cfg.state_dim):
        text = f"is {cfg.delta_dims}, and there are {cfg.action_dim} actions and {cfg.state_dim} state numbers"
        raise ProblemError(Problem("model.options.delta_dims", text))
    return cfg


def changed_settings(before: FlowConfig, after: FlowConfig, published: bool) -> Iterator[str]:
    """Settings in which a run differs from the training of its policy, a line each. `published`: settings of
    exploration are left out, as a published policy has none."""
    names = ["num_steps", "horizon"]
    names += ["guidance"] * (before.guidance is not None)
    if not published:
        names += ["num_action_chunks", "delta_dims", "state_in_prompt", "method"]
        names += {
            "flow_sde": ["noise_level", "ignore_last"],
            "flow_cps": ["noise_level"],
            "flow_noise": ["noise_range", "joint"],
        }[after.method]
    if before.lerobot_preprocessing is not None:
        names.append("lerobot_preprocessing")
    for name in names:
        own, had = getattr(after, name), getattr(before, name)
        if own != had:
            yield f"{name} {own}, where it was {had}"


def lerobot_differences(cfg: FlowConfig, sizes: Iterable[tuple[int, int]]) -> list[str]:
    """Ways in which LeRobot 0.4 read inputs unlike later releases. `sizes`: heights and widths of the pictures."""
    if not cfg.knows_lerobots_rules:
        return []
    found = []
    if cfg.state_in_prompt and cfg.state_dim < cfg.max_state_dim:
        found.append(f"wrote zeros into the prompt after the state, up to {cfg.max_state_dim} numbers")
    if any(cfg.fitting(width, height) != cfg.resize_to for height, width in sizes):
        found.append("padded pictures with -3 instead of -1")
    return found


def present_slots(cfg: FlowConfig, cameras: Mapping[str, Any]) -> dict[str, str]:
    """The environment's camera of every slot that has one."""
    if cfg.cameras is not None:
        return {slot: cfg.cameras[slot] for slot in cfg.slots if slot in cfg.cameras}
    return {slot: slot for slot in cfg.slots if slot in cameras}


def unseen_cameras(cfg: FlowConfig, cameras: Mapping[str, Any]) -> str | None:
    """Why the policy cannot use an environment's cameras; None: it can."""
    has, present = ", ".join(cameras) or "none", present_slots(cfg, cameras)
    unknown = [name for name in present.values() if name not in cameras]
    if unknown:
        return f"there is no {', '.join(unknown)}; the environment has {has}"
    if not present:
        return (
            f"the policy knows {', '.join(cfg.slots)}, and the environment has {has}. Say which is which, "
            f"{{{cfg.slots[0]}: {next(iter(cameras), '...')}}}"
        )
    unused = [name for name in cameras if name not in present.values()]
    if unused and cfg.cameras is None and len(present) < len(cfg.slots):
        empty = ", ".join(slot for slot in cfg.slots if slot not in present)
        text = f"the environment has no {empty}, and {', '.join(unused)} is not used"
        return f"{text}. Say which is which, or which are used"
    return None
