"""The problems of a language run: files that the config names, or generated arithmetic."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.resources import policy_directory
from rlinf_lite.data.arithmetic import ProblemSpaceError, generate
from rlinf_lite.data.prompt_files import DatasetError
from rlinf_lite.data.prompts import Prompt, PromptDataset, ResumableSampler
from rlinf_lite.data.proto import DataProto
from rlinf_lite.data.sequences import join_responses
from rlinf_lite.data.tokenizers import check_same_tokens, load_tokenizer
from rlinf_lite.hub import HubError, local_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problems:
    """The problems to train on and to evaluate on, and the tokenizer."""

    train: PromptDataset
    val: PromptDataset | None
    tokenizer: PreTrainedTokenizerBase


def open_problems(cfg: ReasoningConfig) -> Problems:
    """Read the problems of a run, and check every row. Raises DatasetError and TokenizerError."""
    data, tokenizer = cfg.data, load_tokenizer(cfg)
    if cfg.teacher.model_dir is not None:
        check_same_tokens(tokenizer, policy_directory(cfg.teacher.model_dir), "teacher.model_dir")
    train_files, val_files = list(data.train_files), list(data.val_files)
    if not train_files:
        generated = _generated(cfg)
        train_files, val_files = [str(generated / "train.jsonl")], val_files or [str(generated / "val.jsonl")]
    arguments = (tokenizer, data.max_prompt_length, data.prompt_key, data.filter_overlong)
    try:
        train_files, val_files = ([local_path(file) for file in files] for files in (train_files, val_files))
    except HubError as error:
        raise DatasetError(str(error)) from error
    train = PromptDataset(train_files, *arguments)
    val = PromptDataset(val_files, *arguments) if val_files else None
    for dataset, files in ((train, train_files), (val, val_files)):
        if dataset is not None and dataset.num_overlong:
            longest = f"data.max_prompt_length = {data.max_prompt_length}"
            log.warning("%s: %d prompts of more than %s are left out", files, dataset.num_overlong, longest)
    if len(train) < data.num_prompts:
        raise DatasetError(
            f"data.num_prompts: a step takes {data.num_prompts}, and there are {len(train)} in {train_files}. Use "
            "fewer, or more data"
        )
    if cfg.sft.num_steps:
        if len(train) < cfg.sft.batch_size:
            raise DatasetError(
                f"sft.batch_size: {cfg.sft.batch_size} rows, and there are {len(train)} in {train_files}"
            )
        limit, problems = cfg.rollout.max_response_length, []
        rows = {int(row) for batch in supervised_batches(train, cfg) for row in batch}
        for row in sorted(rows):
            prompt = train[row]
            if not isinstance(prompt.extra_info.get("solution"), str):
                problems.append(f"row {row + 1}: no extra_info.solution, which sft.num_steps above 0 trains on")
            elif len(_solution(prompt, tokenizer)) > limit:
                problems.append(f"row {row + 1}: a solution of more than rollout.max_response_length = {limit} tokens")
        if problems:
            raise DatasetError(problems)
    return Problems(train, val, tokenizer)


def supervised_batches(dataset: PromptDataset, cfg: ReasoningConfig) -> Iterator[np.ndarray]:
    """The rows of every supervised update, int64 [sft.batch_size] each."""
    order = ResumableSampler(len(dataset), cfg.sft.batch_size, cfg.runner.seed)
    return islice(order, cfg.sft.num_steps)


def solved_batch(dataset: PromptDataset, rows: np.ndarray, cfg: ReasoningConfig) -> DataProto:
    """A batch of prompts, with their worked solutions as responses."""
    prompts = [dataset[int(row)] for row in rows]
    responses = [_solution(prompt, dataset.tokenizer) for prompt in prompts]
    batch, limit = dataset.collate(prompts), cfg.rollout.max_response_length
    return DataProto(join_responses(batch, responses, cfg.data.max_prompt_length, limit), batch.non_tensor_batch)


def _solution(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
    text = str(prompt.extra_info["solution"])
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    eos = tokenizer.eos_token_id
    assert isinstance(eos, int)
    return [*ids, eos]


def _generated(cfg: ReasoningConfig) -> Path:
    """The directory of the generated problems, below the log path; it is written if it does not exist."""
    made, seed = cfg.data.arithmetic, cfg.runner.seed
    name = (
        f"arithmetic-{made.num_terms}x{made.max_number}-{made.num_train}-{made.num_val}-{made.terse_frac:g}-seed{seed}"
    )
    directory = Path(cfg.runner.logger.log_path) / "problems" / name
    if directory.is_dir():
        return directory
    partial = directory.with_name(f".{name}.{os.getpid()}")
    partial.mkdir(parents=True, exist_ok=True)
    for file, num_rows, split in (("train", made.num_train, "train"), ("val", made.num_val, "test")):
        try:
            rows = generate(num_rows, seed, split, made.num_terms, made.max_number, made.terse_frac)  # type: ignore[arg-type]
        except ProblemSpaceError as error:
            raise DatasetError(f"data.arithmetic: {error}") from error
        (partial / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.rename(directory)
    return directory
