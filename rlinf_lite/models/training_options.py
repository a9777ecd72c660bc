"""Options of all large models for how their layers train. Importable without torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from rlinf_lite.cards import Section


def _mode_of_bool(value: Any) -> Any:
    """Other libraries' true and false are `full` and `none`."""
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


Recompute = Literal["auto", "none", "selective", "full"]


class TrainingOptions(Section):
    """What a model's options begin with."""

    gradient_checkpointing: Annotated[Recompute, BeforeValidator(_mode_of_bool)] = "none"
    """What the backward pass computes again instead of keeping it. none: nothing. selective: all of a layer but matrix
    products and attention. full (also true): whole layers. auto: the first of these that fits into the memory of the
    GPU, or of this machine on a CPU cluster; full where that is not known."""
    compile: bool = False
    """Compile layers by torch.compile for training: the first update then takes a minute or more. Acting is not
    compiled. Log-probabilities that are computed before updates then take the memory of a training pass."""
