"""Copies of a module for passes at the same time: its tensors are shared, everything else is the copy's own.

A module is taken apart as pickle does it, all that it refers to included, whichever way: layers in a list, a dict that
two modules read and write, methods, callable objects. Tensors, classes, functions and tokenizers are not gone into:
they are numbered, and a copy is put together with the same ones, or with others in their place.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from enum import Enum
from functools import _lru_cache_wrapper
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_HOOKS = {name for name, x in vars(nn.Module()).items() if type(x) is OrderedDict}
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, type, ModuleType, Enum, torch.dtype, torch.device)


class CopyError(ValueError):
    """Something that a module refers to would be the same for its copies, or cannot be copied."""


class Parts:
    """What `module` is made of now. Raises CopyError. `to_look`: nobody makes a twin of it, so that what a module was
    compiled to, which cannot be copied, is left out."""

    def __init__(self, module: nn.Module, to_look: bool = False) -> None:
        stream = io.BytesIO()
        pickler = _Pickler(stream, to_look)
        try:
            pickler.dump(module)
        except CopyError:
            raise
        except Exception as error:  # whatever a class of the module's author says to being pickled
            raise CopyError(f"{type(module).__name__} cannot be copied: {error}") from error
        self.structure = stream.getvalue()
        """All that is no tensor: two modules that differ in a number of theirs differ here."""
        self.whole: list[Any] = pickler.whole
        """What the structure has numbers for."""
        self.arrays: list[np.ndarray] = pickler.arrays
        """NumPy's, which the structure has copies of."""

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters, buffers, and whatever else there is, in an order that the structure gives."""
        return [part for part in self.whole if isinstance(part, Tensor)]

    def twin(self) -> nn.Module:
        """A copy with the same tensors; parameters have the same values, yet gradients of their own. Raises
        CopyError."""
        own = [_of_its_own(part) if isinstance(part, nn.Parameter) else part for part in self.whole]
        try:
            twin: nn.Module = _Unpickler(self.structure, own).load()
        except Exception as error:  # as above, to being put together again
            raise CopyError(f"what it refers to cannot be copied: {type(error).__name__}: {error}") from error
        return twin


def check_copies(module: nn.Module) -> None:
    """Raise CopyError where passes of a copy would not be passes of the module's, each with gradients of its own."""
    made_of = Parts(module)
    made_of.twin()
    parameters = {id(parameter) for parameter in module.parameters()}
    for tensor in made_of.tensors:
        if tensor.requires_grad and id(tensor) not in parameters:
            raise CopyError(
                f"a tensor {list(tensor.shape)} that is no parameter has gradients, which copies would share"
            )


def _of_its_own(parameter: nn.Parameter) -> nn.Parameter:
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise CopyError("a parameter has hooks, which its copy would not have")
    own = nn.Parameter(parameter.detach(), parameter.requires_grad)
    vars(own).update(vars(parameter))
    return own


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, to_look: bool) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._to_look = to_look
        self.whole: list[Any] = []
        self.arrays: list[np.ndarray] = []

    def reducer_override(self, part: Any) -> Any:
        """How to make `part`, which is asked once of each thing that is no number, text or plain container."""
        if isinstance(part, nn.Module):  # as it is, whatever its class thinks of being saved
            full = {name: x for name, x in vars(part).items() if name not in _HOOKS or x}
            hooks = [name for name in vars(part) if name not in full]  # a dozen in each module, and slow to pickle
            if self._to_look:
                full.pop("_compiled_call_impl", None)
            return _new, (type(part),), (full, hooks), None, None, _fill
        if isinstance(part, MethodType):  # the function may have another name in its class, or none
            return MethodType, (part.__func__, part.__self__)
        if isinstance(part, FunctionType | _lru_cache_wrapper):
            if part is _numbered:
                return NotImplemented
            if not _keeps_nothing(part):
                raise CopyError(f"what {getattr(part, '__qualname__', part)} keeps would be the same for all copies")
        elif isinstance(part, BuiltinFunctionType):
            if not isinstance(part.__self__, ModuleType | type(None)):
                return NotImplemented
        elif isinstance(part, np.ndarray):
            self.arrays.append(part)
            return NotImplemented
        elif type(part).__module__ != "tokenizers" and not isinstance(part, Tensor | type | ModuleType):
            return NotImplemented  # a tokenizer is read by any number of threads, and takes long to copy
        self.whole.append(part)
        return _numbered, (len(self.whole) - 1,)


class _Unpickler(pickle.Unpickler):
    def __init__(self, structure: bytes, whole: list[Any]) -> None:
        super().__init__(io.BytesIO(structure))
        self._whole = whole

    def find_class(self, module: str, name: str) -> Any:
        is_number = (module, name) == (__name__, _numbered.__name__)
        return self._whole.__getitem__ if is_number else super().find_class(module, name)


def _numbered(number: int) -> Any:
    """Stands in a structure for what finds the whole of that number."""


def _new(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _fill(module: nn.Module, attributes: tuple[dict[str, Any], list[str]]) -> None:
    full, hooks = attributes
    vars(module).update(full, **{name: OrderedDict() for name in hooks})


def _keeps_nothing(function: Any, outer: tuple[Any, ...] = ()) -> bool:
    """Whether nothing that can change is in its closure or its defaults."""
    if not isinstance(function, FunctionType):
        return False
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]  # not those without any
    kept = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return all(_is_constant(value, (*outer, function)) for value in kept)


def _is_constant(value: Any, outer: tuple[Any, ...]) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(_is_constant(item, outer) for item in value)
    if isinstance(value, FunctionType):
        return any(value is function for function in outer) or _keeps_nothing(value, outer)
    if isinstance(value, BuiltinFunctionType):
        return isinstance(value.__self__, ModuleType | type(None))
    return isinstance(value, _CONSTANTS)
