"""From uint8 camera images to pixel values, as the published policies' image processors compute them.

Resizing and cropping end in whole grey levels, as in PIL and in the evaluation code of the published policies. So they
can be done once, where an image is first seen, and what is kept stays uint8.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from rlinf_lite.models.vla.config import VLAConfig

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and standard deviation that DINOv2 was trained with
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # SigLIP's
_CROP_SIDE = math.sqrt(0.9)  # nine tenths of the area
_UNIT = 2**22  # of PIL's fixed-point weights


def resize_images(images: Tensor, cfg: VLAConfig) -> Tensor:
    """uint8 [..., S, S, 3] of uint8 [..., H, W, 3]: resized to a square, then the centre crop where the policy has one.

    The aspect ratio is not kept ("resize-naive"). Images of the right size and without a crop come back as they are.
    """
    size, shape, device = cfg.image_size, images.shape, images.device
    if shape[-3:-1] == (size, size) and not cfg.center_crop:
        return images
    x = images.reshape(-1, *shape[-3:]).permute(0, 3, 1, 2).double()  # [N, 3, H, W]
    if x.shape[3] != size:
        x = _rounded(x @ _bicubic(x.shape[3], size, device).T)
    if x.shape[2] != size:
        x = _rounded(_bicubic(x.shape[2], size, device) @ x)
    if cfg.center_crop:
        weights = _bilinear_crop(size, device)
        x = (weights @ x @ weights.T * (255.5 / 255)).floor().clamp(0, 255)  # as TensorFlow converts to uint8
    return x.to(torch.uint8).permute(0, 2, 3, 1).reshape(*shape[:-3], size, size, 3)


def normalize_images(images: Tensor, cfg: VLAConfig) -> Tensor:
    """Pixel values float32 [B, cameras * towers * 3, S, S] of what `resize_images` gave, [B, cameras, S, S, 3].

    Per camera come three channels normalised for DINOv2, then three for SigLIP, or those of the one tower there is.
    """
    towers = [moments for moments, tower in ((_IMAGENET, cfg.dino), (_HALF, cfg.siglip)) if tower is not None]
    mean, std = (torch.tensor(values, device=images.device).flatten() for values in zip(*towers, strict=True))
    batch, cameras, size, _, _ = images.shape
    channels_first = images.permute(0, 1, 4, 2, 3)
    pixels = torch.cat([channels_first] * len(towers), dim=2).float()  # [B, cameras, towers * 3, S, S]
    pixels.mul_((1 / (255 * std))[:, None, None]).sub_((mean / std)[:, None, None])
    return pixels.view(batch, cameras * len(towers) * 3, size, size)


@lru_cache(maxsize=32)
def _bicubic(num_in: int, num_out: int, device: torch.device) -> Tensor:
    """PIL's weights [out, in], float64 whole numbers in `_UNIT`ths: convolution with a cubic (a = -0.5), widened when
    shrinking so that nothing aliases."""
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


def _rounded(x: Tensor) -> Tensor:
    return ((x + _UNIT // 2) / _UNIT).floor().clamp(0, 255)


@lru_cache(maxsize=8)
def _bilinear_crop(size: int, device: torch.device) -> Tensor:
    """Weights [out, in] that stretch the middle of a row over the whole, corner pixel on corner pixel.

    That is what `tf.image.crop_and_resize` does, which the training and evaluation of published policies crop with.
    """
    first = (1 - _CROP_SIDE) / 2
    at = (first + torch.linspace(0, 1, size, dtype=torch.float64) * _CROP_SIDE) * (size - 1)
    distance = (at[:, None] - torch.arange(size, dtype=torch.float64)).abs()
    return (1 - distance).clamp(min=0).to(device)
