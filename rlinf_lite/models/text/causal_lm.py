"""Language models of transformers as policies of tokens, and as critics: log-probabilities, entropies and values.

Sequences are rows of `input_ids` [B, L] with `attention_mask` [B, L]. Prompts are padded on the left, so that the last
R columns hold the responses; positions count only the tokens that the mask marks. Directories have transformers' layout
and load with AutoModelForCausalLM (a critic's with AutoModelForTokenClassification). They are read from the local disk,
from safetensors, without remote code. Low-rank adapters are in the folder `adapter/` in peft's layout; the files above
it hold the weights without them.

Some families of transformers give wrong results from padded rows, or from the output layer alone;
`models.text.supported` compares a model with its own forward pass, and refuses these.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from rlinf_lite.file_modes import follow_umask
from rlinf_lite.models.base import CheckpointFormatError, check_tensors, read_policy_config
from rlinf_lite.models.layers import prepare_layers
from rlinf_lite.models.lora import (
    ADAPTER,
    ADAPTER_CONFIG,
    add_adapters,
    is_linear,
    lacks_adapters,
    merge_adapters,
)
from rlinf_lite.models.tensor_files import write_tensors
from rlinf_lite.models.training_options import TrainingOptions

_TOKENIZER = ("tokenizer*", "*.jinja", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json")
_CARRIED = (*_TOKENIZER, "generation_config.json", "LICENSE")
_LORA_KEY = "model.lora"
_PREFIX = "language_model."  # our state dicts have it before transformers' names, which files have
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_LORA_FIELDS = {
    *("r", "lora_alpha", "target_modules", "lora_dropout", "fan_in_fan_out"),
    *("task_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping", "peft_version"),
}
"""Fields of an adapter_config.json that are read, or that change no result without dropout."""
LOGITS_PER_CHUNK = 2**26
"""Largest count of logits in memory at once (float32: 256 MiB); for larger batches they are computed in parts, and
again in the backward pass."""


class SequenceShapeError(ValueError):
    """The shapes of ids and mask, or the response length, do not fit together."""


class UnsupportedModelError(ValueError):
    """A model for which our forward pass or generation does not give the results of its own forward pass."""


@dataclass
class TokenOutput:
    """Scores of R response tokens per row, float32, in nats: `logprobs` [B, R] and `entropy` [B, R]."""

    logprobs: Tensor
    entropy: Tensor


class LanguageModel(nn.Module):
    """Base of policy and critic: a transformers model as `language_model`, loaded from and saved to a directory.

    Dropout, and noise in the choice of experts, are off in training mode too. With them, two passes over a response
    would differ, and the first ratio would not be 1.
    """

    lora: dict[str, Any]
    """Options of the adapters: `rank`, `alpha` and `targets`; empty: there are none."""
    compiles_layers = False  # as in `Policy`

    _auto: ClassVar[Any]
    _may_lack: ClassVar[tuple[str, ...]] = ()
    """Beginnings of tensor names that a file may lack; these tensors are random then."""
    _may_ignore: ClassVar[tuple[str, ...]] = ()
    """Beginnings of tensor names in a file that are not read."""
    _settings: ClassVar[dict[str, Any]] = {}
    """Config entries of this class, which replace those of the directory."""

    def __init__(self, language_model: PreTrainedModel, files: Mapping[str, bytes] | None = None) -> None:
        """`files`: tokenizer files by name, which are saved with the weights."""
        super().__init__()
        self.language_model = language_model.eval()
        self.files, self.lora = dict(files or {}), {}

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.language_model.eval()
        return self

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        tokenizer_dir: str | Path | None = None,
        attn_implementation: str = "sdpa",
    ) -> Self:
        """Build from the content of a `config.json` (see `text.presets.preset`), with random weights.

        `tokenizer_dir`: a directory whose tokenizer files `save_pretrained` writes with the weights.
        """
        arguments = dict(config) | cls._settings
        built = AutoConfig.for_model(arguments.pop("model_type"), **arguments)
        model = cls._auto.from_config(built, attn_implementation=attn_implementation, dtype=torch.float32)
        return cls(model, {} if tokenizer_dir is None else _carried_files(Path(tokenizer_dir)))

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, attn_implementation: str = "sdpa", dtype: torch.dtype = torch.float32
    ) -> Self:
        """Load a directory in the published layout: config.json, safetensors in one file or in shards, tokenizer files.

        Raises:
            CheckpointFormatError: if files are missing or damaged, or listing tensors that are missing, unexpected or
                of the wrong shape.
        """
        directory, settings = Path(directory), {"attn_implementation": attn_implementation, **cls._settings}
        read = read_pretrained(cls._auto, directory, dtype, cls._may_lack, cls._may_ignore, **settings)
        model = cls(read, _carried_files(directory))
        if (directory / ADAPTER).is_dir():
            model._read_adapters(directory / ADAPTER)
        return model

    def take_tokenizer(self, directory: Path) -> None:
        """Replace the tokenizer that `save_pretrained` writes by that of `directory`."""
        others = {name: x for name, x in self.files.items() if not any(fnmatch(name, one) for one in _TOKENIZER)}
        self.files = others | _carried_files(directory, _TOKENIZER)

    def save_pretrained(self, directory: str | Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write what `from_pretrained` reads. `state_dict`: the whole weights, if this module is sharded."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (directory / name).write_bytes(content)
        state = self.state_dict() if state_dict is None else state_dict
        tensors = {name.removeprefix(_PREFIX): x.detach().cpu().contiguous() for name, x in state.items()}
        for name, x in tensors.items():  # tensors gathered from shards may be views of padded ones
            tensors[name] = x if x.untyped_storage().nbytes() == x.nbytes else x.clone()
        (directory / "config.json").unlink(missing_ok=True)  # without it, a partly written directory does not load
        shutil.rmtree(directory / ADAPTER, ignore_errors=True)
        if self.lora:
            self._write_adapters(directory / ADAPTER, tensors)
            tensors = {name.replace(".base_layer.", "."): x for name, x in tensors.items() if ".lora_" not in name}
        config = self.language_model.config
        if config.tie_word_embeddings:
            for name in self.language_model._tied_weights_keys or ():
                tensors.pop(name, None)
        config.architectures = [type(self.language_model).__name__]
        config.dtype = next(iter(tensors.values())).dtype
        save_torch_state_dict(tensors, directory, metadata={"format": "pt"})
        follow_umask(directory.glob("*.safetensors"))
        config.save_pretrained(directory)

    def read_state(self, directory: str | Path) -> dict[str, Tensor]:
        """The whole state dict of a directory, to load into a sharded model. Raises as `from_pretrained`."""
        return type(self).from_pretrained(directory).state_dict()

    def add_adapters(self, lora: Mapping[str, Any]) -> None:
        """Put adapters of `rank`, `alpha` (None: rank) and `targets` into the model, unless its directory had the same
        ones. Then only adapters train. New adapters do not change the model's results until they are trained.

        Raises ValueError if the model has other adapters, and for targets that do not exist.
        """
        own = self.language_model
        output = own.get_output_embeddings()
        linears = {name: module for name, module in own.named_modules() if is_linear(module)}
        targets = lora["targets"]
        if targets == "all-linear":
            every = {name.rpartition(".")[2] for name, module in linears.items() if module is not output}
            targets = self.lora.get("targets", every)
        alpha = lora["alpha"] or lora["rank"]
        wanted = {"rank": lora["rank"], "alpha": alpha, "targets": sorted(set(targets))}
        if not lacks_adapters(self.lora, wanted, type(self).__name__, _LORA_KEY):
            return
        expected = {name for name in linears if name.rpartition(".")[2] in wanted["targets"]}
        tied = own.config.get_text_config().tie_word_embeddings
        if tied and any(linears[name] is output for name in expected):
            raise ValueError(f"{_LORA_KEY}.targets: the output layer shares the embedding's weights. Leave it out")
        add_adapters(own, wanted, key=_LORA_KEY, may_lack=())
        found = {name.partition(".lora_A.")[0] for name, _ in own.named_parameters() if ".lora_A." in name}
        if found != expected:
            at = ", ".join(sorted(found ^ expected)[:3])
            raise UnsupportedModelError(
                f"{_LORA_KEY}: peft has adapters of another kind for models of type {own.config.model_type!r} "
                f"(at {at}). Name attention's layers in {_LORA_KEY}.targets"
            )
        self.lora = wanted

    def merge_adapters(self) -> Self:
        """Merge the adapters into the weights and remove them; then all weights train. Returns the model."""
        merge_adapters(self.language_model)
        self.lora = {}
        return self

    def _write_adapters(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        from peft import LoraConfig

        rank, alpha, targets = (self.lora[name] for name in ("rank", "alpha", "targets"))
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
        config.save_pretrained(str(directory))
        adapters = {_adapter_name(name): x for name, x in tensors.items() if ".lora_" in name}
        write_tensors(adapters, directory / _ADAPTER_WEIGHTS, {"format": "pt"})

    def _read_adapters(self, directory: Path) -> None:
        """Add the adapters in `directory` to the model. Raises CheckpointFormatError."""
        ignored = tuple(_adapter_name(name) for name in self._may_ignore)
        try:
            lora = saved_adapters(directory)
            lora["targets"] = [name for name in lora["targets"] if f"{name}." not in self._may_ignore]
            found = load_file(directory / _ADAPTER_WEIGHTS)
            if lora["targets"]:
                self.add_adapters(lora)
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointFormatError(f"{directory} cannot be read: {type(error).__name__}: {error}") from error
        found = {name: x for name, x in found.items() if not (ignored and name.startswith(ignored))}
        own = {_adapter_name(name): x for name, x in self.language_model.named_parameters() if ".lora_" in name}
        check_tensors(own, found, str(directory))
        with torch.no_grad():
            for name, x in own.items():
                x.copy_(found[name])

    def prepare(self, options: TrainingOptions) -> None:
        """Have the layers train as `options` say; call before sharding. Raises UnsupportedModelError if the model's
        family does not name its layers."""
        for key, value, off in (
            ("gradient_checkpointing", options.gradient_checkpointing, "none"),
            ("compile", options.compile, False),
        ):
            if value != off and not self.fsdp_units():
                kind = self.language_model.config.model_type
                raise UnsupportedModelError(
                    f"model.{key}: models of type {kind!r} do not name their layers. Set it to {str(off).lower()}"
                )
        prepare_layers(self, options)

    def fsdp_units(self) -> list[nn.Module]:
        """The decoder layers, which are sharded one by one, before the model itself."""
        units = set(self.language_model._no_split_modules or ())
        return [module for module in self.language_model.modules() if type(module).__name__ in units]

    def _response_states(self, input_ids: Tensor, attention_mask: Tensor, response_length: int) -> Tensor:
        """The final states [B, R, width] from which the response tokens are predicted, one position before each."""
        length = input_ids.shape[1]
        if not 0 < response_length < length:
            raise SequenceShapeError(
                f"response_length is {response_length} of {length} columns: it has to be at least 1, and leave at "
                "least one column for the prompt"
            )
        if input_ids.shape != attention_mask.shape:
            raise SequenceShapeError(
                f"input_ids are {list(input_ids.shape)} and attention_mask is {list(attention_mask.shape)}; one entry "
                "per token is needed"
            )
        positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        output = self.language_model.base_model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False
        )
        states: Tensor = output.last_hidden_state[:, length - response_length - 1 : -1]
        return states


class CausalLM(LanguageModel):
    """A policy whose actions are tokens: any model of AutoModelForCausalLM."""

    _auto = AutoModelForCausalLM

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, response_length: int, temperature: float = 1.0
    ) -> TokenOutput:
        """Score the last `response_length` tokens of [B, L] rows under the distribution at `temperature`.

        Logits are computed for those tokens only, at most `LOGITS_PER_CHUNK` at a time. Entries of padding have no
        meaning. Raises SequenceShapeError.
        """
        states = self._response_states(input_ids, attention_mask, response_length).flatten(0, 1)
        shape, tokens = (len(input_ids), response_length), input_ids[:, -response_length:].flatten()
        num_rows = max(LOGITS_PER_CHUNK // self.language_model.get_output_embeddings().weight.shape[0], 1)
        if len(tokens) <= num_rows:
            logprobs, entropy = _score(self.logits, states, tokens, temperature)
        else:
            chunks = [
                checkpoint(_score, self.logits, *rows, temperature, use_reentrant=False)
                for rows in zip(states.split(num_rows), tokens.split(num_rows), strict=True)
            ]
            logprobs, entropy = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        return TokenOutput(logprobs.view(shape).clone(), entropy.view(shape).clone())  # FSDP hooks views

    def logits(self, states: Tensor) -> Tensor:
        """Logits of the next token, float32 [..., V], from final states [..., width], scaled and capped as in the
        model's own forward pass."""
        config = self.language_model.config.get_text_config()
        scale, cap = logits_scale(config), logits_cap(config)
        logits: Tensor = self.language_model.get_output_embeddings()(states).float()
        if scale != 1.0:
            logits = logits * scale
        return logits if cap is None else cap * torch.tanh(logits / cap)


class CausalValueModel(LanguageModel):
    """A critic: a language model with one linear output per token instead of the vocabulary's logits.

    It is loaded from a critic's directory, or from a policy's; then its output layer is random.
    """

    _auto = AutoModelForTokenClassification
    _may_lack = ("score.", "classifier.")
    _may_ignore = ("lm_head.", "embed_out.")
    _settings = {"num_labels": 1}

    def forward(self, input_ids: Tensor, attention_mask: Tensor, response_length: int) -> Tensor:
        """Values float32 [B, R] of the states before each of the last R tokens. Raises SequenceShapeError."""
        states = self._response_states(input_ids, attention_mask, response_length)
        values: Tensor = self._score_layer()(states)
        return values.squeeze(-1).float().clone()  # FSDP hooks views

    def value_parameters(self) -> list[nn.Parameter]:
        """The parameters of the output layer."""
        return list(self._score_layer().parameters())

    def _score_layer(self) -> nn.Module:
        name = "score" if hasattr(self.language_model, "score") else "classifier"
        return self.language_model.get_submodule(name)


def read_pretrained(
    auto: Any,
    directory: Path,
    dtype: torch.dtype,
    may_lack: tuple[str, ...] = (),
    may_ignore: tuple[str, ...] = (),
    **settings: Any,
) -> PreTrainedModel:
    """Load a directory with `auto`, a class such as AutoModelForCausalLM, from safetensors on the local disk, without
    remote code. `may_lack`, `may_ignore`: beginnings of names as in `LanguageModel`. `settings` are passed to `auto`.
    Raises CheckpointFormatError."""
    read_policy_config(directory)  # transformers would look for a missing directory on the hub
    transformers.logging.set_verbosity_error()  # the error below lists the same
    transformers.logging.disable_progress_bar()
    try:
        model, found = auto.from_pretrained(
            str(directory),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=dtype,
            ignore_mismatched_sizes=True,  # they are listed below, with the others
            output_loading_info=True,
            **settings,
        )
    except (OSError, ValueError) as error:
        raise CheckpointFormatError(f"{directory} cannot be loaded by {auto.__name__}: {error}") from error
    problems = [f"missing {name}" for name in found["missing_keys"] if not name.startswith(may_lack)]
    problems += [f"unexpected {name}" for name in found["unexpected_keys"] if not name.startswith(may_ignore)]
    problems += [
        f"{name} has shape {tuple(read)}, the config needs {tuple(needed)}"
        for name, read, needed in found["mismatched_keys"]
    ]
    if problems:
        raise CheckpointFormatError(f"{directory} does not fit its config.json: " + "; ".join(sorted(problems)))
    own: PreTrainedModel = model
    return own


def logits_scale(config: PreTrainedConfig) -> float:
    """The factor by which a family multiplies the output layer's results; 1 if it has none."""
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # cohere
    scale *= getattr(config, "lm_head_multiplier", 1.0)  # falcon_h1
    scale /= getattr(config, "logits_mup_width_multiplier", 1.0)  # inkling
    scaling = getattr(config, "logits_scaling", 1.0)
    return scale * scaling if config.model_type == "hyperclovax" else scale / scaling  # granite, minicpm3


def logits_cap(config: PreTrainedConfig) -> float | None:
    """The limit of a family's logits, which tanh applies (gemma2, recurrent_gemma); None: no limit."""
    cap: float | None = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    return cap


def _score(
    to_logits: Callable[[Tensor], Tensor], states: Tensor, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [N] of `tokens` [N] that follow from `states` [N, width]."""
    logits = to_logits(states)
    if temperature != 1.0:
        logits = logits / temperature
    log_distribution = torch.log_softmax(logits, dim=-1)
    entropy = -(log_distribution.exp() * log_distribution).sum(-1)
    return log_distribution.gather(-1, tokens[:, None]).squeeze(-1), entropy


def saved_adapters(directory: Path) -> dict[str, Any]:
    """`rank`, `alpha` and `targets` of adapters that peft wrote. Raises ValueError unless they are plain LoRA of named
    layers, and OSError if there are none."""
    from peft import LoraConfig

    said, usual = json.loads((directory / ADAPTER_CONFIG).read_text()), LoraConfig().to_dict()
    if said.get("init_lora_weights") in (True, False, "gaussian"):  # others change the base weights
        said.pop("init_lora_weights")
    other = [name for name, x in said.items() if x and name not in _LORA_FIELDS and x != usual.get(name)]
    if other or not isinstance(said.get("target_modules"), list):
        text = f"only plain LoRA of named layers is supported, and this has {', '.join(other) or 'other targets'}"
        raise ValueError(text)
    return {"rank": said["r"], "alpha": said["lora_alpha"], "targets": said["target_modules"]}


def _adapter_name(name: str) -> str:
    """peft's name of a model's parameter."""
    return "base_model.model." + name.replace(".default.", ".")


def _carried_files(directory: Path, patterns: Iterable[str] = _CARRIED) -> dict[str, bytes]:
    files = [file for pattern in patterns for file in directory.glob(pattern)]
    return {file.name: file.read_bytes() for file in files if file.is_file()}
