"""Reading prompt files: rows are found by their place in the file, and checked one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlinf_lite.registry import install_command

NUM_SHOWN = 5
_ROWS_AT_ONCE = 1024
GSM8K_COLUMNS = {"question", "answer"}
GSM8K_REQUEST = 'Let us think step by step, and end with the final answer behind "####".'


class DatasetError(ValueError):
    """A data set cannot be used. `problems` has one line per bad row or file; the message shows the first five."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        shown = "".join(f"\n  - {problem}" for problem in self.problems[:NUM_SHOWN])
        more = len(self.problems) - NUM_SHOWN
        rest = f"\n  and {more} more" if more > 0 else ""
        super().__init__(f"prompts cannot be used, {len(self.problems)} problem(s):{shown}{rest}")

    def __reduce__(self) -> Any:
        return type(self), (self.problems,)


@dataclass(frozen=True)
class PromptRow:
    """A valid row: the `messages` of a chat, or `text`."""

    messages: list[dict[str, str]] | None
    text: str
    data_source: str
    ground_truth: str | None
    """None: no rule scores the row, only a reward model does."""
    extra_info: dict[str, Any]


class BadRowError(ValueError):
    """One row has a mistake; the message says how to fix it."""


def parse_row(raw: Any, prompt_key: str) -> PromptRow:
    """Check a raw row of a PromptFile and return it; for a chat, `text` is "". Raises BadRowError."""
    if isinstance(raw, BadRowError):
        raise raw
    if not isinstance(raw, dict):
        raise BadRowError(f"a row is a {type(raw).__name__}, not an object with {prompt_key} and reward_model")
    if prompt_key not in raw and raw.keys() >= GSM8K_COLUMNS:
        raw, prompt_key = _from_gsm8k(raw), "prompt"
    prompt = raw.get(prompt_key)
    if not prompt:
        there = ", ".join(map(str, raw)) or "nothing"
        raise BadRowError(f"no {prompt_key}, which is text or a list of {{role, content}} (there is {there})")
    if not isinstance(prompt, str | list):
        raise BadRowError(f"{prompt_key} is a {type(prompt).__name__}, neither text nor a list of {{role, content}}")
    for i, message in enumerate(prompt if isinstance(prompt, list) else ()):
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise BadRowError(f"message {i + 1} of {prompt_key} has no role and content, or they are not text")
    source, extra_info, reward_model = (raw.get(key) for key in ("data_source", "extra_info", "reward_model"))
    if not isinstance(source, str | None) or not isinstance(extra_info, dict | None):
        raise BadRowError("data_source must be text, and extra_info an object")
    if not isinstance(reward_model, dict | None):
        raise BadRowError(f"reward_model is a {type(reward_model).__name__}, not {{style: rule, ground_truth}}")
    truth, style = (reward_model or {}).get("ground_truth"), (reward_model or {}).get("style") or "rule"
    if style not in ("rule", "model"):
        raise BadRowError(f"reward_model.style is {style!r}, neither rule nor model")
    if style == "rule" and truth in (None, ""):
        raise BadRowError("no ground truth. reward_model.ground_truth is the answer, as text; style: model needs none")
    if style == "rule" and (isinstance(truth, bool) or not isinstance(truth, str | int | float)):
        raise BadRowError(
            f"reward_model.ground_truth is a {type(truth).__name__}, not text. Put what else a rule needs in extra_info"
        )
    if isinstance(truth, float) and truth.is_integer():  # one missing value makes a whole column of integers floats
        truth = int(truth)
    messages, text = (None, prompt) if isinstance(prompt, str) else (prompt, "")
    return PromptRow(messages, text, source or "", str(truth) if style == "rule" else None, extra_info or {})


def _from_gsm8k(raw: dict[str, Any]) -> dict[str, Any]:
    """Convert a row of published GSM8K (Cobbe et al. 2021): `question`, and an `answer` that ends in `#### number`."""
    question, answer = raw["question"], raw["answer"]
    if not isinstance(question, str) or not isinstance(answer, str) or "####" not in answer:
        raise BadRowError("question and answer are not as in GSM8K: text, the answer with its number after ####")
    truth = answer.rpartition("####")[2].strip().replace(",", "")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {GSM8K_REQUEST}"}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"solution": answer},
    }


class PromptFile(Protocol):
    """The raw rows of a file, by place (counted from 0). For a row that cannot be read it returns a BadRowError."""

    path: Path

    def rows(self) -> Iterator[tuple[int, Any]]: ...
    def read(self, place: int) -> Any: ...


def open_prompts(paths: Sequence[str | Path], prompt_key: str) -> list[PromptFile]:
    """Open `.jsonl` and `.parquet` files. Raises DatasetError, which lists every file that cannot be read."""
    files: list[PromptFile] = []
    problems: list[str] = []
    for path in map(Path, paths):
        try:
            if path.suffix not in (".jsonl", ".parquet"):
                problems.append(f"{path}: is neither .jsonl nor .parquet. Convert it, or rename it")
            elif not path.is_file():
                problems.append(f"{path}: there is no such file (looked for {path.absolute()}). Correct the path")
            else:
                files.append(_Jsonl(path) if path.suffix == ".jsonl" else _Parquet(path, prompt_key))
        except OSError as error:
            problems.append(f"{path}: cannot be read: {error}")
        except DatasetError as error:
            problems += error.problems
    if problems:
        raise DatasetError(problems)
    return files


class _Jsonl:
    """A file with one JSON object per line; the place of a row is its line number. Blank lines are no rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            lengths = np.fromiter(map(len, file), dtype=np.int64)
        self._offsets = np.concatenate([[0], np.cumsum(lengths)])  # byte offset of each line, and of the file's end

    def rows(self) -> Iterator[tuple[int, Any]]:
        with self.path.open("rb") as file:
            yield from ((place, _loads(line)) for place, line in enumerate(file) if line.strip())

    def read(self, place: int) -> Any:
        start, stop = self._offsets[place : place + 2].tolist()
        with self.path.open("rb") as file:
            file.seek(start)
            return _loads(file.read(stop - start))


def _loads(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:  # JSON or UTF-8
        return BadRowError(f"is not JSON: {error}")


class _Parquet:
    """A Parquet file. The columns that are used are kept in memory as Arrow tables, about the size of their text."""

    def __init__(self, path: Path, prompt_key: str) -> None:
        if find_spec("pyarrow") is None:
            raise DatasetError(
                f"{path}: Parquet needs pyarrow, which is not installed. {install_command('math')}, or convert the "
                "file to .jsonl"
            )
        import pyarrow
        import pyarrow.parquet

        self.path = path
        used = (prompt_key, "data_source", "reward_model", "extra_info", *sorted(GSM8K_COLUMNS))
        try:
            names = pyarrow.parquet.read_schema(path).names
            self._table = pyarrow.parquet.read_table(path, columns=[name for name in used if name in names])
        except pyarrow.ArrowException as error:
            raise DatasetError(f"{path}: is not Parquet, or is damaged: {error}") from error
        if prompt_key not in names and not set(names) >= GSM8K_COLUMNS:
            raise DatasetError(f"{path}: there is no column {prompt_key} (there is {', '.join(names)}). Set prompt_key")

    def rows(self) -> Iterator[tuple[int, Any]]:
        batches = self._table.to_batches(max_chunksize=_ROWS_AT_ONCE)
        yield from enumerate(row for batch in batches for row in batch.to_pylist())

    def read(self, place: int) -> Any:
        return self._table.slice(place, 1).to_pylist()[0]
