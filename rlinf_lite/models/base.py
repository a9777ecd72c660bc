"""What a policy is: observations in, action chunks, log-probabilities and values out."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlinf_lite.config.resources import policy_config, why_no_policy
from rlinf_lite.envs.observations import ObservationError as ObservationError
from rlinf_lite.envs.observations import as_batch, num_rows
from rlinf_lite.models.tensor_files import read_tensors, write_tensors
from rlinf_lite.registry import did_you_mean

if TYPE_CHECKING:
    from rlinf_lite.config.schema import ModelConfig
    from rlinf_lite.envs import EnvSpec

Mode = Literal["train", "sampled", "greedy"]
NOISE_KEY = "noise_key"
"""Key of `obs` under which workers pass one uint64 per row; see `sampling.py`."""


@dataclass
class ActionOutput:
    """What acting gives: `actions` float32 [B, C, D] in the environment's units; the rest as in `PolicyOutput`.

    `forward_inputs` (only in mode `train`) is what `Policy.forward` needs to score these actions again, batch first.
    """

    actions: Tensor
    logprobs: Tensor
    values: Tensor
    forward_inputs: dict[str, Tensor]


@dataclass
class PolicyOutput:
    """Scores of given actions: `logprobs` and `entropy` [B, C, D]; `values` [B, 1] or, at action level, [B, C]."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy reads of an observation."""

    cameras: dict[str, tuple[int, int]]
    """Height and width that the policy scales pictures to, by camera."""
    state_dim: int = 0
    """0: no state."""
    has_instruction: bool = False
    needs_all_cameras: bool = True
    """False: it does with some of them."""

    def check(self, obs: Mapping[str, Any]) -> None:
        """Raises ObservationError where a batch (`as_batch`) lacks what is read, or has another state."""
        given = obs.get("images", {})
        missing = [camera for camera in self.cameras if camera not in given]
        has_others = len(missing) == len(self.cameras) or any(camera not in self.cameras for camera in given)
        if missing and (self.needs_all_cameras or has_others):
            seen = f"images of {', '.join(given)}" if given else "no images"
            raise ObservationError(
                f"the policy looks through {', '.join(self.cameras)}, and the observation has {seen}"
            )
        wanted = {"state": self.state_dim > 0, "instruction": self.has_instruction}
        for name in [name for name, is_read in wanted.items() if is_read and name not in obs]:
            raise ObservationError(f"the policy reads {name!r}, and the observation has {', '.join(obs)}")
        if self.state_dim and (length := obs["state"].shape[1]) != self.state_dim:
            raise ObservationError(f"state has {length} numbers, and the policy reads {self.state_dim}")


class UnknownModeError(ValueError):
    """No way of acting has that name."""


def check_mode(mode: str) -> None:
    """Raises UnknownModeError for a mode of acting that there is none of."""
    if mode not in get_args(Mode):
        raise UnknownModeError(f"there is no mode {mode!r}. {did_you_mean(str(mode), get_args(Mode))}")


class CheckpointFormatError(ValueError):
    """A policy directory that cannot be loaded: a file or tensor is missing, foreign, or of the wrong shape."""


class Policy(nn.Module, ABC):
    """Base of all policies. A subclass names itself with `@register_policy` and is built by `build_policy`.

    At equal weights `forward(out.forward_inputs).logprobs` equals `out.logprobs` of the `predict_action_batch` before.
    """

    policy_id: str
    num_action_chunks: int
    action_dim: int
    dimension_names: Mapping[str, Sequence[str]] = {}
    """Of the `state`, if it reads one, and the `action` that it is trained on, where these have names; checkpoints keep
    it."""
    relative_actions = 0
    """So many action dimensions are relative to the state where the chunk begins, and statistics of them have to be."""

    @abstractmethod
    def predict_action_batch(self, obs: Mapping[str, Any], mode: Mode = "train") -> ActionOutput:
        """Act on `obs` (see `envs.Obs`); sampling takes its noise from `obs["noise_key"]` where given."""

    def act(self, obs: Mapping[str, Any], mode: Mode = "greedy") -> NDArray[np.float32]:
        """Act, as a user of a trained policy does: [C, D] for one observation, [B, C, D] for a batch of them, in the
        environment's units. `models.ActionQueue` gives them one by one.

        `obs`: `images` by camera (uint8 [H, W, 3]), `state` [S], `instruction` (a text), as far as this policy reads
        them, or all of them with a batch dimension in front. What dropout there is, is switched off.

        Raises:
            ObservationError: for an observation that cannot be meant, or that this policy cannot read.
            UnknownModeError: for a mode that there is none of.
        """
        check_mode(mode)
        batch, is_single = as_batch(obs)
        if (reads := self.reads()) is not None:
            reads.check(batch)
        if not is_single and num_rows(batch) == 0:
            return np.zeros((0, self.num_action_chunks, self.action_dim), np.float32)
        if self.training:
            self.eval()
        with torch.inference_mode():
            try:
                actions = self.predict_action_batch(batch, mode).actions
            except KeyError as error:
                given = ", ".join(batch)
                text = f"the policy reads {error.args[0]!r}, and the observation has {given}"
                raise ObservationError(text) from error
        acted: NDArray[np.float32] = actions.float().cpu().numpy()
        return acted[0] if is_single else acted

    @abstractmethod
    def predict_values(self, obs: Mapping[str, Any]) -> Tensor:
        """Values alone, [B, 1] or [B, C], without choosing actions."""

    def release(self) -> None:
        """Give back the memory that acting keeps from call to call, if any: others are to have it now."""

    @abstractmethod
    def forward(self, forward_inputs: dict[str, Tensor]) -> PolicyOutput:
        """Score the actions in `forward_inputs`, with gradients."""

    def fixed_inputs(self, forward_inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """What `forward` makes of `forward_inputs` that training does not change, batch first, without gradients.

        Called once per step where `algorithm.update_epochs` is above 1; every epoch's `forward` gets it back, among its
        inputs. Nothing, where all changes.
        """
        return {}

    @classmethod
    @abstractmethod
    def from_config(cls, cfg: ModelConfig, spec: EnvSpec) -> Self:
        """Build from the run's `model` section for an environment, weights at random."""

    @abstractmethod
    def check_env_spec(self, spec: EnvSpec) -> None:
        """Raise ValueError where this policy cannot read what the environment gives."""

    def reads(self) -> PolicyInputs | None:
        """What an observation has to have, which `rlinf-lite serve` tells clients. None: it does not say, and gets
        whatever comes."""
        return None

    def take_names(self, names: Mapping[str, Sequence[str]]) -> None:
        """Set `dimension_names`, without those of a state that it does not say to read."""
        reads = self.reads()
        skipped = set() if reads is not None and reads.state_dim else {"state"}
        self.dimension_names = {name: list(x) for name, x in names.items() if name not in skipped}

    @abstractmethod
    def config_dict(self) -> dict[str, Any]:
        """Everything `from_config_dict` needs to build the same policy with other weights; JSON."""

    @classmethod
    @abstractmethod
    def from_config_dict(cls, config: dict[str, Any]) -> Self:
        """Build from `config_dict()`, weights at random."""

    def sft_inputs(self, obs: Mapping[str, Any]) -> dict[str, Tensor]:
        """What `sft_loss` reads of `obs` (see `envs.Obs`): tensors on the CPU, batch first, images as uint8.

        Called once per micro-batch on rows of demonstrations; weights are not read. What is random in the loss takes
        its noise from `obs["noise_key"]`. Raises ValueError where `obs` does not fit, for example an instruction longer
        than the context.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be trained on demonstrations: it has no sft_inputs")

    def sft_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Imitation loss on demonstrations: a scalar with gradients, the mean over the batch's executed actions.

        `batch` is what `sft_inputs` returned, on the policy's device, and besides `actions` float32 [B, C, D] in the
        environment's units, and `mask` bool [B, C], False where the episode had ended: those actions do not count.
        Sharded weights are gathered around this call as around `forward`.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be trained on demonstrations: it has no sft_loss")

    def take_statistics(self, statistics: Mapping[str, Mapping[str, list[float]]]) -> None:
        """Normalise as demonstrations say, where this policy normalises by statistics: in the place of what
        `from_config` took from the environment, before the first update, in actors and rollout workers alike.

        `statistics` of `action`, and of `state` where the demonstrations have one: `min`, `max`, `mean`, `std`, `q01`,
        ..., `q99`, by dimension and in the environment's units; no range among them is 0. What is taken has to be in
        `config_dict()`, by which checkpoints keep it.
        """

    def usual_ranges(self) -> dict[str, tuple[list[float], list[float]]]:
        """Low and high by dimension of `state` and `action`, as the statistics say that this policy normalises by;
        nothing where it has none. What demonstrations are compared with when a trained policy learns from them."""
        return {}

    def fsdp_units(self) -> list[nn.Module]:
        """Modules that are sharded one by one, inner before outer; the policy itself is sharded last."""
        return []

    def value_parameters(self) -> list[nn.Parameter]:
        """Parameters that only the value uses; they take `actor.optim.value_lr`."""
        return []

    def save_pretrained(self, directory: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write `config.json` and `model.safetensors`, from `state_dict` where this module's own is sharded."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        config = {"policy_id": self.policy_id, **self.config_dict()}
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_tensors(self.state_dict() if state_dict is None else state_dict, directory / "model.safetensors")

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        model: ModelConfig | None = None,
        read_weights: bool = True,
        *,
        config: Mapping[str, Any] | None = None,
    ) -> Self:
        """Read what `save_pretrained` wrote. `model`, a run's section, may replace settings that weights leave open.

        `read_weights` False: a policy of the same size with random weights; for `--dry-run`. `config`: what
        `read_policy_config` returns, where it has been read already. A subclass may leave these two out.

        Raises:
            CheckpointFormatError: listing missing, foreign and misshapen tensors.
        """
        directory = Path(directory)
        policy = cls.from_config_dict(dict(read_policy_config(directory) if config is None else config))
        if read_weights:
            policy.load_state_dict(policy.read_state(directory))
        return policy

    def read_state(self, directory: str | Path) -> dict[str, Tensor]:
        """The whole state dict that `save_pretrained` wrote to `directory`; this policy may be sharded, and is not
        changed.

        Raises:
            CheckpointFormatError: listing missing, foreign and misshapen tensors.
        """
        file = Path(directory) / "model.safetensors"
        if not file.is_file():
            raise CheckpointFormatError(f"{directory} has no {file.name}")
        tensors = read_tensors(file)
        check_tensors(self.state_dict(), tensors, str(directory))
        return tensors


def recompute_in_backward(layers: Iterable[nn.Module]) -> None:
    """Keep the inputs of these layers, which have no dropout, instead of their activations; hooks stay outside.

    Transformers' own way would do so in training mode alone, where dropout and the like are on, and drop caches there.
    """
    for layer in layers:
        recomputed = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        layer.forward = recomputed


def read_policy_config(directory: Path) -> dict[str, Any]:
    """`policy_config` of a directory. Raises CheckpointFormatError where it has none, or one that is no JSON."""
    if (problem := why_no_policy(directory)) is not None:
        raise CheckpointFormatError(f"{directory}{problem}")
    try:
        return policy_config(directory)
    except ValueError as error:
        text = f"{directory / 'config.json'}, or our additions to it, cannot be read: {error}"
        raise CheckpointFormatError(text) from error


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    """Those in a directory, by name: to be saved with a policy that had none of its own."""
    names = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")
    return {
        file.name: file.read_bytes()
        for file in sorted(directory.iterdir())
        if file.is_file() and (file.name in names or "tokenizer" in file.name)
    }


def check_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], source: str) -> None:
    """Compare names and shapes. Raises CheckpointFormatError listing every difference."""
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [f"unexpected {name}" for name in found if name not in expected]
    problems += [
        f"{name} has shape {tuple(found[name].shape)}, the policy needs {tuple(expected[name].shape)}"
        for name in expected
        if name in found and found[name].shape != expected[name].shape
    ]
    if problems:
        raise CheckpointFormatError(f"{source} does not fit the policy: " + "; ".join(problems))


def row_noise_keys(obs: Mapping[str, Any], num_rows: int) -> np.ndarray:
    """The rows' noise keys, or random ones where the caller gave none (interactive use)."""
    if NOISE_KEY in obs:
        return np.asarray(obs[NOISE_KEY], dtype=np.uint64)
    return torch.randint(0, 2**62, (num_rows,)).numpy().astype(np.uint64)
