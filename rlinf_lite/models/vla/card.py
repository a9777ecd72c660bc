"""OpenVLA's card: its options, and the checks of a run's config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from rlinf_lite.cards import (
    NO_STATE,
    NonNegativeFloat,
    Observed,
    PolicyCard,
    PositiveInt,
    Problem,
    ProblemError,
)
from rlinf_lite.config.resources import tokenizer_dirs
from rlinf_lite.config.rules.cards import imitates_no_state, long_prompt, misfits, task_sentences
from rlinf_lite.models.lora import LoraOptions, other_adapters
from rlinf_lite.models.text.card import AttnImplementation, attention_problems
from rlinf_lite.models.training_options import TrainingOptions

if TYPE_CHECKING:
    from rlinf_lite.config import Config
    from rlinf_lite.models.vla.config import VLAConfig


class OpenVLALoraOptions(LoraOptions):
    save_base: bool = True
    """Checkpoints hold the base weights too; false: only adapters, value head and the path of the base weights."""


class OpenVLAOptions(TrainingOptions):
    size: Literal["tiny", "small", "7b"] = "tiny"
    """From random weights: 0.9 M, 5 M or 7 B parameters. A checkpoint brings its own."""
    parallel_decoding: bool | None = None
    """All action tokens in one pass (OpenVLA-OFT), or one by one (OpenVLA). null: the checkpoint's; true."""
    append_stop: bool | None = None
    """Append the stop token to the action slots. null: the checkpoint's."""
    unnorm_key: str | None = None
    """Name of the statistics that normalise actions. null: the checkpoint's, if it has just one."""
    norm_type: Literal["bounds_q99", "bounds"] | None = None
    """Actions span q01 to q99, or min to max. null: the checkpoint's."""
    center_crop: bool | None = None
    """Crop images to 90% of their area. null: the checkpoint's; false."""
    cameras: list[str] | None = None
    """The environment's cameras, in order. null: the checkpoint's; all."""
    use_proprio: bool | None = None
    """The robot's state is read, as a token. null: the checkpoint's; false."""
    max_prompt_length: PositiveInt | None = None
    """Number of tokens that every prompt is padded to. null: the checkpoint's."""
    attn_implementation: AttnImplementation = "sdpa"
    """Attention kernels."""
    sft_label_sigma: NonNegativeFloat = 0.0
    """Standard deviation of the labels, Gaussians over the action bins on [-1, 1]; 0: the label is one bin."""
    lora: OpenVLALoraOptions = OpenVLALoraOptions()


class OpenVLA(PolicyCard):
    """OpenVLA and OpenVLA-OFT: images and an instruction in, action tokens out."""

    policy = "rlinf_lite.models.vla.policy:OpenVLAPolicy"
    Options = OpenVLAOptions
    probabilities = True
    free_options = ("attn_implementation", "gradient_checkpointing", "compile", "sft_label_sigma", "lora.save_base")

    def problems(self, config: Config, seen: Observed | None) -> Iterator[Problem]:
        attn = config.model.options.attn_implementation
        yield from attention_problems("model.options.attn_implementation", attn, config)
        if seen is None:
            return
        from rlinf_lite.models.vla.config import vla_config

        try:
            cfg = vla_config(config, seen)
        except ProblemError as error:
            yield error.problem
            return
        cameras = cfg.cameras
        wanted = config.model.options.lora.model_dump(exclude={"save_base"})
        yield from other_adapters(cfg.lora, wanted, "OpenVLAPolicy")
        yield from misfits(config, cfg.proprio_dim, cfg.action_dim, seen)
        yield from self._long_prompts(config, cfg)
        if cfg.proprio_dim and imitates_no_state(config):
            yield Problem("data.keys.state", NO_STATE)
        if not seen.cameras or not set(cameras) <= set(seen.cameras):
            shown = ", ".join(seen.cameras) or "a state alone"
            yield Problem(
                "model.options.cameras",
                f"the policy looks through {', '.join(cameras) or 'cameras'}, and what {config.env.task} shows is "
                f"{shown}. Set it, or what the environment shows (env.options)",
            )

    def _long_prompts(self, config: Config, cfg: VLAConfig) -> Iterator[Problem]:
        found = [place for place in tokenizer_dirs(config) if (place / "tokenizer.json").is_file()]
        if not found or not task_sentences(config):
            return
        from rlinf_lite.models.vla.inputs import PromptEncoder, PromptTooLongError, TokenizerError  # torch, so only now

        try:
            encoder = PromptEncoder.from_directory(found[0], cfg)
        except TokenizerError:  # loading the policy raises it
            return
        except PromptTooLongError as error:
            key, text = str(error).split(": ", 1)
            yield Problem(key, text)
            return
        yield from long_prompt(config, cfg.max_prompt_length, lambda sentence: len(encoder.token_ids(sentence)))
