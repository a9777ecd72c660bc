"""Scaling of pictures to a policy's size, as PIL does it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

_UNIT = 2**22  # the 1 of PIL's fixed-point weights


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Scale pictures uint8 [..., H, W, 3] to uint8 [..., *size, 3], bicubic. `size`: height and width; the aspect ratio
    is not kept, and pictures of that size are returned as they are. Bit for bit as PIL where it scales the width first;
    some versions of PIL scale the height of tall pictures first, which rounds differently."""
    shape, device = images.shape, images.device
    if shape[-3:-1] == size:
        return images
    height, width = size
    x = images.reshape(-1, *shape[-3:]).permute(0, 3, 1, 2).double()  # [N, 3, H, W]
    if x.shape[3] != width:
        x = _rounded(x @ _bicubic(x.shape[3], width, device).T)
    if x.shape[2] != height:
        x = _rounded(_bicubic(x.shape[2], height, device) @ x)
    return x.to(torch.uint8).permute(0, 2, 3, 1).reshape(*shape[:-3], height, width, 3).contiguous()


def kept(make: Callable[..., Tensor], most: int | None = 8) -> Callable[..., Tensor]:
    """Decorator that keeps the last `most` results of a function (up to 15 MB each, for the largest pictures).

    `most` None keeps all, as recorded passes (`graphs`) need that read the results. Nothing is kept while tensors are
    fake (`preview.fake`), as those have no numbers."""
    keeping = lru_cache(maxsize=most)(make)

    @wraps(make)
    def kept_or_made(*args: Hashable) -> Tensor:
        if torch.compiler.is_compiling() or detect_fake_mode() is not None:
            return make(*args)
        with torch.inference_mode(False):  # a tensor made while acting must serve training too
            return keeping(*args)

    return kept_or_made


@kept
def _bicubic(num_in: int, num_out: int, device: torch.device) -> Tensor:
    """PIL's weights [out, in], float64 whole numbers in units of 1 / `_UNIT`: convolution with a cubic (a = -0.5),
    widened against aliasing when the picture shrinks."""
    scale = num_in / num_out
    width = max(scale, 1.0)
    centres = (torch.arange(num_out, dtype=torch.float64)[:, None] + 0.5) * scale
    pixels = torch.arange(num_in, dtype=torch.float64)
    first, last = (centres - 2 * width + 0.5).floor(), (centres + 2 * width + 0.5).floor()
    d = ((pixels - centres + 0.5) / width).abs()
    near, far = (1.5 * d - 2.5) * d * d + 1, ((2.5 - 0.5 * d) * d - 4) * d + 2
    weights = torch.where(d < 1, near, torch.where(d < 2, far, 0.0)) * ((pixels >= first) & (pixels < last))
    weights = weights / weights.sum(1, keepdim=True) * _UNIT
    return (weights + 0.5 * weights.sign()).trunc().to(device)


def sincos_positions(side: int, width: int) -> Tensor:
    """Embeddings [side * side, 4 * (width // 4)] of a square of patches: sines and cosines of the row, then of the
    column, at width // 4 frequencies each."""
    frequencies = 10_000.0 ** (-torch.arange(width // 4) / (width // 4))
    angles = torch.arange(side)[:, None] * frequencies
    axis = torch.cat([angles.sin(), angles.cos()], dim=1)  # [side, width / 2]
    rows, columns = axis[:, None].expand(-1, side, -1), axis[None].expand(side, -1, -1)
    return torch.cat([rows, columns], dim=2).reshape(side * side, -1)


def _rounded(x: Tensor) -> Tensor:
    return ((x + _UNIT // 2) / _UNIT).floor().clamp(0, 255)
