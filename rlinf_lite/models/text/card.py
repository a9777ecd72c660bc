"""The card of language models: what the `model` section of a reasoning run holds, and what does not fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from rlinf_lite.cards import Card, Problem, Section
from rlinf_lite.models.text.presets import preset
from rlinf_lite.registry import install_command, is_installed

if TYPE_CHECKING:
    from rlinf_lite.config import ReasoningConfig

AttnImplementation = Literal["sdpa", "flash_attention_2", "eager"]


class LanguageModelOptions(Section):
    size: Literal["tiny", "small"] = "tiny"
    """A Llama from random weights, over characters: 0.8 M or 4.7 M parameters. `rollout.model_dir` brings its own."""
    attn_implementation: AttnImplementation = "sdpa"
    """Attention kernels in training; generation uses sdpa."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""


class LanguageModel(Card):
    """A causal language model in transformers' layout, or a small one from random weights."""

    Options = LanguageModelOptions
    free_options = ("attn_implementation", "gradient_checkpointing")

    def positions(self, config: ReasoningConfig) -> int | None:
        """Tokens that the model's sequences may have; None where its directory does not say."""
        from rlinf_lite.config.resources import start_dir

        directory = start_dir(config)
        if directory is None:
            return int(preset(config.model.size)["max_position_embeddings"])
        try:
            content = json.loads((directory / "config.json").read_text())
        except (OSError, ValueError):
            return None  # loading it will say more
        found = content.get("max_position_embeddings")
        return found if isinstance(found, int) else None

    def problems(self, config: ReasoningConfig, shares_process: bool) -> Iterator[Problem]:
        """All that is wrong with a run's config for its model; `shares_process`: actor and rollout are one process."""
        prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
        room = self.positions(config)
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
        yield from attention_problems("model.attn_implementation", config.model.attn_implementation)


def attention_problems(key: str, attn_implementation: AttnImplementation, precision: str = "bf16") -> Iterator[Problem]:
    """What `key` asks for and cannot get."""
    if attn_implementation != "flash_attention_2":
        return
    if precision == "fp32":
        yield Problem("actor.precision", f"flash_attention_2 cannot compute in fp32. Use bf16, or {key}: sdpa")
    if not is_installed("flash_attn"):
        yield Problem(
            key, f"flash_attention_2 is not installed (no module flash_attn). {install_command('gpu')}, or use sdpa"
        )
