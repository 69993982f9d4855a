"""Signatures of computations: losses and models with equal signatures are the same computation on different tensors.

Signatures are hashable. In doubt they differ, and the clients are computed unbatched, which is always correct.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any, cast

import torch
from torch import nn

from raydfl.core.settings import Settings
from raydfl.core.users_code import is_users

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_UNCHANGING = (type, types.ModuleType, types.BuiltinFunctionType, enum.Enum, torch.dtype, torch.device)


_KINDS: dict[tuple[int, int], tuple[Any, Hashable]] = {}
"""Cache of :func:`kind` by the ids of a method's function and object. It holds the loss, so that the ids stay unique."""
_LARGEST_CACHE = 100


def identity(value: Any) -> Hashable:
    """Return a signature of a value within this process.

    It is equal for equal plain values, for containers of them, and for functions with equal code and equal captured values. A
    mutable object (above all a tensor) equals only itself.
    """
    return _describe(value, id, {})


def kind(loss: Callable[..., Any]) -> Hashable:
    """Return a signature of a loss for caches: its code, and its captured plain values and functions.

    Mutable captured objects are represented by their type, so that the signature is valid beyond their lifetime.
    """
    if not isinstance(loss, types.MethodType) or is_users(type(loss.__self__).__module__):
        return _describe(loss, _describe_type, {})
    # raydfl's own methods are frozen: describing all their fields for each client would take longer than a step.
    ids = id(loss.__func__), id(loss.__self__)
    if ids not in _KINDS:
        if len(_KINDS) >= _LARGEST_CACHE:
            _KINDS.clear()
        _KINDS[ids] = loss, _describe(loss, _describe_type, {})
    return _KINDS[ids][1]


def _describe_type(value: Any) -> Hashable:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return (name, repr(value)) if dataclasses.is_dataclass(value) else name


def _describe(value: Any, describe_mutable: Callable[[Any], Hashable], seen: dict[int, int]) -> Hashable:
    """Return a hashable description of a value.

    Args:
        value: any object.
        describe_mutable: gives the description of a mutable object.
        seen: numbers of the visited functions and objects by ``id``, because some contain themselves.
    """

    def describe(part: Any) -> Hashable:
        return _describe(part, describe_mutable, seen)

    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, (type, types.ModuleType)):
        return (types.BuiltinMethodType, value.__name__, describe(value.__self__))  # ``append`` of a list
    if isinstance(value, _UNCHANGING):
        return cast(Hashable, value)
    if isinstance(value, (list, tuple)):
        return (type(value), *map(describe, value))
    if isinstance(value, dict):
        return (dict, *[(describe(key), describe(item)) for key, item in value.items()])
    if isinstance(value, functools.partial):
        return (functools.partial, *map(describe, (value.func, value.args, value.keywords)))
    if isinstance(value, types.MethodType):
        return (types.MethodType, describe(value.__func__), describe(value.__self__))
    if id(value) in seen:
        return ("seen", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, types.FunctionType):
        parts = [*_list_captured(value), value.__defaults__, value.__kwdefaults__, value.__dict__]
        return (value.__code__, id(value.__globals__), *map(describe, parts))
    if isinstance(value, Settings):
        return (type(value), describe(vars(value)))
    if dataclasses.is_dataclass(value) and getattr(type(value), "__dataclass_params__").frozen:  # noqa: B009
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return (type(value), describe({**fields, **getattr(value, "__dict__", {})}))
    return describe_mutable(value)


def _list_captured(function: types.FunctionType) -> list[Any]:
    """List the captured variables of a function."""
    contents = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:  # an unassigned variable
            contents.append(None)
    return contents


def architecture(models: Mapping[str, nn.Module]) -> Hashable:
    """Return a signature of models: names, classes, plain attributes, and the shapes of parameters and buffers."""
    return tuple(
        (name, *(_describe_layer(path, layer) for path, layer in model.named_modules()))
        for name, model in models.items()
    )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


_RECURRENT = {"_flat_weights", "_flat_weights_names", "_flat_weight_refs", "_all_weights"}
_TORCHS_OWN = {*vars(nn.Module()), *_RECURRENT}
"""Attributes computed from a layer's class, options, parameters and buffers."""


def _describe_layer(path: str, layer: nn.Module) -> Hashable:
    content = vars(layer)
    attributes = ((name, identity(value)) for name, value in content.items() if name not in _TORCHS_OWN)
    # A hook is a user's code and may hold references to this client's tensors.
    hooked = id(layer) if any(content[hooks] for hooks in _HOOKS) else None
    tensors = (
        (name, None if t is None else (t.shape, t.dtype, t.requires_grad))
        for group in (layer._parameters, layer._buffers)
        for name, t in group.items()
    )
    return (path, cast(Hashable, type(layer)), hooked, *attributes, *tensors)
