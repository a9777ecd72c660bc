"""The interface of all policies: observations in; action chunks, log-probabilities and values out."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

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
    """Result of acting: `actions` float32 [B, C, D] in the environment's units; the rest as in `PolicyOutput`.

    `forward_inputs` (only in mode `train`): tensors, batch first, from which `Policy.forward` scores the same actions.
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
    """The parts of an observation that a policy reads."""

    cameras: dict[str, tuple[int, int]]
    """Height and width that the policy scales pictures to, by camera."""
    state_dim: int = 0
    """Numbers in the state; 0: the policy reads no state."""
    has_instruction: bool = False
    needs_all_cameras: bool = True
    """False: one of the cameras is enough."""

    def check(self, obs: Mapping[str, Any]) -> None:
        """Raises ObservationError if a batch (`as_batch`) lacks one of these parts, or its state has another size."""
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
    """A mode of acting that does not exist."""


def check_mode(mode: str) -> None:
    """Raises UnknownModeError unless `mode` is one of `Mode`."""
    if mode not in get_args(Mode):
        raise UnknownModeError(f"there is no mode {mode!r}. {did_you_mean(str(mode), get_args(Mode))}")


class CheckpointFormatError(ValueError):
    """A policy directory that cannot be loaded: a file or tensor is missing, unexpected, or of the wrong shape."""


class Policy(nn.Module, ABC):
    """Base of all policies. A subclass gets its name from `@register_policy` and is built by `build_policy`.

    At equal weights, `forward(out.forward_inputs).logprobs` equals `out.logprobs`, where `out` is the result of
    `predict_action_batch`.
    """

    policy_id: str
    num_action_chunks: int
    action_dim: int
    dimension_names: Mapping[str, Sequence[str]] = {}
    """Names of the dimensions of `state` (if the policy reads one) and `action`, where known; saved in checkpoints."""
    chosen_dim: int | None = None
    """Off-policy: how many numbers a decision chooses, where these are not its actions; `predict_action_batch` in mode
    train then has them as `chosen` [B, 1, `chosen_dim`] in its `forward_inputs`. None: the actions."""
    compiles_layers = False
    """Whether layers are compiled wherever gradients are recorded (`models.layers`). Scores that ratios begin with are
    then computed with gradients too, by the same graphs."""
    relative_actions = 0
    """Number of leading action dimensions that are relative to the state at the beginning of the chunk; statistics of
    actions must be relative too."""

    @abstractmethod
    def predict_action_batch(self, obs: Mapping[str, Any], mode: Mode = "train") -> ActionOutput:
        """Act on `obs` (see `envs.Obs`); sampling takes its noise from `obs["noise_key"]` if it is there."""

    def act(self, obs: Mapping[str, Any], mode: Mode = "greedy") -> NDArray[np.float32]:
        """Act with a trained policy: actions [C, D] for one observation, [B, C, D] for a batch, in the environment's
        units. `models.ActionQueue` returns them one by one.

        `obs`: `images` by camera (uint8 [H, W, 3]), `state` [S] and `instruction` (a text), as far as this policy reads
        them; all without or all with a leading batch dimension. The policy is put into eval mode.

        Raises:
            ObservationError: if the observation is malformed, or lacks what this policy reads.
            UnknownModeError: if `mode` does not exist.
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
        """Values [B, 1] or [B, C], without choosing actions."""

    def release(self) -> None:
        """Free the memory that acting keeps between calls, if any."""

    @abstractmethod
    def forward(self, forward_inputs: dict[str, Tensor]) -> PolicyOutput:
        """Score the actions in `forward_inputs`, with gradients."""

    def fixed_inputs(self, forward_inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Intermediate results of `forward` that training does not change, batch first, without gradients.

        Called once per step if `algorithm.update_epochs` is above 1; `forward` then finds them among its inputs in
        every epoch. Empty by default.
        """
        return {}

    @classmethod
    @abstractmethod
    def from_config(cls, cfg: ModelConfig, spec: EnvSpec) -> Self:
        """Build from the run's `model` section for an environment, with random weights. A policy that contains a
        trained one may have a third parameter `read_weights`, as that of `from_pretrained`."""

    @abstractmethod
    def check_env_spec(self, spec: EnvSpec) -> None:
        """Raises ValueError if this policy cannot act on the observations of the environment."""

    def reads(self) -> PolicyInputs | None:
        """The parts that an observation must have; `rlinf-lite serve` sends them to clients. None: not stated, and
        observations are not checked."""
        return None

    def take_names(self, names: Mapping[str, Sequence[str]]) -> None:
        """Set `dimension_names`; those of the state only if `reads` says that the policy reads a state."""
        reads = self.reads()
        skipped = set() if reads is not None and reads.state_dim else {"state"}
        self.dimension_names = {name: list(x) for name, x in names.items() if name not in skipped}

    @abstractmethod
    def config_dict(self) -> dict[str, Any]:
        """All that `from_config_dict` needs to build the same policy with other weights; JSON."""

    @classmethod
    @abstractmethod
    def from_config_dict(cls, config: dict[str, Any]) -> Self:
        """Build from `config_dict()`, with random weights."""

    def sft_inputs(self, obs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Inputs of `sft_loss` from `obs` (see `envs.Obs`): tensors on the CPU, batch first, images as uint8.
        Off-policy learning stores them, as inputs of `sample_with_logprob` and of critics.

        Called once per micro-batch on rows of demonstrations, without reading weights. Random parts of the loss take
        their noise from `obs["noise_key"]`. Raises ValueError if `obs` does not fit, for example if an instruction is
        longer than the context.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be trained on demonstrations: it has no sft_inputs")

    def sft_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Imitation loss on demonstrations: a scalar with gradients, the mean over the batch's executed actions.

        `batch` has what `sft_inputs` returned, on the policy's device; `actions` float32 [B, C, D] in the environment's
        units; and `mask` bool [B, C], False after the end of the episode: those actions do not count. Sharded weights
        are gathered for this call as for `forward`.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be trained on demonstrations: it has no sft_loss")

    def sample_with_logprob(self, inputs: Mapping[str, Tensor], noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [B, C, D] in -1 to 1, which map onto the environment's bounds, with gradients, and log-probabilities
        [B, C, D] that sum up to that of the chunk: for off-policy learning.

        `inputs`: those of `sft_inputs`. `noise`: standard normal numbers [B, C, D], of which the actions are a smooth
        function; in mode `sampled` the policy acts in the same way.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be trained off-policy: it has no sample_with_logprob")

    def take_statistics(self, statistics: Mapping[str, Mapping[str, list[float]]]) -> None:
        """Normalise with the statistics of demonstrations instead of those that `from_config` took from the
        environment. Called before the first update, in actors and rollout workers. A policy that normalises nothing by
        statistics ignores it.

        `statistics` of `action`, and of `state` if the demonstrations have one: `min`, `max`, `mean`, `std`, `q01`,
        ..., `q99`, by dimension, in the environment's units; no range is 0. They must be part of `config_dict()`, so
        that checkpoints keep them.
        """

    def usual_ranges(self) -> dict[str, tuple[list[float], list[float]]]:
        """Low and high by dimension of `state` and `action`, from the statistics that this policy normalises by; empty
        without statistics. Demonstrations are compared with them when a trained policy learns from them."""
        return {}

    def fsdp_units(self) -> list[nn.Module]:
        """Modules that are sharded one by one, inner before outer; the policy itself is sharded last."""
        return []

    def value_parameters(self) -> list[nn.Parameter]:
        """Parameters that only the value uses; their learning rate is `actor.optim.value_lr`."""
        return []

    def save_pretrained(self, directory: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write `config.json` and `model.safetensors`. `state_dict`: the whole weights, if this module is sharded."""
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
        """Load what `save_pretrained` wrote. `model`, a run's section, may replace settings that weights leave open.

        `read_weights` False: a policy of the same size with random weights, for `--dry-run`. `config`: the result of
        `read_policy_config`, if the caller has it already. A subclass may lack these two parameters.

        Raises:
            CheckpointFormatError: listing tensors that are missing, unexpected or of the wrong shape.
        """
        directory = Path(directory)
        policy = cls.from_config_dict(dict(read_policy_config(directory) if config is None else config))
        if read_weights:
            policy.load_state_dict(policy.read_state(directory))
        return policy

    def read_state(self, directory: str | Path) -> dict[str, Tensor]:
        """The whole state dict that `save_pretrained` wrote to `directory`. This policy, which may be sharded, does not
        change.

        Raises:
            CheckpointFormatError: listing tensors that are missing, unexpected or of the wrong shape.
        """
        return read_weights_of(self, Path(directory))


def read_weights_of(module: nn.Module, directory: Path) -> dict[str, Tensor]:
    """The whole state dict of `module` in `directory`. Raises CheckpointFormatError, as `Policy.read_state`."""
    file = directory / "model.safetensors"
    if not file.is_file():
        raise CheckpointFormatError(f"{directory} has no {file.name}")
    tensors = read_tensors(file)
    check_tensors(module.state_dict(), tensors, str(directory))
    return tensors


def read_policy_config(directory: Path) -> dict[str, Any]:
    """The `policy_config` of a directory. Raises CheckpointFormatError if it is missing or is no JSON."""
    if (problem := why_no_policy(directory)) is not None:
        raise CheckpointFormatError(f"{directory}{problem}")
    try:
        return policy_config(directory)
    except ValueError as error:
        text = f"{directory / 'config.json'}, or our additions to it, cannot be read: {error}"
        raise CheckpointFormatError(text) from error


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    """Contents of the tokenizer files in a directory, by name; saved with a policy that had none of its own."""
    names = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")
    return {
        file.name: file.read_bytes()
        for file in sorted(directory.iterdir())
        if file.is_file() and (file.name in names or "tokenizer" in file.name)
    }


def check_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], source: str) -> None:
    """Compares names and shapes. Raises CheckpointFormatError listing every difference."""
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
    """The rows' noise keys; random ones if `obs` has none (interactive use)."""
    if NOISE_KEY in obs:
        return np.asarray(obs[NOISE_KEY], dtype=np.uint64)
    return torch.randint(0, 2**62, (num_rows,)).numpy().astype(np.uint64)
