"""Fast pictures leave out what a camera does not see, and are the same."""

import numpy as np
import pytest

from rlinf_lite.envs import painter
from rlinf_lite.envs.errors import RenderUnavailableError
from rlinf_lite.envs.painter import Painter

KINDS = ("sphere", "box", "capsule", "cylinder", "ellipsoid")


def scene(num_geoms: int = 120) -> str:
    """Bodies of every kind all around the cameras, many of them across the edge of a picture."""
    rng, geoms = np.random.default_rng(0), []
    for number in range(num_geoms):
        angle, distance = rng.uniform(0, 2 * np.pi), rng.uniform(1.5, 4)
        place = [distance * np.cos(angle), distance * np.sin(angle), rng.uniform(-4, 4)]
        turn = rng.uniform(0, 360, 3)
        size, colour = rng.uniform(0.05, 0.7, 3), rng.uniform(0, 1, 3)
        words = [f"{name}='{' '.join(map(str, values))}'" for name, values in (("pos", place), ("euler", turn))]
        words += [f"size='{' '.join(map(str, size))}'", f"rgba='{' '.join(map(str, colour))} 1'"]
        geoms.append(f"<geom type='{KINDS[number % len(KINDS)]}' {' '.join(words)}/>")
    geoms.append("<geom type='plane' size='0 0 1' pos='0 0 -5' rgba='.3 .3 .3 1'/>")
    cameras = [
        f"<camera name='c{i}' pos='0 0 {i - 2}' euler='{90 * i} {50 * i} {20 * i}' fovy='{20 + 25 * i}'/>"
        for i in range(5)
    ]
    return f"<mujoco><worldbody>{''.join(cameras)}<light pos='0 0 5'/>{''.join(geoms)}</worldbody></mujoco>"


@pytest.mark.parametrize("size", [(48, 48), (40, 90), (90, 40)])
def test_what_is_out_of_view_is_left_out_and_not_missed(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    import mujoco

    model = mujoco.MjModel.from_xml_string(scene())
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    try:
        artist = Painter(model, size, "fast", "cameras")
    except RenderUnavailableError as error:
        pytest.skip(f"NO EGL: pictures are NOT tested on this machine: {error}")
    groups, left_out = model.geom_group.copy(), []
    for camera in ("c0", "c1", "c2", "c3", "c4"):
        picture = artist.paint(data, camera)
        np.testing.assert_array_equal(model.geom_group, groups)
        left_out.append(painter._out_of_view(model, data, camera, size).sum())
        with monkeypatch.context() as patch:
            patch.setattr(painter, "_out_of_view", lambda model, *_: np.zeros(model.ngeom, bool))
            np.testing.assert_array_equal(picture, artist.paint(data, camera))
        assert len(np.unique(picture)) > 10
    assert min(left_out) > 20, "something is behind every camera"
    artist.close()
