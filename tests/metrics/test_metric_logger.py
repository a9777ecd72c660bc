"""Loggers: what lands on disk, and that a resumed run continues it."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlinf_lite.file_modes import AppendedFile
from rlinf_lite.metrics import MetricLogger, flatten_metrics
from rlinf_lite.metrics.logger import JsonlBackend


def read_lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def log_steps(logger: MetricLogger, *steps: int) -> None:
    for step in steps:
        logger.log(step, {"env": {"return": float(step)}, "time/step": 0.5})
    logger.close()


def test_one_json_line_per_step(tmp_path: Path) -> None:
    with MetricLogger(tmp_path, backends=()) as logger:
        logger.log(1, {"env": {"return": torch.tensor(2.0)}, "time/step": np.float32(0.5), "env/num_episodes": 3})
        assert len(read_lines(tmp_path)) == 1  # readable while the run goes on
        logger.log(2, {"train/actor/policy_loss": float("nan")})
    first, second = read_lines(tmp_path)
    assert first.pop("time") > 0
    assert first == {"step": 1, "env/return": 2.0, "time/step": 0.5, "env/num_episodes": 3.0}
    assert second["train/actor/policy_loss"] is None


def test_resuming_drops_what_the_dead_run_logged_later(tmp_path: Path) -> None:
    log_steps(MetricLogger(tmp_path, backends=()), 1, 2, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ti')  # the process died while writing
    log_steps(MetricLogger(tmp_path, backends=(), resume_step=2), 3, 4)
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3, 4]
    log_steps(MetricLogger(tmp_path, backends=(), resume_step=-1), 1)
    assert [line["step"] for line in read_lines(tmp_path)] == [1]


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path: Path) -> None:
    log_steps(MetricLogger(tmp_path, backends=()), 1)
    with pytest.raises(FileExistsError, match=r"runner\.resume"):
        MetricLogger(tmp_path, backends=())


def test_tensorboard_continues_in_the_same_directory(tmp_path: Path) -> None:
    log_steps(MetricLogger(tmp_path), 1, 2, 3, 4)
    log_steps(MetricLogger(tmp_path, resume_step=2), 3)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["env/return", "time/step"]
    assert [(event.step, event.value) for event in events.Scalars("env/return")] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_tensorboard_has_curves_over_env_steps_films_and_the_config(tmp_path: Path) -> None:
    film = tmp_path / "film.gif"
    frames = [Image.new("RGB", (6, 4), (value, 0, 0)) for value in (0, 255)]
    frames[0].save(film, save_all=True, append_images=frames[1:])
    with MetricLogger(tmp_path, config={"runner": {"seed": 7}}) as logger:
        for step in (1, 2, 3):
            logger.log(step, {"env": {"return": float(step), "num_steps": 100 * step}})
        logger.log_film(2, film)
        logger.rewind(2)
        logger.log(3, {"env": {"return": 9.0, "num_steps": 290}})
    with MetricLogger(tmp_path, resume_step=1) as logger:
        logger.log(2, {"env": {"return": 8.0, "num_steps": 190}})
    by_step, by_env_step = (EventAccumulator(str(tmp_path / "tensorboard" / name)) for name in (".", "over_env_steps"))
    by_step.Reload()
    by_env_step.Reload()
    assert [(event.step, event.value) for event in by_step.Scalars("env/return")] == [(1, 1.0), (2, 8.0)]
    assert [(event.step, event.value) for event in by_env_step.Scalars("env/return")] == [(100, 1.0), (190, 8.0)]
    [text] = by_step.Tensors("config")
    assert text.tensor_proto.string_val == [b"    runner:\n      seed: 7\n"]


def test_films_are_the_files_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    film = tmp_path / "film.gif"
    Image.new("RGB", (6, 4)).save(film)
    logged: list[dict[str, Any]] = []
    run = SimpleNamespace(log=logged.append, define_metric=lambda *_, **__: None, finish=lambda: None)
    wandb = SimpleNamespace(init=lambda **_: run, Video=lambda path, format: (path, format))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with MetricLogger(tmp_path, ["tensorboard", "wandb"]) as logger:
        logger.log_film(2, film)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    [shown] = events.Images("eval/film")
    assert (shown.step, shown.width, shown.height) == (2, 6, 4) and shown.encoded_image_string == film.read_bytes()
    assert logged == [{"runner_step": 2, "eval/film": (str(film), "gif")}]
    assert not (tmp_path / "tensorboard" / "over_env_steps").exists()


def test_wandb_continues_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    logged: list[dict[str, float]] = []

    def init(**kwargs: Any) -> SimpleNamespace:
        started.append(kwargs)
        return SimpleNamespace(
            log=logged.append, define_metric=lambda *args, **kwargs: None, finish=lambda: logged.append({})
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    log_steps(MetricLogger(tmp_path, ["wandb"], config={"seed": 1}, project_name="p"), 1)
    log_steps(MetricLogger(tmp_path, ["wandb"], resume_step=1), 2)
    assert started[0]["id"] == started[1]["id"]
    assert started[0]["project"] == "p" and started[0]["config"] == {"seed": 1} and started[0]["resume"] == "allow"
    assert logged == [
        {"runner_step": 1, "env/return": 1.0, "time/step": 0.5},
        {},
        {"runner_step": 2, "env/return": 2.0, "time/step": 0.5},
        {},
    ]


def test_a_missing_or_unknown_backend_is_answered_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'rlinf_lite\[wandb\]'"):
        MetricLogger(tmp_path, ["wandb"])
    with pytest.raises(ValueError, match="unknown \\['mlflow'\\]"):
        MetricLogger(tmp_path / "other", ["mlflow"])


def test_a_full_disk_is_reported_with_the_path(tmp_path: Path) -> None:
    backend = JsonlBackend(tmp_path / "metrics.jsonl", resume_step=None)
    backend.close()
    with Path("/dev/full").open("wb", buffering=0) as full:
        backend._file = AppendedFile(tmp_path / "metrics.jsonl")
        backend._file._file = full
        with pytest.raises(OSError, match=r"No space left on device.*metrics\.jsonl"):
            backend.log(1, 0.0, {"env/return": 1.0})


def test_a_value_that_is_no_number_is_named() -> None:
    with pytest.raises(TypeError, match="metric env/name is not a number: 'PushCube'"):
        flatten_metrics({"env": {"name": "PushCube"}})
    with pytest.raises(TypeError, match="metric loss is not a number"):
        flatten_metrics({"loss": torch.zeros(2)})


def test_what_stops_one_backend_does_not_keep_a_step_from_the_others(tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stopped(path: Path, write: Any, num_bytes: int = 0) -> Any:
        if path.name == "metrics.jsonl" and stops:
            raise StopError
        return write()

    stops = False
    with MetricLogger(tmp_path, backends=["tensorboard"], patiently=stopped) as logger:
        logger.log(1, {"a": 1.0})
        stops = True
        with pytest.raises(StopError):
            logger.log(2, {"a": 2.0})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2] == [x.step for x in events.Scalars("a")]
