"""Metrics loggers: JSONL always, TensorBoard and Weights & Biases on request. A resumed run continues its logs.

Files in a run directory: `metrics.jsonl` (one object per step: step, time, metrics by name); `tensorboard/`, in which
`over_env_steps/` is a separate run whose axis is env steps; and `logger.json` with the run's id at Weights & Biases.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from rlinf_lite.file_modes import AppendedFile, Patience, write_once, write_whole

_event_files = itertools.count()


class MetricLogger:
    """Writes every step's metrics to all backends.

    `resume_step` is None for a new run, and for a resumed one the step of its checkpoint (-1: from the start); lines
    that an interrupted run logged after that step are dropped. `patiently` performs the writes, and may wait for space
    on a full disk.

    Raises FileExistsError where a new run would mix its metrics with another run's, ValueError for an unknown backend
    and ImportError for one that is not installed.
    """

    def __init__(
        self,
        run_dir: str | Path,
        backends: Sequence[str] = ("tensorboard",),
        *,
        project_name: str = "rlinf_lite",
        config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
        patiently: Patience = write_once,
    ) -> None:
        run_dir = Path(run_dir)
        unknown = set(backends) - {"tensorboard", "wandb"}
        if unknown:
            raise ValueError(f"runner.logger.backends: unknown {sorted(unknown)}. Known: tensorboard, wandb.")
        run_dir.mkdir(parents=True, exist_ok=True)

        self.run_dir = run_dir
        known = run_dir / "logger.json"
        if not known.exists():
            known.write_text(json.dumps({"run_id": uuid.uuid4().hex[:12]}) + "\n")
        self.run_id = str(json.loads(known.read_text())["run_id"])
        self._backends: list[JsonlBackend | TensorBoardBackend | WandbBackend] = []
        self._backends.append(JsonlBackend(run_dir / "metrics.jsonl", resume_step, patiently))
        if "tensorboard" in backends:
            env_steps = None if resume_step is None else _env_steps_in(run_dir / "metrics.jsonl")
            directory = run_dir / "tensorboard"
            self._backends.append(TensorBoardBackend(directory, config, resume_step, env_steps, patiently))
        if "wandb" in backends:
            self._backends.append(WandbBackend(run_dir, self.run_id, run_dir.name, project_name, config))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of a step. Keys of nested mappings are joined with `/`; values are numbers or one-element
        tensors."""
        flat = flatten_metrics(metrics)
        now = time.time()
        with ExitStack() as calls:  # calls all backends, even if one is interrupted while it waits for disk space
            for backend in reversed(self._backends):
                calls.callback(backend.log, step, now, flat)

    def log_film(self, step: int, path: Path) -> None:
        """Log the GIF of an evaluation. Raises OSError where the file does not exist."""
        for backend in self._backends:
            backend.log_film(step, path)

    def rewind(self, step: int) -> None:
        """Drop all that was logged after `step`, because these steps are repeated."""
        jsonl, *others = self._backends
        jsonl.rewind(step, 0)
        for backend in others:
            backend.rewind(step, _env_steps_in(self.run_dir / "metrics.jsonl"))

    def close(self) -> None:
        for backend in self._backends:
            backend.close()

    def __enter__(self) -> MetricLogger:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class JsonlBackend:
    """A file with one JSON object per line, flushed at once. nan and inf become null, so that every reader can parse
    it."""

    def __init__(self, path: Path, resume_step: int | None, patiently: Patience = write_once) -> None:
        self._path, self._patiently = path, patiently
        if path.exists():
            if resume_step is None:
                raise FileExistsError(
                    f"{path} holds another run's metrics. Resume that run (runner.resume), or choose a new run_name."
                )
            _drop_steps_after(path, resume_step)
        self._file = AppendedFile(path, patiently)

    def log(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, "time": round(time_s, 3), **values}, allow_nan=False)
        self._file.append(f"{line}\n".encode())

    def log_film(self, step: int, path: Path) -> None:
        """Nothing to do: the run directory has the file, `eval/step_*.gif`."""

    def rewind(self, step: int, env_steps: int) -> None:
        self._file.close()
        self._patiently(self._path, lambda: _drop_steps_after(self._path, step), self._path.stat().st_size)
        self._file = AppendedFile(self._path, self._patiently)

    def close(self) -> None:
        self._file.close()


class TensorBoardBackend:
    """Scalars, films and the config's text, in TensorBoard's record format (without torch).

    TensorBoard's only axis is the step. So metrics that come with `env/num_steps` are written twice, the second time
    into `over_env_steps/`, with the env steps as step.
    """

    def __init__(
        self,
        log_dir: Path,
        config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
        resume_env_steps: int | None = None,
        patiently: Patience = write_once,
    ) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._open = lambda directory: _EventFile(directory, self._event, patiently)
        self._start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._log_dir, self._writer = log_dir, self._open(log_dir)
        self._over_env_steps: _EventFile | None = None  # created with the first env steps
        if resume_step is not None:
            self.rewind(resume_step, resume_env_steps or 0)
        if config:
            self._log_text(max(resume_step or 0, 0), "config", yaml.safe_dump(dict(config), sort_keys=False))

    def rewind(self, step: int, env_steps: int) -> None:
        """Write events that make readers drop all steps after this one."""
        self._writer.add_event(self._event(wall_time=time.time(), step=step + 1, session_log=self._start))
        if env_steps or self._over_env_steps is not None:
            event = self._event(wall_time=time.time(), step=env_steps + 1, session_log=self._start)
            self._env_steps_writer().add_event(event)

    def log(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time_s, step=step, summary=summary))
        if "env/num_steps" in metrics:
            env_steps = int(metrics["env/num_steps"])
            self._env_steps_writer().add_event(self._event(wall_time=time_s, step=env_steps, summary=summary))

    def log_film(self, step: int, path: Path) -> None:
        with Image.open(path) as film:
            width, height = film.size
        image = self._summary.Image(
            height=height, width=width, colorspace=3, encoded_image_string=path.read_bytes()
        )  # a GIF, which browsers play
        value = self._summary.Value(tag="eval/film", image=image)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=[value])))

    def close(self) -> None:
        self._writer.close()
        if self._over_env_steps is not None:
            self._over_env_steps.close()

    def _env_steps_writer(self) -> _EventFile:
        if self._over_env_steps is None:
            self._over_env_steps = self._open(self._log_dir / "over_env_steps")
        return self._over_env_steps

    def _log_text(self, step: int, tag: str, text: str) -> None:
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2

        shown = "".join(f"    {line}\n" for line in text.splitlines())  # a block of code in Markdown
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[shown.encode()])
        value = self._summary.Value(tag=tag, metadata=summary_pb2.SummaryMetadata(plugin_data=plugin), tensor=tensor)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=[value])))


class _EventFile:
    """An event file in TensorBoard's format. Its own EventFileWriter is not used: a full disk ends its thread for
    good."""

    def __init__(self, directory: Path, event: Any, patiently: Patience) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        process = f"{socket.gethostname()}.{os.getpid()}.{next(_event_files)}"
        self._file = AppendedFile(directory / f"events.out.tfevents.{int(time.time()):010d}.{process}", patiently)
        self.add_event(event(wall_time=time.time(), file_version="brain.Event:2"))

    def add_event(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.append(record.getvalue())

    def close(self) -> None:
        self._file.close()


class WandbBackend:
    """Weights & Biases. The x axis is `runner_step`, because its own counter cannot go back when a run resumes. A chart
    can use `env/num_steps` instead, which is logged with the same metrics."""

    def __init__(
        self, run_dir: Path, run_id: str, run_name: str, project_name: str, config: Mapping[str, Any] | None
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                "runner.logger.backends asks for wandb, which is not installed. pip install 'rlinf_lite[wandb]'"
            ) from error
        self._video = lambda path: wandb.Video(str(path), format="gif")
        self._run = wandb.init(
            id=run_id,
            resume="allow",
            dir=str(run_dir),
            name=run_name,
            project=project_name,
            config=dict(config or {}),
        )
        self._run.define_metric("runner_step")
        self._run.define_metric("*", step_metric="runner_step")

    def log(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        self._run.log({"runner_step": step, **metrics})

    def log_film(self, step: int, path: Path) -> None:
        self._run.log({"runner_step": step, "eval/film": self._video(path)})

    def rewind(self, step: int, env_steps: int) -> None:
        """Nothing to do: the points of a repeated step lie at the same place of the x axis."""

    def close(self) -> None:
        self._run.finish()


def flatten_metrics(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Nested metrics as flat floats: {"env": {"return": 1}} gives {"env/return": 1.0}. Raises TypeError for other
    values than numbers."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            flat |= flatten_metrics(value, f"{prefix}{name}/")
            continue
        try:
            flat[prefix + name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"metric {prefix + name} is not a number: {value!r}") from error
    return flat


def _drop_steps_after(path: Path, last_step: int) -> None:
    """Keep the complete lines up to `last_step`; the file is replaced atomically."""
    with path.open(encoding="utf-8") as lines:
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= last_step]
    write_whole(path, "".join(kept))


def _env_steps_in(path: Path) -> int:
    """The largest number of env steps in a `metrics.jsonl`; 0 if it has none."""
    with path.open(encoding="utf-8") as lines:
        return int(max((json.loads(line).get("env/num_steps") or 0 for line in lines), default=0))
