"""`gradient_checkpointing: auto`: the fastest way to train layers whose memory fits, chosen when a run starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from rlinf_lite.config.plan import plan_of
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import Config
from rlinf_lite.machine import byte_text
from rlinf_lite.models.training_options import Recompute, TrainingOptions
from rlinf_lite.preview.placements import needed_bytes, room_for

if TYPE_CHECKING:
    from rlinf_lite.preview.memory import Estimate

C = TypeVar("C", bound=Config | ReasoningConfig)

_FASTEST_FIRST: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Choice:
    """The bytes that ways to train need on the fullest slot, or on the fullest node of a CPU cluster."""

    key: str
    needed: dict[Recompute, int]
    """The fastest first, up to the first that fits; empty: not known."""
    room: int | None
    """Bytes that there are; None: not known."""

    @property
    def way(self) -> Recompute:
        """The fastest that is known to fit, or `full`."""
        fitting = (way for way, size in self.needed.items() if self.room is not None and size <= self.room)
        return next(fitting, "full")

    def __str__(self) -> str:
        needs = ", ".join(f"{way} {byte_text(size)}" for way, size in self.needed.items()) or "not known"
        have = "free memory is not known here" if self.room is None else f"there are {byte_text(self.room)}"
        return f"{self.key}: {self.way} (needed: {needs}; {have})"


def choose(config: Config | ReasoningConfig, own: Estimate | None = None) -> Choice | None:
    """The way that `auto` takes. None for models without the option, and where nothing trains. `own`: the estimate of
    this config as it is, if the caller has it."""
    key, options = training_options(config)
    if options is None or config.runner.task_type == "eval":
        return None
    from rlinf_lite.preview.memory import estimate  # loads torch

    of_own = "full" if options.gradient_checkpointing == "auto" else options.gradient_checkpointing
    room, needed = room_for(config), dict[Recompute, int]()
    for way in _FASTEST_FIRST:
        plan = plan_of(_with(config, way))
        found = own if own is not None and way == of_own else estimate(plan)
        if "actor" not in found.ranks or not found.ranks["actor"].working["activations"]:
            needed.clear()  # without these, all ways would seem to need the same
            break
        needed[way] = needed_bytes(plan, found)
        if room is not None and needed[way] <= room:
            break
    return Choice(f"{key}.gradient_checkpointing", needed, room)


def chosen(config: C) -> C:
    """The config with the way that `auto` takes, which is printed; the config itself if it does not say `auto`."""
    options = training_options(config)[1]
    choice = choose(config) if options is not None and options.gradient_checkpointing == "auto" else None
    if choice is None:
        return config
    print(choice)
    return _with(config, choice.way)


def training_options(config: Config | ReasoningConfig) -> tuple[str, TrainingOptions | None]:
    """The section with options of training, and its key; None for models without them."""
    in_text = isinstance(config, ReasoningConfig)
    key, found = ("model", config.model) if in_text else ("model.options", config.model.options)
    return key, found if isinstance(found, TrainingOptions) else None


def _with(config: C, way: Recompute) -> C:
    change = {"gradient_checkpointing": way}
    if isinstance(config, ReasoningConfig):
        return config.model_copy(update={"model": config.model.model_copy(update=change)})
    model = config.model.model_copy(update={"options": config.model.options.model_copy(update=change)})
    return config.model_copy(update={"model": model})
