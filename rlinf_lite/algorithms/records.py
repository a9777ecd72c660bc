"""Inputs and outputs of advantage estimators and losses."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios of probabilities are clamped to +- this value."""


class InputError(ValueError):
    """A tensor is missing or has the wrong shape, or values do not fit an algorithm."""


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """Trajectories of all ranks. Values at positions where `mask` is 0 never affect a result."""

    rewards: Tensor  # [B, T]; float64 from simulators, so that sums do not depend on their order
    mask: Tensor  # [B, T]; non-zero where a decision counts
    values: Tensor | None = None  # [B, T]
    next_values: Tensor | None = None  # [B, T]; value after each decision, the bootstrap where an episode ends
    dones: Tensor | None = None  # [B, T]; non-zero where an episode ends
    group_ids: Tensor | None = None  # [B]; integers; a group must be whole
    baselines: Tensor | None = None  # [B]; a score that the row's score is compared with

    def __post_init__(self) -> None:
        _check_shapes(self, ("rewards", "values", "next_values", "dones"), ("group_ids", "baselines"))


@dataclass(frozen=True, eq=False)
class AdvantageOutputs:
    """Advantages and returns; both are 0 where the mask is 0."""

    advantages: Tensor  # [B, T]
    returns: Tensor  # [B, T]


@dataclass(frozen=True, eq=False)
class LossInputs:
    """Tensors of one micro-batch. `denominator` and `dp_size` are arguments of `aggregate_loss`."""

    logprobs: Tensor  # [B, T]
    old_logprobs: Tensor  # [B, T]
    advantages: Tensor  # [B, T]
    mask: Tensor  # [B, T]; non-zero where a position counts
    entropy: Tensor | None = None  # [B, T]
    values: Tensor | None = None  # [B, T]
    old_values: Tensor | None = None  # [B, T]
    returns: Tensor | None = None  # [B, T]
    weights: Tensor | None = None  # [B, T]; factors of the policy loss, as `correction` gives them
    behaviour_logprobs: Tensor | None = None  # [B, T]; of the policy that acted, if `old_logprobs` are of another one
    teacher_logprobs: Tensor | None = None  # [B, T]; of a teacher, for the same actions
    denominator: Tensor | float | None = None
    dp_size: int = 1

    def __post_init__(self) -> None:
        names = ("logprobs", "old_logprobs", "advantages", "entropy", "values", "old_values", "returns", "weights")
        _check_shapes(self, (*names, "behaviour_logprobs", "teacher_logprobs"), ())


@dataclass(frozen=True, eq=False)
class LossOutputs:
    """Loss and metrics of a micro-batch.

    `loss` is a scalar to call backward on. `metrics` are detached scalars: means over the valid positions of this
    micro-batch (weight them by `mask.sum()` to combine several), or maxima if the name ends in `_max`.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def require(tensor: Tensor | None, name: str, needed_by: str) -> Tensor:
    """`tensor`. Raises InputError if it is None, with the name of what needs it."""
    if tensor is None:
        raise InputError(f"{needed_by} needs {name}, which is None. Pass {name}=, or choose an algorithm without it.")
    return tensor


def _check_shapes(record: AdvantageInputs | LossInputs, full: tuple[str, ...], per_row: tuple[str, ...]) -> None:
    shape = record.mask.shape
    if len(shape) != 2:
        raise InputError(f"{type(record).__name__}.mask has shape {list(shape)}; it must be [B, T].")
    wanted = {name: shape for name in full} | {name: shape[:1] for name in per_row}
    for name, want in wanted.items():
        tensor = getattr(record, name)
        if tensor is not None and tensor.shape != want:
            raise InputError(
                f"{type(record).__name__}.{name} has shape {list(tensor.shape)}; with the mask [B, T] = {list(shape)} "
                f"it must be {list(want)}."
            )
