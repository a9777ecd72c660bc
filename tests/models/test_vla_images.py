from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rlinf_lite.models.pictures import resized
from rlinf_lite.models.vla.config import TowerConfig, VLAConfig
from rlinf_lite.models.vla.inputs import normalize_images, resize_images

GOLDEN = np.load(Path(__file__).parent / "tiny_openvla" / "golden.npz")
STD = torch.tensor([0.229, 0.224, 0.225, 0.5, 0.5, 0.5])[:, None, None]
TOWER = TowerConfig(32, 3, 2, 128)


def config(**changes: object) -> VLAConfig:
    settings = {"dino": TOWER, "siglip": TOWER, "image_size": 28, "patch_size": 14, **changes}
    return VLAConfig(**settings)


def random_images(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("case", [0, 1])
def test_pixel_values_are_those_of_the_published_processor(case: int) -> None:
    image = torch.from_numpy(GOLDEN[f"image{case}"])[None, None]
    pixels = normalize_images(resize_images(image, config()), config())
    difference_in_grey_levels = (pixels - torch.from_numpy(GOLDEN[f"pixel_values{case}"])).abs() * STD * 255
    assert pixels.shape == (1, 6, 28, 28)
    assert difference_in_grey_levels.max() < 0.01


def test_resizing_equals_pil_on_hard_edges() -> None:
    image_module = pytest.importorskip("PIL.Image")
    hard_edges = (random_images(96, 130, 3) > 127).to(torch.uint8) * 255
    for size in (28, 100, 224):
        expected = np.asarray(image_module.fromarray(hard_edges.numpy()).resize((size, size), image_module.BICUBIC))
        assert np.array_equal(resize_images(hard_edges, config(image_size=size)).numpy(), expected)


def test_images_of_the_right_size_are_not_touched() -> None:
    images = random_images(2, 1, 28, 28, 3)
    assert resize_images(images, config()) is images


def test_cameras_and_towers_are_laid_out_camera_by_camera() -> None:
    images = random_images(2, 3, 28, 28, 3)
    both = normalize_images(images, config())
    assert both.shape == (2, 18, 28, 28)
    only_siglip = normalize_images(images, config(dino=None))
    torch.testing.assert_close(both.view(2, 3, 6, 28, 28)[:, :, 3:], only_siglip.view(2, 3, 3, 28, 28))
    torch.testing.assert_close(only_siglip[:, 3:6], images[:, 1].permute(0, 3, 1, 2) / 127.5 - 1)


def test_what_is_kept_of_an_observation_is_small() -> None:
    kept = resize_images(random_images(2, 2, 40, 30, 3), config(center_crop=True))
    assert kept.dtype == torch.uint8 and kept.shape == (2, 2, 28, 28, 3)


def test_the_centre_crop_has_nine_tenths_of_the_area() -> None:
    ramp = torch.arange(101, dtype=torch.uint8)[None, :, None].expand(101, 101, 3)  # a pixel's value is its column
    row = resize_images(ramp, config(image_size=101, center_crop=True))[50, :, 0].float()
    margin = 100 * (1 - 0.9**0.5) / 2
    expected = margin + torch.arange(101) * 0.9**0.5
    assert (row - expected).abs().max() <= 1


def test_a_preview_of_memory_keeps_no_weights_without_numbers() -> None:
    size, wanted = (11, 13), torch.arange(5 * 7 * 3, dtype=torch.uint8).view(1, 5, 7, 3)
    with FakeTensorMode() as fake:
        resized(fake.from_tensor(wanted), size)
    assert resized(wanted, size).float().mean().item() > 0
