"""Linear layers with an adapter. Apart from `lora.py`, because it imports torch and peft."""

from __future__ import annotations

from typing import Any, cast

from peft.tuners.lora import Linear
from torch import Tensor


class AdaptedLinear(Linear):
    """Computes what peft's own class does of one adapter without dropout, in one operation less or two: the adapter's
    last product is added to the layer's own while it is computed, its scaling included. Inputs are not cast, as
    autocast would undo it."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        (name,), layer = self.active_adapters, cast(Any, self)
        own: Tensor = layer.base_layer(x)
        low, weight = layer.lora_A[name](x), layer.lora_B[name].weight
        return own.flatten(0, -2).addmm(low.flatten(0, -2), weight.t(), alpha=layer.scaling[name]).view_as(own)
