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
    """The class that `model.id` names, itself or by its card.

    Raises:
        UnknownPolicyError: with the nearest registered name, or what is no policy.
        PartImportError: where its module cannot be imported.
    """
    cls = policy_part(policy_id)
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise UnknownPolicyError(f"{policy_id} is {cls!r}, not a subclass of rlinf_lite.models.Policy", "model.id")
    cls.policy_id = policy_id
    return cls


def build_policy(cfg: Config, spec: EnvSpec, read_weights: bool = True) -> Policy:
    """The policy of a run: weights from `actor.checkpoint_load_path` or `rollout.model_dir` where set, else random.

    A policy class provides `from_config(model_cfg, env_spec)`. Random weights follow torch's global seed.
    `read_weights` False: as large as that policy, with weights at random.

    Raises:
        ValueError: where a loaded policy does not fit the environment or `model.num_action_chunks`.
    """
    directory = start_dir(cfg)
    if directory is None:
        policy = policy_class(cfg.model.id).from_config(cfg.model, spec)
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
    """The policy in `directory`: one that `save_pretrained` wrote, or a published one that a registered policy knows;
    of a checkpoint, or of a run the last one.

    `model`, a run's section, replaces settings that the weights leave open. A warning says where the policy was trained
    with others, and what its files leave open. `read_weights`: as in `build_policy`.
    `tokenizer`: a directory that has one, where that of the policy has none.

    Raises:
        CheckpointFormatError: where there is none, or a language model, which transformers loads.
        CheckpointError: where files of a checkpoint are not what was written.
        ValueError: where the policy reads no tokenizer that is given.
    """
    directory = policy_directory(directory)
    for place in (directory, directory.resolve()):  # it may be `.`, or a link, from or to elsewhere
        if read_weights and place.name == "policy" and is_whole(place.parent):
            verify(place.parent, "policy/")
    policy = _load(directory, model, read_weights, tokenizer)
    for line in policy_card(policy.policy_id).notes(directory, model):
        log.warning(line)
    return policy


def _load(directory: str | Path, model: ModelConfig | None, read_weights: bool, tokenizer: str | Path | None) -> Policy:
    """The policy in a directory; without the lines of `PolicyCard.notes`, which a run prints once for all workers."""
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
    """Whether a `config.json` is that of what transformers' AutoModelForCausalLM loads, and of no policy."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    return "policy_id" not in config and any(name in KNOWN.values() for name in config.get("architectures") or ())


def _recognised(directory: Path, config: dict[str, Any]) -> str | None:
    """The registered policy whose published checkpoint this is; None: it is of none of them."""
    return next((name for name in POLICIES.names() if policy_card(name).recognises(directory, config)), None)
