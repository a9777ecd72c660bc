"""The card of language models: the `model` section of a reasoning run, and the checks of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlinf_lite.cards import Card, Problem
from rlinf_lite.config.plan import slots
from rlinf_lite.models.lora import ADAPTER, ADAPTER_CONFIG, LanguageLoraOptions
from rlinf_lite.models.text.presets import preset
from rlinf_lite.models.training_options import TrainingOptions

if TYPE_CHECKING:
    from rlinf_lite.config import ReasoningConfig
    from rlinf_lite.config.schema import BaseConfig

SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Sizes of a model that are divided among the ranks that share its layers."""
AttnImplementation = Literal[
    "sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"
]
_DISTRIBUTIONS = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}
"""What has to be installed for these kernels."""


class LanguageModelOptions(TrainingOptions):
    size: Literal["tiny", "small"] = "tiny"
    """A Llama over characters with random weights, of 0.8 M or 4.7 M parameters. Not used with `rollout.model_dir`."""
    attn_implementation: AttnImplementation = "sdpa"
    """Attention kernels in training; generation uses sdpa."""
    lora: LanguageLoraOptions = LanguageLoraOptions()
    """Adapters that train instead of the policy's weights. A critic has none; all its weights train."""


class LanguageModel(Card):
    """A causal language model in transformers' layout, or a small one from random weights."""

    Options = LanguageModelOptions
    free_options = ("attn_implementation", "gradient_checkpointing", "compile")

    def positions(self, config: ReasoningConfig) -> int | None:
        """Largest number of tokens in a sequence of the model; None if its directory does not say."""
        from rlinf_lite.config.resources import start_dir

        directory = start_dir(config)
        if directory is None:
            return int(preset(config.model.size)["max_position_embeddings"])
        return _positions(directory)

    def problems(self, config: ReasoningConfig, shares_process: bool) -> Iterator[Problem]:
        """Problems of a run's config with its models. `shares_process`: actor and rollout are one process."""
        from rlinf_lite.config.resources import policy_directory, start_dir

        prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
        room = self.positions(config)
        if config.teacher.model_dir is not None:
            found = _positions(policy_directory(config.teacher.model_dir))
            if found is not None and prompt + response > found:
                text = f"has {found} positions, and sequences {prompt} + {response} = {prompt + response} tokens"
                yield Problem("teacher.model_dir", f"{config.teacher.model_dir} {text}. Name another, or shorten these")
        if room is not None and prompt + response > room:
            yield Problem(
                "rollout.max_response_length",
                f"{prompt} + {response} = {prompt + response} tokens (with data.max_prompt_length), and the model has "
                f"{room} positions. Use {max(room - prompt, 1)} or less",
            )
        if shares_process and config.model.attn_implementation != "sdpa":
            yield Problem(
                "model.attn_implementation",
                "actor and rollout share a process and a model (cluster.fuse), and generation needs sdpa. Use sdpa, or "
                "fuse others",
            )
        directory = start_dir(config)
        brings = directory is not None and (Path(directory) / ADAPTER).is_dir()
        if (config.model.lora.rank or brings) and config.actor.tensor_model_parallel_size > 1:
            way_out = "merge those of the model by `rlinf-lite export`" if brings else "rank 0"
            yield Problem(
                "model.lora.rank",
                "adapters are not split over the ranks that share a layer (actor.tensor_model_parallel_size). Use "
                f"actor.strategy: fsdp, or {way_out}",
            )
        yield from self._other_adapters(config)
        yield from attention_problems("model.attn_implementation", config.model.attn_implementation, config)
        yield from self._divides(config)

    def _other_adapters(self, config: ReasoningConfig) -> Iterator[Problem]:
        """Problems of a model whose directory has other adapters than the config asks for."""
        from rlinf_lite.config.resources import start_dir

        lora, directory = config.model.lora, start_dir(config)
        if directory is None or not lora.rank:  # rank 0 keeps the directory's adapters
            return
        try:
            said = json.loads((directory / ADAPTER / ADAPTER_CONFIG).read_text())
            theirs = {"rank": said["r"], "alpha": said["lora_alpha"], "targets": sorted(said["target_modules"])}
        except (OSError, ValueError, KeyError, TypeError):
            return  # it has no adapters, or loading them raises an error
        targets = theirs["targets"] if lora.targets == "all-linear" else sorted(set(lora.targets))
        wanted = {"rank": lora.rank, "alpha": lora.alpha or lora.rank, "targets": targets}
        for name, value in wanted.items():
            if value != theirs[name] and (name != "alpha" or lora.alpha or lora.rank == theirs["rank"]):
                yield Problem(
                    f"model.lora.{name}",
                    f"is {value}, and the adapters in {directory} have {theirs[name]}. Set the same value, or start "
                    f"from weights that they are merged into: rlinf-lite export {directory} --to hf DIR --license ...",
                )

    def _divides(self, config: ReasoningConfig) -> Iterator[Problem]:
        """Problems of heads and MLP that do not divide evenly over the ranks that share a layer."""
        from rlinf_lite.config.resources import policy_config, policy_directory, start_dir

        size, key = config.actor.tensor_model_parallel_size, "actor.tensor_model_parallel_size"
        directories = {"the model": start_dir(config)}
        if config.critic.model_dir is not None:
            directories["the critic"] = policy_directory(config.critic.model_dir)
        if config.teacher.model_dir is not None:
            directories["the teacher"] = policy_directory(config.teacher.model_dir)
        for of, directory in directories.items():
            try:
                said = preset(config.model.size) if directory is None else policy_config(directory)
            except (OSError, ValueError):
                continue  # loading it raises an error
            numbers = {name: said.get(name) for name in SPLIT}
            bad = [f"{name} = {x}" for name, x in numbers.items() if isinstance(x, int) and x % size]
            if bad:
                most = math.gcd(*(x for x in numbers.values() if isinstance(x, int)))
                yield Problem(
                    key, f"{size} ranks do not divide {', '.join(bad)} of {of}. Use {most} or a divisor of it"
                )


def _positions(directory: Path) -> int | None:
    try:
        found = json.loads((directory / "config.json").read_text()).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None  # loading it raises an error
    return found if isinstance(found, int) else None


def attention_problems(key: str, attn_implementation: AttnImplementation, config: BaseConfig) -> Iterator[Problem]:
    """Problems of attention kernels that the config key `key` asks for: precision, device, and a missing package."""
    if attn_implementation == "flex_attention" and slots(config.cluster)[0] == "cpu":
        yield Problem(key, "flex_attention has no backward pass on CPUs. Use sdpa, or GPUs (cluster.accelerator: cuda)")
    if attn_implementation not in _DISTRIBUTIONS:
        return
    if config.actor.precision == "fp32":
        yield Problem("actor.precision", f"{attn_implementation} cannot compute in fp32. Use bf16, or {key}: sdpa")
    distribution = _DISTRIBUTIONS[attn_implementation]
    try:
        version(distribution)
    except PackageNotFoundError:
        text = f"{attn_implementation} is not installed (no package {distribution})"
        way_out = "Install a wheel built for this torch and CUDA, or use sdpa, which needs nothing"
        yield Problem(key, f"{text}. {way_out}", of_machine=True)
