"""The replay buffer of off-policy learning: transitions in memory-mapped files, and batches as a function of seed and
step.

A runner step is T decisions of all N environments, at places that depend on nothing but step, environment and decision.
Every actor rank writes the rows of its own environments, and a batch is the same whichever rank holds which row. An
observation is stored once; only behind the end of an episode, and behind the last decision of a step, the following one
has a place of its own (in files with holes, which take no room elsewhere).

A step does not change once it is written, and is deleted only when no checkpoint goes back to it. So a checkpoint holds
the buffer by reference: its directory, its steps, and a checksum of each environment's rows.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf_lite.data.demonstrations import Demonstrations

Field = tuple[NDArray[Any], NDArray[np.bool_] | None]
"""Values of a field in a step [B, T, ...]; those of following observations [n, ...], with the places [B, T] that have
one."""


class ReplayError(ValueError):
    """A replay buffer that cannot be used."""


@dataclass
class Transitions:
    """b transitions: chunks of C actions with D dimensions, as tensors on the CPU."""

    inputs: dict[str, Tensor]
    """The policy's inputs [b, ...], by name (`Policy.sft_inputs`)."""
    actions: Tensor
    """float32 [b, C, D], in the environment's units."""
    mask: Tensor
    """bool [b, C]: the actions that were executed."""
    rewards: Tensor
    """float32 [b]: sum of gamma^i r_i over the h executed actions."""
    discounts: Tensor
    """float32 [b]: gamma^h, and 0 behind a termination."""
    next_inputs: dict[str, Tensor]
    """The inputs that follow, [b, ...]."""


@dataclass
class Block:
    """What one rank's B environments played in a step: T decisions of C actions."""

    inputs: dict[str, Tensor]
    """[B, T, ...]."""
    actions: Tensor
    """float32 [B, T, C, D], in the environment's units."""
    rewards: Tensor
    """float32 [B, T, C]."""
    mask: Tensor
    """bool [B, T, C]: the actions that were executed; a decision without one is no transition."""
    terminated: Tensor
    """bool [B, T]: the episode terminated in this chunk."""
    ended: Tensor
    """bool [B, T]: the episode ended in this chunk, by a termination or by its time limit."""
    success: Tensor
    """int8 [B, T]: where an episode ended, 1 for success, 0 for failure, -1 if the environment knows neither."""
    has_next: Tensor
    """bool [B, T]: whether the observation that follows is one of `next_inputs`, and not that of decision t + 1."""
    next_inputs: dict[str, Tensor]
    """[n, ...]: those observations, in the order of `has_next`."""


Rows = TypeVar("Rows", Transitions, Block)


def concat(parts: Sequence[Rows]) -> Rows:
    """The rows of all `parts`, one after the other."""

    def joined(found: list[Any]) -> Any:
        if isinstance(found[0], dict):
            return {key: torch.cat([x[key] for x in found]) for key in found[0]}
        return torch.cat(found)

    return type(parts[0])(**{f.name: joined([getattr(part, f.name) for part in parts]) for f in fields(parts[0])})


class ReplayBuffer:
    """Steps of transitions in `directory`, of which the newest `capacity` decisions can be drawn.

    Args:
        num_envs: environments of all ranks.
        rows: this rank's environments.
        num_decisions: T, decisions of an environment in a step.
    """

    def __init__(
        self, directory: Path, num_envs: int, rows: slice, num_decisions: int, capacity: int, gamma: float
    ) -> None:
        self.directory, self._rows, self._gamma = directory, rows, gamma
        self._shape = num_envs, num_decisions
        self._most = max(1, capacity // (num_envs * num_decisions))
        self._steps_per_file = max(1, _FILE_DECISIONS // (num_envs * num_decisions))
        self._files: dict[int, dict[str, NDArray[Any]]] = {}
        """Mapped files by field, by number: [steps, N, T, ...]."""
        self._end = self._floor = 0  # the floor: steps before it are not here
        self._flags = np.zeros((0, num_envs, num_decisions), np.int8)
        """Of all ranks' decisions from step `first` on [steps, N, T]: bits `_VALID`, `_ENDED`, `_KNOWN`, `_SUCCESS`."""
        self._pools: dict[str, NDArray[np.int64]] = {}

    @property
    def first(self) -> int:
        """The oldest step that can be drawn."""
        return max(self._end - self._most, self._floor)

    @property
    def num_decisions(self) -> int:
        """Decisions of an environment in a step."""
        return self._shape[1]

    @property
    def end(self) -> int:
        """The step behind the newest one."""
        return self._end

    def add(self, step: int, block: Block, flags: NDArray[np.int8]) -> None:
        """Write this rank's rows of `step`: the next one, or the newest once more.

        Args:
            flags: `flags_of` of all ranks' blocks [N, T].

        Raises:
            ReplayError: if the directory holds transitions of another shape.
            OSError: if there is no room.
        """
        assert step in (self._end - 1, self._end), f"step {step}, after {self._end}"
        self._write(step, _fields_of(block))
        self._go_to(step + 1, np.concatenate([self._flags[: step - self.first], flags[None]]))

    def _write(self, step: int, of_step: Mapping[str, Field]) -> None:
        """Write this rank's rows of a step. Not by the mapped files: a full disk would end the process."""
        number, within = divmod(step, self._steps_per_file)
        directory, (num_envs, num_decisions) = self._made(number, of_step), self._shape
        first = within * num_envs + self._rows.start
        sums = _sums_of(of_step)
        for name, (values, where) in of_step.items():
            with open(directory / name, "r+b", buffering=0) as file:
                if where is None:
                    _put_at(file, values, first * values[0].nbytes)
                else:
                    for value, (row, t) in zip(values, np.argwhere(where), strict=True):
                        _put_at(file, value, ((first + row) * num_decisions + t) * value.nbytes)
        with open(directory / _CRC, "r+b", buffering=0) as file:
            _put_at(file, sums, first * sums.itemsize)

    def pool(self, name: str) -> NDArray[np.int64]:
        """The places of a pool's transitions, in the order of steps: int64 [n], numbers for `read`."""
        if name not in self._pools:
            self._pools[name] = self._found(name)
        return self._pools[name]

    def owned(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which places are in this rank's rows."""
        num_envs, num_decisions = self._shape
        row = places // num_decisions % num_envs
        owned: NDArray[np.bool_] = (row >= self._rows.start) & (row < self._rows.stop)
        return owned

    def read(self, places: NDArray[np.int64]) -> Transitions:
        """The transitions at these places, which must be of this rank's rows."""
        num_envs, num_decisions = self._shape
        step, row, t = places // (num_envs * num_decisions), places // num_decisions % num_envs, places % num_decisions
        number, within = np.divmod(step, self._steps_per_file)
        out: dict[str, NDArray[Any]] = {}

        def put(name: str, rows: NDArray[Any], values: NDArray[Any]) -> None:
            if name not in out:
                out[name] = np.zeros((len(places), *values.shape[1:]), values.dtype)
            out[name][rows] = values

        for file in np.unique(number).tolist():
            arrays, of_file = self._opened(file), np.flatnonzero(number == file)
            at = within[of_file], row[of_file], t[of_file]
            for name in _NUMBERS:
                put(name, of_file, arrays[name][at])
            own = arrays["has_next"][at]
            later = np.minimum(at[2][~own] + 1, num_decisions - 1)  # of a decision that is no transition: any
            kept, following = tuple(x[own] for x in at), (at[0][~own], at[1][~own], later)
            for name in (key for key in arrays if key.startswith(_NEXT)):
                seen = _OBS + name.removeprefix(_NEXT)
                put(seen, of_file, arrays[seen][at])
                put(name, of_file[own], arrays[name][kept])
                put(name, of_file[~own], arrays[seen][following])
        tensors = {name: torch.from_numpy(x) for name, x in out.items()}
        rewards, discounts = summed(tensors["rewards"], tensors["mask"], tensors["terminated"], self._gamma)
        return Transitions(
            inputs={name.removeprefix(_OBS): x for name, x in tensors.items() if name.startswith(_OBS)},
            actions=tensors["actions"],
            mask=tensors["mask"],
            rewards=rewards,
            discounts=discounts,
            next_inputs={name.removeprefix(_NEXT): x for name, x in tensors.items() if name.startswith(_NEXT)},
        )

    def state(self, end: int) -> dict[str, Any]:
        """What a checkpoint of the first `end` steps needs to come back to this buffer: where it is, its steps, and
        checksums by this rank's environments. Checkpoints of all ranks together have those of all environments."""
        first = max(end - self._most, self._floor)
        sums = self._checksums(first, end)
        return {"directory": str(self.directory.absolute()), "first": first, "end": end, _CRC: sums}

    def load(self, state: Mapping[str, Any]) -> NDArray[np.int8]:
        """Find this rank's rows of the steps that `state` describes (with the checksums of all environments): in the
        directory of this run, or else in the one that it names, from which they are copied. Returns their flags
        [steps, B, T]; with those of all ranks, `go_back` ends the return.

        Raises:
            ReplayError: if steps are missing, or are not what they were.
        """
        first, end, there = int(state["first"]), int(state["end"]), Path(state["directory"])
        problem = self._why_not(state)
        if problem is not None and there != self.directory.absolute() and there.is_dir():
            num_envs, num_decisions = self._shape
            source = ReplayBuffer(
                there, num_envs, self._rows, num_decisions, self._most * num_envs * num_decisions, 1.0
            )
            problem = source._why_not(state)
            for step in range(first, end) if problem is None else ():
                self._write(step, source._rows_of(step))
        if problem is not None:
            raise ReplayError(f"{problem}. {_LOST}")
        at = [divmod(step, self._steps_per_file) for step in range(first, end)]
        flags = [self._opened(number)["flags"][within, self._rows] for number, within in at]
        return np.array(flags, np.int8).reshape(end - first, self._rows.stop - self._rows.start, self.num_decisions)

    def go_back(self, first: int, flags: NDArray[np.int8]) -> None:
        """Hold the steps from `first` on, or the newest of them. `flags`: those of all ranks [steps, N, T]."""
        self._floor = first
        self._go_to(first + len(flags), flags)

    def _why_not(self, state: Mapping[str, Any]) -> str | None:
        """Why this rank's rows of the steps that `state` describes are not here; None: they are."""
        first, end = int(state["first"]), int(state["end"])
        try:
            for step in range(first, end):
                number, within = divmod(step, self._steps_per_file)
                sums = _sums_of(self._rows_of(step))
                for row in np.flatnonzero(sums != self._opened(number)[_CRC][within, self._rows])[:1].tolist():
                    return f"{self._path(number)}: environment {self._rows.start + row} of step {step} is damaged"
            own = self._checksums(first, end)
        except ReplayError as error:
            return str(error)
        if wrong := [row for row, crc in own.items() if crc != state[_CRC].get(row)]:
            text = f"steps {first} to {end - 1} of environments {', '.join(wrong)} are not those of the checkpoint"
            return f"{self.directory}: {text}"
        return None

    def _rows_of(self, step: int) -> dict[str, Field]:
        """This rank's rows of a step, as `_fields_of` has them."""
        number, within = divmod(step, self._steps_per_file)
        arrays = self._opened(number)
        if within >= len(arrays["flags"]) or self._rows.stop > len(arrays["flags"][within]):
            raise ReplayError(f"{self._path(number)} has no step {step} of environment {self._rows.stop - 1}")
        rows = {name: np.array(x[within, self._rows]) for name, x in arrays.items() if not name.startswith(_NEXT)}
        del rows[_CRC]
        found: dict[str, Field] = {name: (x, None) for name, x in rows.items()}
        where = rows["has_next"]
        return found | {
            name: (np.array(x[within, self._rows][where]), where)
            for name, x in arrays.items()
            if name.startswith(_NEXT)
        }

    def forget(self, before: int) -> None:
        """Delete the files that have only steps before `before`, which no checkpoint goes back to."""
        for path in self.directory.glob("steps_*"):
            last = (int(path.name.removeprefix("steps_")) + 1) * self._steps_per_file
            if last <= min(before, self.first):
                shutil.rmtree(path, ignore_errors=True)  # another rank may be faster

    def _go_to(self, end: int, flags: NDArray[np.int8]) -> None:
        """Hold the steps up to `end` - 1; `flags`: those of the newest of them."""
        self._end, self._pools = end, {}
        self._flags = flags[len(flags) - (end - self.first) :]
        oldest = self.first // self._steps_per_file
        self._files = {number: x for number, x in self._files.items() if number >= oldest}

    def _checksums(self, first: int, end: int) -> dict[str, int]:
        """Of this rank's environments, by id."""
        at = [divmod(step, self._steps_per_file) for step in range(first, end)]
        sums = np.array([self._opened(number)[_CRC][within] for number, within in at], np.uint32)
        rows = range(self._rows.start, self._rows.stop)
        return {str(row): zlib.crc32(sums[:, row].tobytes()) if at else 0 for row in rows}

    def _found(self, name: str) -> NDArray[np.int64]:
        num_envs, num_decisions = self._shape
        chosen = (self._flags & _VALID).astype(bool)  # [steps, N, T]
        if name != "online":  # an episode's outcome is known where it ends
            flags = self._flags.swapaxes(0, 1).reshape(num_envs, -1)  # [N, steps * T]
            num = flags.shape[1]
            end = np.where(flags & _ENDED, np.arange(num), num)
            end = np.minimum.accumulate(end[:, ::-1], axis=1)[:, ::-1]  # [N, steps * T]; num: it goes on
            wanted = _KNOWN | (_SUCCESS if name == "successes" else 0)
            outcome = np.concatenate([flags & (_KNOWN | _SUCCESS), np.zeros((num_envs, 1), np.int8)], axis=1)
            are = np.take_along_axis(outcome, end, axis=1) == wanted
            chosen &= are.reshape(num_envs, -1, num_decisions).swapaxes(0, 1)
        places: NDArray[np.int64] = np.flatnonzero(chosen) + self.first * num_envs * num_decisions
        return places

    def _path(self, number: int) -> Path:
        return self.directory / f"steps_{number:06d}"

    def _made(self, number: int, of_step: Mapping[str, Field]) -> Path:
        """The directory of a file's fields, made if it is not there; any rank may come first."""
        shape = (self._steps_per_file, *self._shape)
        shapes = {name: ((*shape, *tail), dtype) for name, (tail, dtype) in _shapes(of_step).items()}
        shapes[_CRC] = shape[:2], np.dtype(np.uint32)
        described = {name: [list(shape), dtype.str] for name, (shape, dtype) in shapes.items()}
        path = self._path(number)
        if not (path / _DESCRIPTION).is_file():
            made = path.with_name(f".{path.name}_{os.getpid()}_{self._rows.start}")
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir(parents=True)
            for name, (of_field, dtype) in shapes.items():
                with open(made / name, "wb") as file:
                    file.truncate(int(np.prod(of_field)) * dtype.itemsize)
            (made / _DESCRIPTION).write_text(json.dumps(described))
            _name(made, path)
        if (found := json.loads((path / _DESCRIPTION).read_text())) != described:
            raise ReplayError(f"{path} holds {found}, and this run plays {described}. Name another run")
        return path

    def _opened(self, number: int) -> dict[str, NDArray[Any]]:
        if number not in self._files:
            path = self._path(number)
            try:
                described = json.loads((path / _DESCRIPTION).read_text())
                self._files[number] = {
                    name: np.memmap(path / name, np.dtype(dtype), "r", shape=tuple(shape))
                    for name, (shape, dtype) in described.items()
                }
            except (OSError, ValueError) as error:
                raise ReplayError(f"{path} cannot be read: {error}") from error
        return self._files[number]


_VALID, _ENDED, _KNOWN, _SUCCESS = 1, 2, 4, 8
_FILE_DECISIONS = 2**16
_NUMBERS = ("actions", "rewards", "mask", "terminated", "has_next")
_DESCRIPTION = "fields.json"
_OBS, _NEXT, _CRC = "obs.", "next.", "checksum"
_LOST = "The run cannot go on as it was; begin a new one, or resume an earlier checkpoint"


def flags_of(block: Block) -> NDArray[np.int8]:
    """The flags of a rank's decisions, int8 [B, T], which all ranks exchange."""
    valid, ended, success = block.mask.any(-1), block.ended, block.success
    flags = valid * _VALID + ended * _ENDED + (success >= 0) * _KNOWN + (success == 1) * _SUCCESS
    return flags.to(torch.int8).numpy()


def summed(rewards: Tensor, mask: Tensor, terminated: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Of chunks [b, C]: the sum of gamma^i r_i over the executed actions, and gamma to the power of their number, 0
    where `terminated` [b]; float32 [b] each."""
    powers = gamma ** torch.arange(rewards.shape[1], dtype=torch.float64)
    total = torch.where(mask, rewards.double() * powers, 0.0).sum(1)
    discounts = gamma ** mask.sum(1).double() * ~terminated
    return total.float(), discounts.float()


class DemonstratedTransitions:
    """The transitions of demonstrations, by number: a chunk begins at every frame.

    An episode that succeeded ends by a termination, unless terminations are ignored; behind any other end the
    observation is not in the dataset, and the chunks that reach it are left out.

    Raises:
        ReplayError: if the demonstrations have no rewards, or no transition is left.
    """

    def __init__(self, frames: Path, chunk: int, gamma: float, policy: Any, ignore_terminations: bool) -> None:
        self._demos = Demonstrations(frames, chunk, 1)
        self._gamma, self._policy = gamma, policy
        found = self._demos.frames
        if found.rewards is None:
            raise ReplayError(
                "has no feature next.reward, which critics learn from. Collect demonstrations with `rlinf-lite collect`"
                " or add it"
            )
        chunks = np.arange(len(self._demos))
        episodes = self._demos.episodes(chunks)
        reaches_end = self._demos.first_frames(chunks) + chunk >= found.episodes.sum(1)[episodes]
        self._terminates = reaches_end & found.successes[episodes] & (not ignore_terminations)
        self._numbers = np.flatnonzero(~reaches_end | self._terminates)
        if not len(self._numbers):
            text = f"no episode succeeded, and all are shorter than a chunk of {chunk}"
            raise ReplayError(f"has no transition: {text}. Collect others")

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, places: NDArray[np.int64]) -> Transitions:
        """The transitions with these numbers, of 0 to len - 1."""
        chunks = self._numbers[places]
        found, mask = self._demos.frames, torch.from_numpy(self._demos.mask(chunks))
        obs, actions = self._demos.read(chunks)
        start, length = self._demos.first_frames(chunks), mask.sum(1).numpy()
        assert found.rewards is not None
        offsets = np.minimum(np.arange(mask.shape[1]), length[:, None] - 1)
        rewards = torch.from_numpy(np.asarray(found.rewards)[start[:, None] + offsets])
        terminated = torch.from_numpy(self._terminates[chunks])
        following = np.where(self._terminates[chunks], start, start + length)
        total, discounts = summed(rewards, mask, terminated, self._gamma)
        return Transitions(
            inputs=self._policy.sft_inputs(obs),
            actions=actions,
            mask=mask,
            rewards=total,
            discounts=discounts,
            next_inputs=self._policy.sft_inputs(found.read(following)),
        )


def drawn(
    sizes: Mapping[str, int], batch_size: int, shares: Mapping[str, float], keys: Sequence[int]
) -> dict[str, Any]:
    """Positions of a batch in each pool, with replacement: int64 [n] by pool. A function of the pools' `sizes` and of
    `keys` (seed, step, number of the update). The share of an empty pool goes to the others."""
    present = {name: share for name, share in shares.items() if share > 0 and sizes[name] > 0}
    random, total, found, given = np.random.default_rng(keys), sum(present.values()), dict[str, Any](), 0
    before = 0.0
    for name, share in present.items():
        before += share
        until = round(batch_size * before / total)
        found[name] = random.integers(0, sizes[name], until - given)
        given = until
    return found


def _fields_of(block: Block) -> dict[str, Field]:
    found: dict[str, Field] = {}
    for name in _NUMBERS:
        found[name] = np.ascontiguousarray(getattr(block, name).numpy()), None
    found["flags"] = flags_of(block), None
    for name, x in block.inputs.items():
        found[_OBS + name] = np.ascontiguousarray(x.numpy()), None
        found[_NEXT + name] = np.ascontiguousarray(block.next_inputs[name].numpy()), block.has_next.numpy()
    return found


def _shapes(of_step: Mapping[str, Field]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    return {
        name: (values.shape[2:] if where is None else values.shape[1:], values.dtype)
        for name, (values, where) in of_step.items()
    }


def _sums_of(of_step: Mapping[str, Field]) -> NDArray[np.uint32]:
    """The checksum of each environment's values in a step, uint32 [B]."""
    sums = np.zeros(len(of_step["flags"][0]), np.uint32)
    for _, (values, where) in sorted(of_step.items(), key=lambda item: item[0]):
        rows = values if where is None else np.split(values, np.cumsum(where.sum(1))[:-1])
        for row, of_row in enumerate(rows):
            sums[row] = zlib.crc32(np.ascontiguousarray(of_row).tobytes(), int(sums[row]))
    return sums


def _put_at(file: Any, values: NDArray[Any], offset: int) -> None:
    content = np.ascontiguousarray(values).tobytes()
    while content:  # an OSError says that there is no room
        written = os.pwrite(file.fileno(), content, offset)
        content, offset = content[written:], offset + written


def _name(made: Path, path: Path) -> None:
    """Give a directory its name, unless another rank was faster."""
    try:
        os.rename(made, path)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not (path / _DESCRIPTION).is_file():
            raise
