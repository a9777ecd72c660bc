"""State dicts as safetensors files. The format has one name per tensor, so a tensor with several names (tied weights, a
shared module) is written once, and its other names are in the metadata, as safetensors' `load_model` expects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlinf_lite.file_modes import follow_umask


def tied_names(module: nn.Module) -> dict[str, str]:
    """The other names of tensors that a module's state dict has under several names; each maps to the first name."""
    first: dict[int, str] = {}
    state = module.state_dict(keep_vars=True)
    return {name: first[id(x)] for name, x in state.items() if first.setdefault(id(x), name) != name}


def write_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a state dict for `read_tensors`. Views that share a part of their memory become tensors of their own."""
    first: dict[object, str] = {}
    names: dict[str, str] = {}
    written: dict[str, Tensor] = {}
    memory: set[int] = set()
    resolved = {name: x.resolve_conj().resolve_neg() for name, x in tensors.items()}  # lazy views share their memory
    for name, tensor in resolved.items():
        same = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and first.setdefault(same, name) != name:
            names[name] = first[same]
            continue
        own = tensor.detach().cpu().contiguous()
        written[name] = own = own.clone() if own.untyped_storage().data_ptr() in memory else own
        memory.add(own.untyped_storage().data_ptr())
    save_file(written, file, metadata={**(metadata or {}), **names} or None)
    follow_umask([file])


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The state dict that `write_tensors` wrote, under all names; names of one tensor share its memory."""
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        names = opened.metadata() or {}
    names.pop("format", None)  # the framework's name, no tensor's; transformers writes it
    return {**{name: tensors[first] for name, first in names.items() if first in tensors}, **tensors}
