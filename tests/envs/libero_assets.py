"""Stand-ins for the assets of LIBERO's scene of libero_goal and libero_spatial: boxes with the joints, sites and names
that the library asks for, so that its published initial states fit. `python tests/envs/libero_assets.py FOLDER` writes
them. The stove's knob turns by itself, so that a task succeeds without a policy."""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

from rlinf_lite.envs.libero.package import FOLDERS

OBJECTS = {  # half sizes in metres, of what the library lets fall and grasp
    "stable_scanned_objects/akita_black_bowl": (0.05, 0.05, 0.025),
    "stable_scanned_objects/plate": (0.08, 0.08, 0.01),
    "stable_scanned_objects/glazed_rim_porcelain_ramekin": (0.04, 0.04, 0.025),
    "stable_hope_objects/cream_cheese": (0.04, 0.02, 0.015),
    "stable_hope_objects/cookies": (0.05, 0.03, 0.02),
    "turbosquid_objects/wine_bottle": (0.03, 0.03, 0.1),
    "turbosquid_objects/wine_rack": (0.06, 0.1, 0.05),
}
SITES = """
      <site name="bottom_site" pos="0 0 -{z}" size="0.005" rgba="0 0 0 0"/>
      <site name="top_site" pos="0 0 {z}" size="0.005" rgba="0 0 0 0"/>
      <site name="horizontal_radius_site" pos="{x} {y} 0" size="0.005" rgba="0 0 0 0"/>"""
RACK_REGION = '<site name="top_region" type="box" pos="0 0 0" quat="1 0 0 0" size="0.05 0.05 0.05" rgba="0 0 0 0"/>'
OBJECT = """<mujoco model="{name}">
  <asset>
    <texture file="{name}.png" type="2d" name="tex-{name}"/>
    <material name="{name}" texture="tex-{name}"/>
    <mesh file="{name}.obj" name="{name}_mesh" scale="{x} {y} {z}"/>
  </asset>
  <worldbody>
    <body>
      <body name="object">
        <geom type="box" size="{x} {y} {z}" group="0" density="100" friction="0.95 0.3 0.1"/>
        <geom type="mesh" mesh="{name}_mesh" material="{name}" group="1" contype="0" conaffinity="0" mass="0.0001"/>
        {inside}
      </body>{sites}
    </body>
  </worldbody>
</mujoco>
"""
DRAWER = """
        <body name="cabinet_{name}" pos="0 0 {z}">
          <joint name="{name}_level" type="slide" axis="0 1 0" range="-0.16 0.01" limited="true" damping="50"/>
          <geom type="box" size="0.09 0.07 0.02" group="0" density="100"/>
          <geom type="box" size="0.09 0.07 0.02" group="1" contype="0" conaffinity="0" rgba="0.6 0.4 {blue} 1"/>
          <site name="{name}_region" type="box" pos="0 0 0" quat="1 0 0 0" size="0.08 0.06 0.03" rgba="0 0 0 0"/>
        </body>"""
CABINET = (
    """<mujoco model="wooden_cabinet">
  <worldbody>
    <body>
      <body name="object">
        <geom type="box" size="0.1 0.01 0.11" pos="0 -0.08 0.08" group="0" density="100"/>
        <geom type="box" size="0.1 0.01 0.11" pos="0 -0.08 0.08" group="1" contype="0" conaffinity="0"/>
        <site name="top_side" type="box" quat="1 0 0 0" size="0.09 0.07 0.005" pos="0 0 0.18" rgba="0 0 0 0"/>"""
    + "".join(
        DRAWER.format(name=name, z=z, blue=blue)
        for name, z, blue in (("top", 0.14, 0.2), ("middle", 0.07, 0.4), ("bottom", 0.0, 0.6))
    )
    + """
      </body>"""
    + SITES.format(x=0.1, y=0.1, z=0.02)
    + """
    </body>
  </worldbody>
</mujoco>
"""
)
STOVE = (
    """<mujoco model="flat_stove">
  <worldbody>
    <body>
      <body name="object">
        <geom type="box" size="0.12 0.08 0.01" pos="0 0 0.05" group="0" density="100"/>
        <geom type="box" size="0.12 0.08 0.01" pos="0 0 0.05" group="1" contype="0" conaffinity="0" rgba=".2 .2 .2 1"/>
        <site name="burner" type="cylinder" size="0.05 0.002" pos="0 0 0.062" rgba="1 0 0 0"/>
        <site name="cook_region" type="box" quat="1 0 0 0" size="0.06 0.06 0.01" pos="0 0 0.07" rgba="0 0 0 0"/>
        <body name="knob" pos="0.1 0 0.075">
          <joint name="button" type="hinge" axis="0 0 1" range="-0.005 2.1" limited="true" stiffness="0.02"
            springref="2" damping="0.1"/>
          <geom type="cylinder" size="0.015 0.01" group="0" density="100"/>
          <geom type="box" size="0.015 0.003 0.012" group="1" contype="0" conaffinity="0" rgba="0.9 0.9 0.1 1"/>
          <site name="knob" size="0.001" rgba="0 0 0 0"/>
        </body>
      </body>"""
    + SITES.format(x=0.12, y=0.08, z=0.01)
    + """
    </body>
  </worldbody>
</mujoco>
"""
)
WALL = (
    '<geom name="{name}" type="box" pos="{pos}" size="{size}" material="walls" group="1" contype="0" conaffinity="0"/>'
)
LEG = '<geom name="table_leg{i}_visual" type="cylinder" size="0.05 0.1" group="1" contype="0" conaffinity="0"/>'
TABLE = (
    """<mujoco model="table">
  <asset>
    <texture builtin="gradient" height="32" width="32" rgb1=".9 .9 1." rgb2=".2 .3 .4" type="skybox"/>
    <texture file="../textures/light-gray-floor-tile.png" type="2d" name="texplane"/>
    <material name="floorplane" texture="texplane" texrepeat="2 2" texuniform="true" reflectance="0.1"/>
    <texture file="../textures/light-gray-plaster.png" type="2d" name="tex-wall"/>
    <material name="walls" texture="tex-wall" texrepeat="3 3" texuniform="true"/>
  </asset>
  <worldbody>
    <geom name="floor" type="plane" size="3 3 .125" condim="3" group="1" material="floorplane"/>
    """
    + WALL.format(name="wall_rear", pos="-2 0 1.5", size="0.01 3 1.5")
    + WALL.format(name="wall_left", pos="0 2 1.5", size="3 0.01 1.5")
    + """
    <body name="table" pos="0 0 0.4">
      <geom name="table_collision" type="box" size="0.4 0.4 0.4" group="0" friction="1 0.005 0.0001"/>
      <geom name="table_visual" type="box" size="0.4 0.4 0.4" group="1" conaffinity="0" contype="0" rgba=".8 .7 .5 1"/>
      <site name="table_top" pos="0 0 0.4" size="0.001" rgba="0 0 0 0"/>
      """
    + "".join(LEG.format(i=i) for i in (1, 2, 3, 4))
    + """
    </body>
    <light pos="1 1 1.5" dir="-0.2 -0.2 -1" specular="0.3 0.3 0.3" directional="true" castshadow="false"/>
    <camera mode="fixed" name="frontview" pos="1.6 0 1.45" quat="0.56 0.43 0.43 0.56"/>
    <camera mode="fixed" name="agentview" pos="0.5 0 1.35" quat="0.653 0.271 0.271 0.653"/>
  </worldbody>
</mujoco>
"""
)


def write_assets(root: Path) -> Path:
    """The folder itself."""
    for folder in (*FOLDERS, "textures"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for number, (path, (x, y, z)) in enumerate(OBJECTS.items()):
        folder, name = root / path, path.rpartition("/")[2]
        folder.mkdir(exist_ok=True)
        inside = RACK_REGION if "rack" in name else ""
        sites = SITES.format(x=x, y=y, z=z)
        (folder / f"{name}.xml").write_text(OBJECT.format(name=name, x=x, y=y, z=z, inside=inside, sites=sites))
        (folder / f"{name}.obj").write_text(_cube())
        _checkered(60 + 25 * number, 200 - 20 * number).save(folder / f"{name}.png")
    (root / "articulated_objects" / "wooden_cabinet.xml").write_text(CABINET)
    (root / "articulated_objects" / "flat_stove.xml").write_text(STOVE)
    (root / "scenes" / "libero_tabletop_base_style.xml").write_text(TABLE)
    for number, name in enumerate(("light-gray-floor-tile", "light-gray-plaster")):
        _checkered(150 + 40 * number, 100).save(root / "textures" / f"{name}.png")
    return root


def _cube() -> str:
    corners = [(x, y, z) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]
    faces = ["1 2 4 3", "5 7 8 6", "1 5 6 2", "3 4 8 7", "1 3 7 5", "2 6 8 4"]
    uv = "vt 0 0\nvt 1 0\nvt 1 1\nvt 0 1\n"
    vertices = "".join(f"v {x} {y} {z}\n" for x, y, z in corners)
    return (
        vertices
        + uv
        + "".join(
            "f " + " ".join(f"{corner}/{i + 1}" for i, corner in enumerate(face.split())) + "\n" for face in faces
        )
    )


def _checkered(red: int, blue: int) -> Image.Image:
    image = Image.new("RGB", (32, 32))
    image.putdata([(red, 40 * ((x // 4 + y // 4) % 2) + 60, blue) for y in range(32) for x in range(32)])
    return image


if __name__ == "__main__":
    print(write_assets(Path(sys.argv[1])))
