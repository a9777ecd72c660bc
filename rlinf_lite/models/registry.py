"""Policies by name: `@register_policy("name")`, or `model.id: pkg.module:Class`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_lite.checksums import is_whole, verify
from rlinf_lite.config.resources import policy_directory, start_dir, start_key
from rlinf_lite.dimensions import counted, names_in, own_names, policy_misfits
from rlinf_lite.models.base import CheckpointFormatError, Policy, read_policy_config
from rlinf_lite.models.lora import ADAPTER
from rlinf_lite.registry import POLICIES, policy_card, policy_part
from rlinf_lite.registry import UnknownPolicyError as UnknownPolicyError

if TYPE_CHECKING:
    from rlinf_lite.config import Config
    from rlinf_lite.config.schema import ModelConfig
    from rlinf_lite.envs import EnvSpec

log = logging.getLogger(__name__)


def register_policy(name: str) -> Callable[[type[Policy]], type[Policy]]:
    """Class decorator: makes a Policy available as `model.id: name`."""

    def register(cls: type[Policy]) -> type[Policy]:
        cls.policy_id = name
        return POLICIES.register(name)(cls)

    return register


def policy_class(policy_id: str) -> type[Policy]:
    """The policy class that `model.id` names: a registered name, or `pkg.module:Class`.

    Raises:
        UnknownPolicyError: if no policy has that name (with the nearest one), or the class is no policy.
        PartImportError: if its module cannot be imported.
    """
    cls = policy_part(policy_id)
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise UnknownPolicyError(f"{policy_id} is {cls!r}, not a subclass of rlinf_lite.models.Policy", "model.id")
    cls.policy_id = policy_id
    return cls


def build_policy(cfg: Config, spec: EnvSpec, read_weights: bool = True) -> Policy:
    """The policy of a run: weights from `actor.checkpoint_load_path` or `rollout.model_dir` if one is set, else random.

    Random weights depend on torch's global seed. `read_weights` False: the same architecture with random weights.

    Raises:
        ValueError: if a loaded policy does not fit the environment or `model.num_action_chunks`.
    """
    directory = start_dir(cfg)
    if directory is None:
        build = policy_class(cfg.model.id).from_config
        reads_others = not read_weights and "read_weights" in inspect.signature(build).parameters
        policy = build(cfg.model, spec, **({"read_weights": False} if reads_others else {}))
        policy.take_names(own_names(spec))
        return policy
    policy = _load(directory, cfg.model, read_weights, cfg.actor.tokenizer.tokenizer_model)
    wanted = {"num_action_chunks": cfg.model.num_action_chunks, "action_dim": spec.action_dim}
    for name, value in wanted.items():
        if getattr(policy, name) != value:
            raise ValueError(f"{directory}: its {name} is {getattr(policy, name)}, this run needs {value}")
    policy.check_env_spec(spec)
    for problem in policy_misfits(start_key(cfg), directory, spec):
        raise ValueError(f"{problem}")
    trained, shown = names_in(directory), own_names(spec)
    policy.take_names(trained | {name: x for name, x in shown.items() if name not in trained or not counted(x)})
    return policy


def load_policy(
    directory: str | Path,
    model: ModelConfig | None = None,
    read_weights: bool = True,
    tokenizer: str | Path | None = None,
) -> Policy:
    """Load the policy in `directory`: one that `save_pretrained` wrote, or a published one that a registered policy
    recognises. A checkpoint's directory gives its policy, a run's directory that of its last checkpoint.

    `model`, a run's section, replaces settings that the weights leave open. A warning names settings that differ from
    training, or that the files leave open. `read_weights`: as in `build_policy`. `tokenizer`: a directory with a
    tokenizer, used if the policy's own has none.

    Raises:
        CheckpointFormatError: if there is no policy, or a language model, which transformers loads.
        CheckpointError: if files of a checkpoint are damaged.
        ValueError: if `tokenizer` is given for a policy that reads none.
    """
    directory = policy_directory(directory)
    for place in (directory, directory.resolve()):  # the directory may be `.` or a link
        if read_weights and place.name == "policy" and is_whole(place.parent):
            verify(place.parent, "policy/")
    policy = _load(directory, model, read_weights, tokenizer)
    for line in policy_card(policy.policy_id).notes(directory, model):
        log.warning(line)
    return policy


def _load(directory: str | Path, model: ModelConfig | None, read_weights: bool, tokenizer: str | Path | None) -> Policy:
    """As `load_policy`, without the lines of `PolicyCard.notes`, which a run prints once for all workers."""
    directory = policy_directory(directory)
    config = read_policy_config(directory)
    policy_id = config.get("policy_id") or _recognised(directory, config)
    if policy_id is None and is_language_model(config):
        how = f"AutoModelForCausalLM.from_pretrained({str(directory)!r})"
        if (adapters := directory / ADAPTER).is_dir():
            how += f", and peft its adapters: PeftModel.from_pretrained(model, {str(adapters)!r})"
        raise CheckpointFormatError(f"{directory} is a language model, which transformers loads: {how}")
    policy_id = policy_id or config.get("model_type")
    if policy_id is None:
        raise CheckpointFormatError(
            f"{directory}: config.json has neither policy_id nor model_type, and no registered policy knows the tensors"
        )
    load, options = policy_class(policy_id).from_pretrained, dict[str, Any]()
    accepted = inspect.signature(load).parameters
    if not read_weights:
        options["read_weights"] = False
    if "config" in accepted:
        options["config"] = config
    if tokenizer is not None:
        if "tokenizer" not in accepted:
            raise ValueError(f"actor.tokenizer.tokenizer_model: {policy_id} reads no tokenizer. Set it to null")
        options["tokenizer"] = policy_directory(tokenizer)
    return load(directory, model, **options)


def is_language_model(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` belongs to a language model (AutoModelForCausalLM of transformers), not to a policy."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    return "policy_id" not in config and any(name in KNOWN.values() for name in config.get("architectures") or ())


def _recognised(directory: Path, config: dict[str, Any]) -> str | None:
    """Name of the registered policy whose published checkpoint this is; None: no policy recognises it."""
    return next((name for name in POLICIES.names() if policy_card(name).recognises(directory, config)), None)
