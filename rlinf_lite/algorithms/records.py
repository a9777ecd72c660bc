"""What goes into an advantage estimator or a loss, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios of probabilities are clamped to +- this."""


class InputError(ValueError):
    """Tensors that an algorithm cannot work with: one is missing, or has the wrong shape."""


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """Trajectories of all ranks. What stands at positions where `mask` is 0 never reaches a result."""

    rewards: Tensor  # [B, T]; of simulators float64, so that sums do not hang on their order
    mask: Tensor  # [B, T]; non-zero where a decision counts
    values: Tensor | None = None  # [B, T]
    next_values: Tensor | None = None  # [B, T]; value after each decision, the bootstrap where an episode ends
    dones: Tensor | None = None  # [B, T]; non-zero where an episode ends
    group_ids: Tensor | None = None  # [B]; integers; a group must be whole
    baselines: Tensor | None = None  # [B]; a score to compare the row's with

    def __post_init__(self) -> None:
        _check_shapes(self, ("rewards", "values", "next_values", "dones"), ("group_ids", "baselines"))


@dataclass(frozen=True, eq=False)
class AdvantageOutputs:
    """Both are 0 where the mask is."""

    advantages: Tensor  # [B, T]
    returns: Tensor  # [B, T]


@dataclass(frozen=True, eq=False)
class LossInputs:
    """One micro-batch. `denominator` and `dp_size` are those of `aggregate_loss`."""

    logprobs: Tensor  # [B, T]
    old_logprobs: Tensor  # [B, T]
    advantages: Tensor  # [B, T]
    mask: Tensor  # [B, T]; non-zero where a position counts
    entropy: Tensor | None = None  # [B, T]
    values: Tensor | None = None  # [B, T]
    old_values: Tensor | None = None  # [B, T]
    returns: Tensor | None = None  # [B, T]
    weights: Tensor | None = None  # [B, T]; factors of the policy loss, as `correction` gives them
    behaviour_logprobs: Tensor | None = None  # [B, T]; of the policy that acted, where `old_logprobs` are another's
    denominator: Tensor | float | None = None
    dp_size: int = 1

    def __post_init__(self) -> None:
        names = ("logprobs", "old_logprobs", "advantages", "entropy", "values", "old_values", "returns", "weights")
        _check_shapes(self, (*names, "behaviour_logprobs"), ())


@dataclass(frozen=True, eq=False)
class LossOutputs:
    """`loss` is a scalar to call backward on. `metrics` are detached scalars: means over the valid positions of
    this micro-batch (so weight them by `mask.sum()` to combine several), and maxima where the name ends in `_max`."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def require(tensor: Tensor | None, name: str, needed_by: str) -> Tensor:
    """`tensor`, or an InputError that says who needs it."""
    if tensor is None:
        raise InputError(f"{needed_by} needs {name}, which is None. Pass {name}=, or choose an algorithm without it.")
    return tensor


def _check_shapes(record: AdvantageInputs | LossInputs, full: tuple[str, ...], per_row: tuple[str, ...]) -> None:
    shape = record.mask.shape
    if len(shape) != 2:
        raise InputError(f"{type(record).__name__}.mask has shape {list(shape)}; [B, T] is needed.")
    wanted = {name: shape for name in full} | {name: shape[:1] for name in per_row}
    for name, want in wanted.items():
        tensor = getattr(record, name)
        if tensor is not None and tensor.shape != want:
            raise InputError(
                f"{type(record).__name__}.{name} has shape {list(tensor.shape)}; the mask [B, T] = {list(shape)} "
                f"asks for {list(want)}."
            )
