"""`rlinf-lite export`: write a policy as the Hugging Face Hub expects it: weights, config, statistics, tokenizer, and a
model card that says what was trained, how well it does and how to load it. Nothing is uploaded."""

from __future__ import annotations

import argparse
import json
import re
import secrets
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_lite import __version__

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

    from rlinf_lite.models import Policy

RUN_CONFIG = "train_config.yaml"
EVALUATIONS = "evaluations"
_WHAT = {
    "rlinf_lite.safetensors": "weights that the published layout does not have: value head, slot embeddings, adapters",
    "*.safetensors": "weights",
    "*.safetensors.index.json": "which weights are in which file",
    "config.json": "the policy's config, and its normalisation statistics unless they have their own file",
    "rlinf_lite.json": "settings and statistics",
    "dataset_statistics.json": "statistics that normalise actions and states",
    "*tokenizer*": "the tokenizer",
    RUN_CONFIG: "the config of the run",
    EVALUATIONS: "every episode of the evaluations above, with settings and versions",
    "BASE_README.md": "the page of the weights that training started from",
    "*": "copied from the weights that training started from",
}


class ExportError(ValueError):
    """A policy that cannot be exported, or a directory that it cannot be written to."""


@dataclass
class Source:
    """A policy's directory and, for a checkpoint, its run's config and evaluations."""

    policy: Path
    checkpoint: Path | None = None
    config: dict[str, Any] = field(default_factory=dict)
    """Config of the run."""
    steps: int = 0
    evaluations: list[Path] = field(default_factory=list)
    """Evaluations of these very weights, by the run's own protocol, or those that were named."""
    others: list[Path] = field(default_factory=list)
    """Evaluations of these weights that are left out."""

    def value(self, key: str) -> Any:
        """The value of `key` in the run's config; None where it has none."""
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found


def export(arguments: Sequence[str]) -> int:
    """Write the directory. Returns the exit code: 0, or 2 where there is no such policy or it cannot be written."""
    given = parse(arguments)
    directory: Path = given.directory.resolve()
    from rlinf_lite.runners.checkpoints import CheckpointError

    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ExportError(f"{given.directory} exists and is not empty. Name a new directory")
        source = find_source(given.policy, given.evaluation)
        # written under another name and renamed at the end, so that a directory of this name is complete
        partial = directory.with_name(f".{directory.name}-{secrets.token_hex(4)}")
        partial.mkdir(parents=True)
        try:
            _write(source, partial, directory.name, given.license, given.base_model)
            partial.rename(directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except (CheckpointError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"written to {given.directory}: {', '.join(sorted(path.name for path in directory.iterdir()))}")
    print(
        f"  read README.md and {RUN_CONFIG}, which names paths of this machine" if source.config else "  read README.md"
    )
    for file in source.others:
        print(f"  left out: {file}; --evaluation FILE names the evaluations that the card shows")
    print(f"  nothing has been uploaded: hf upload <user>/{directory.name} {given.directory}")
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Exits with 2 where an argument is wrong."""
    parser = argparse.ArgumentParser(prog="rlinf-lite export", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "policy", type=Path, metavar="RUN", help="a run, one of its checkpoints, or a policy's directory"
    )
    parser.add_argument("--to", choices=("hf",), required=True, help="hf: the Hugging Face Hub")
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory to write: new, or empty")
    parser.add_argument(
        "--license",
        required=True,
        metavar="ID",
        help="licence of the weights, by its name on the Hub: apache-2.0, mit, gemma, ...",
    )
    parser.add_argument("--base-model", metavar="ID", help="the model on the Hub that training started from")
    parser.add_argument(
        "--evaluation",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="an evaluation of these weights to show on the card; may be repeated (default: those of the run itself)",
    )
    given = parser.parse_intermixed_args(arguments)
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", given.license):
        parser.error(f"--license {given.license}: give a name of the Hub, such as apache-2.0, mit, cc-by-4.0, other")
    return given


def find_source(path: Path, named: Sequence[Path] = ()) -> Source:
    """The policy at `path`, with its run's config and evaluations. `named`: files of evaluations to use instead.

    Raises:
        CheckpointError: its files are not those that were written.
        ExportError: there is no policy, or a named file is not an evaluation.
    """
    from rlinf_lite.config.resources import policy_directory
    from rlinf_lite.runners.checkpoints import CheckpointError, find_checkpoint, read_state, verify
    from rlinf_lite.runners.run_config import CONFIG, read_config

    for file in named:
        _check_evaluation(file)
    try:
        checkpoint = find_checkpoint(path.parent if path.name == "policy" else path)
    except CheckpointError as error:
        directory = policy_directory(path)
        if (directory / RUN_CONFIG).is_file():
            text = f"is an export already (it has {RUN_CONFIG}). Export the run, or copy this and edit its README.md"
            raise ExportError(f"{directory} {text}") from error
        if (directory / "config.json").is_file():
            return Source(directory, evaluations=list(named))
        other = "" if not directory.exists() else ". It is no policy's directory either, which has a config.json"
        raise ExportError(f"{error}{other}") from error
    verify(checkpoint)
    config = read_config(checkpoint / "training_state" / CONFIG) or {}
    source = Source(checkpoint / "policy", checkpoint, config, int(read_state(checkpoint)["completed_steps"]))
    run = checkpoint.parent.parent
    logs = [run, Path(source.value("runner.logger.log_path") or run.parent) / run.name]
    own = [f"eval/{checkpoint.name}.json", f"eval_{checkpoint.name}.json"]

    def of_run(*names: str) -> list[Path]:
        found = [file for name in names for log in logs for file in sorted(log.glob(name))]
        return list({file.resolve(): file for file in found}.values())

    source.evaluations = list(named) or of_run(*own)
    taken = {file.resolve() for file in source.evaluations}
    every = of_run(*own, f"eval_{checkpoint.name}[-_]*.json")
    source.others = [file for file in every if file.resolve() not in taken]
    return source


def _check_evaluation(file: Path) -> None:
    try:
        content = json.loads(file.read_text())
        known = {"headline", "total", "mode"} <= content.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise ExportError(f"--evaluation {file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not known:
        raise ExportError(f"--evaluation {file} is not an evaluation. Name a file that rlinf-lite eval has written")


def _write(source: Source, directory: Path, name: str, license_id: str, base_model: str | None) -> None:
    """Write the policy's files. Adapters are merged, because readers of the published layout do not know them. Base
    weights in another directory are written too. All other files are copied."""
    from rlinf_lite.models import load_policy
    from rlinf_lite.models.base import read_policy_config
    from rlinf_lite.models.lora import ADAPTER
    from rlinf_lite.models.registry import is_language_model
    from rlinf_lite.models.text.causal_lm import CausalLM

    policy = None if is_language_model(read_policy_config(source.policy)) else load_policy(source.policy)
    model: Any = CausalLM.from_pretrained(source.policy) if (source.policy / ADAPTER).is_dir() else policy
    has_adapters = hasattr(model, "merge_adapters") and any(".lora_" in name for name, _ in model.named_parameters())
    if has_adapters:
        model.merge_adapters()
    if has_adapters or (read_policy_config(source.policy).get("rlinf_lite") or {}).get("base"):
        model.save_pretrained(directory)
    else:
        shutil.copytree(source.policy, directory, dirs_exist_ok=True)
    (directory / RUN_CONFIG).unlink(missing_ok=True)  # these two belong to an export that training started from
    shutil.rmtree(directory / EVALUATIONS, ignore_errors=True)
    if (directory / "README.md").exists():
        (directory / "README.md").rename(directory / "BASE_README.md")  # of the weights at the start
    if source.checkpoint is not None:
        shutil.copyfile(source.checkpoint / "training_state" / "config.yaml", directory / RUN_CONFIG)
    for file in source.evaluations:
        (directory / EVALUATIONS).mkdir(exist_ok=True)
        shutil.copyfile(file, directory / EVALUATIONS / file.name)
    card = model_card(source, policy, directory, name, license_id, base_model)
    (directory / "README.md").write_text(card, encoding="utf-8")
    if policy is not None:
        load_policy(directory)  # check that it loads, as it will for a user


def model_card(
    source: Source, policy: Policy | None, directory: Path, name: str, license_id: str, base_model: str | None
) -> str:
    """Text of README.md for `directory`, whose other files have been written: metadata for the Hub between two lines of
    dashes, then the page. `policy` is None for a language model."""
    from huggingface_hub import ModelCardData

    evaluations = [(file, json.loads(file.read_text())) for file in source.evaluations]
    estimator = source.value("algorithm.adv_type")
    algorithm = {"gae": "ppo"}.get(estimator, estimator)
    if (kind := source.value("runner.task_type")) in ("sft", "off_policy"):
        algorithm = "imitation" if kind == "sft" else source.value("off_policy.algorithm")
    reads = None if policy is None else policy.reads()
    if policy is None:
        library, pipeline = "transformers", "text-generation"
    else:
        library, pipeline = "rlinf_lite", "robotics" if reads is None or reads.cameras else "reinforcement-learning"
    data = ModelCardData(
        license=license_id,
        library_name=library,
        pipeline_tag=pipeline,
        tags=[*dict.fromkeys(["rlinf_lite", pipeline, *filter(None, [algorithm, policy and policy.policy_id])])],
        base_model=base_model,
        model_name=name if evaluations else None,
        eval_results=[_result(content, pipeline) for _, content in evaluations] or None,
    )
    sections = [
        f"---\n{data.to_yaml()}\n---\n\n# {name}",
        _about(source, policy, algorithm),
        "## How well it does\n\n" + _success(evaluations, policy, directory),
        *([_interface(policy)] if policy is not None else []),
        "## Load it\n\n" + _usage(policy, name, {content["mode"] for _, content in evaluations}),
        "## Files\n\n" + _files(directory, policy),
        f"## Licence\n\n`{license_id}`. The weights that training started from have their own terms.",
    ]
    return "\n\n".join(sections) + "\n"


def _result(content: dict[str, Any], task_type: str) -> EvalResult:
    from huggingface_hub import EvalResult

    total, protocol = content["total"], content.get("protocol") or {}
    env, task = protocol.get("env") or "problems", protocol.get("task")
    has_success = total["success_once"] is not None
    return EvalResult(
        task_type=task_type,
        dataset_type=str(env),
        dataset_name=f"{env} {task}" if task else str(env),
        metric_type="success_rate" if has_success else "mean_reward",
        metric_value=total["success_once"] if has_success else total["return_mean"],
        metric_name=content["headline"],
    )


def _about(source: Source, policy: Policy | None, algorithm: str | None) -> str:
    from rlinf_lite.cards import PolicyCard
    from rlinf_lite.registry import policy_card

    lines = ["A language model."]
    if policy is not None:
        card = policy_card(policy.policy_id)
        # the docstring of PolicyCard itself is about cards
        about = "" if type(card) is PolicyCard else (card.__doc__ or "").strip()
        lines = [(about or f"`{policy.policy_id}`.").splitlines()[0]]
    if source.checkpoint is not None:
        task = " ".join(str(source.value(key)) for key in ("env.id", "env.task") if source.value(key))
        on = f" on `{task}`" if task else ""
        config, seed = source.value("runner.run_name"), source.value("runner.seed")
        lines.append(
            f"Trained with rlinf_lite{on}: {source.steps} steps of {algorithm}, config `{config}`, seed {seed}."
        )
    count = sum(x.numel() for x in policy.parameters()) if policy is not None else 0
    return " ".join(lines) + (f" {count:,} parameters." if count else "")


def _success(evaluations: Iterable[tuple[Path, dict[str, Any]]], policy: Policy | None, directory: Path) -> str:
    rows = []
    for file, content in evaluations:
        protocol = content.get("protocol") or {}
        what = " ".join(str(protocol[key]) for key in ("env", "task", "suite") if protocol.get(key)) or "-"
        seed = "-" if protocol.get("seed") is None else str(protocol["seed"])
        rows.append(f"| {what} | {content['headline']} | {seed} | [{file.name}]({EVALUATIONS}/{file.name}) |")
    if not rows and policy is None:
        config = RUN_CONFIG if (directory / RUN_CONFIG).is_file() else "NAME"
        how = f"rlinf-lite eval --config-name {config} actor.checkpoint_load_path=DIR"
        return f"These weights have not been evaluated: `{how}` does that, where DIR is this directory."
    if not rows:
        return "These weights have not been evaluated: run `rlinf-lite eval RUN`, then export again."
    text = "Results of these weights, with 95% intervals in brackets and the counts of episodes after them."
    return "\n".join([text, "", "| on | result | seed | all episodes |", "|---|---|---|---|", *rows])


def _interface(policy: Policy) -> str:
    reads, lines = policy.reads(), ["## What it reads and answers", "", "| | |", "|---|---|"]
    if reads is None:
        lines.append("| reads | see its class |")
    else:
        lines += [
            f"| camera `{name}` | uint8 [H, W, 3], scaled to {height} x {width} |"
            for name, (height, width) in reads.cameras.items()
        ]
        if reads.state_dim:
            lines.append(f"| state | {reads.state_dim} numbers |")
        if reads.has_instruction:
            lines.append("| instruction | a text |")
    answer = f"{policy.num_action_chunks} actions of {policy.action_dim} numbers, in the environment's units"
    return "\n".join([*lines, f"| answers | {answer} |"])


def _usage(policy: Policy | None, name: str, modes: Collection[str]) -> str:
    """Code that loads the policy and acts, in the mode in which it was evaluated, if that was only one."""
    if policy is None:
        return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("<user>/{name}")
tokenizer = AutoTokenizer.from_pretrained("<user>/{name}")
```"""
    reads, entries = policy.reads(), list[str]()
    if reads is not None and reads.cameras:
        shown = ", ".join(f'"{camera}": np.zeros(({h}, {w}, 3), np.uint8)' for camera, (h, w) in reads.cameras.items())
        entries.append(f'"images": {{{shown}}}')
    if reads is not None and reads.state_dim:
        entries.append(f'"state": np.zeros({reads.state_dim})')
    if reads is not None and reads.has_instruction:
        entries.append('"instruction": "..."')
    mode = ', mode="sampled"' if set(modes) == {"sampled"} else ""
    module, colon, _ = policy.policy_id.partition(":")
    own = f" and the module `{module}`, which is not among these files" if colon else ""
    text = f"With rlinf_lite {__version__}{own}:"
    return f"""{text}

```python
import numpy as np
import rlinf_lite
from huggingface_hub import snapshot_download

policy = rlinf_lite.load_policy(snapshot_download("<user>/{name}"))
actions = policy.act({{{", ".join(entries)}}}{mode})  # [{policy.num_action_chunks}, {policy.action_dim}]
```

`rlinf-lite serve DIR` serves it to openpi's clients; `actor.checkpoint_load_path=DIR` trains on from it."""


def _files(directory: Path, policy: Policy | None) -> str:
    of_kind = {"config.json": "the model's config"} if policy is None else {}
    rows = []
    for path in sorted(directory.iterdir()):
        what = next(text for pattern, text in (_WHAT | of_kind).items() if fnmatch(path.name, pattern))
        name = f"{path.name}/" if path.is_dir() else path.name
        rows.append(f"| `{name}` | {what} |")
    return "\n".join(["| | |", "|---|---|", *rows])
