"""Signatures of computations: two clients' losses and models with equal ones are the same computation on different tensors.

Each function gives something hashable; equal results mean alike. In doubt the results differ: then clients are computed one
after another, which is never wrong.
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
"""Findings of :func:`kind` about methods' losses, by the ids of function and method; and the loss, which keeps these ids."""
_MOST = 100


def identity(value: Any) -> Hashable:
    """Equal for equal plain values, for containers of them, and for functions of equal code over equal captured values.

    Everything that can be changed (a tensor above all) is equal to itself only.
    """
    return _looks(value, id, {})


def kind(loss: Callable[..., Any]) -> Hashable:
    """Return what a loss is: its code and the plain values and functions that it captured.

    Of other captured objects it holds the type only, so it outlives them, and what was found out about a loss is remembered.
    """
    if not isinstance(loss, types.MethodType) or is_users(type(loss.__self__).__module__):
        return _looks(loss, _sort, {})
    # raydfl's own methods are frozen: to look at all their fields for each client would take longer than a step.
    place = id(loss.__func__), id(loss.__self__)
    if place not in _KINDS:
        if len(_KINDS) >= _MOST:
            _KINDS.clear()
        _KINDS[place] = loss, _looks(loss, _sort, {})
    return _KINDS[place][1]


def _sort(value: Any) -> Hashable:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return (name, repr(value)) if dataclasses.is_dataclass(value) else name


def _looks(value: Any, of_others: Callable[[Any], Hashable], seen: dict[int, int]) -> Hashable:
    """Return what a value looks like, as something hashable.

    Args:
        value: anything.
        of_others: what stands for an object that can be changed.
        seen: the functions and objects that stand before this value or around it, ``id`` to their number: some refer to themselves.
    """

    def looks(part: Any) -> Hashable:
        return _looks(part, of_others, seen)

    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, (type, types.ModuleType)):
        return (types.BuiltinMethodType, value.__name__, looks(value.__self__))  # ``append`` of a list
    if isinstance(value, _UNCHANGING):
        return cast(Hashable, value)
    if isinstance(value, (list, tuple)):
        return (type(value), *map(looks, value))
    if isinstance(value, dict):
        return (dict, *[(looks(key), looks(item)) for key, item in value.items()])
    if isinstance(value, functools.partial):
        return (functools.partial, *map(looks, (value.func, value.args, value.keywords)))
    if isinstance(value, types.MethodType):
        return (types.MethodType, looks(value.__func__), looks(value.__self__))
    if id(value) in seen:
        return ("seen", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, types.FunctionType):
        held = [*_cells(value), value.__defaults__, value.__kwdefaults__, value.__dict__]
        return (value.__code__, id(value.__globals__), *map(looks, held))
    if isinstance(value, Settings):
        return (type(value), looks(vars(value)))
    if dataclasses.is_dataclass(value) and getattr(type(value), "__dataclass_params__").frozen:  # noqa: B009
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return (type(value), looks({**fields, **getattr(value, "__dict__", {})}))
    return of_others(value)


def _cells(function: types.FunctionType) -> list[Any]:
    """Return what a function has captured."""
    contents = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:  # a variable that has no value yet
            contents.append(None)
    return contents


def architecture(models: Mapping[str, nn.Module]) -> Hashable:
    """Names, classes, plain attributes, and the shapes of all parameters and buffers of the models."""
    return tuple(
        (name, *(_layer(path, layer) for path, layer in model.named_modules())) for name, model in models.items()
    )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


_RECURRENT = {"_flat_weights", "_flat_weights_names", "_flat_weight_refs", "_all_weights"}
_TORCHS_OWN = {*vars(nn.Module()), *_RECURRENT}
"""Attributes that say nothing beyond a layer's class, options, parameters and buffers."""


def _layer(path: str, layer: nn.Module) -> Hashable:
    content = vars(layer)
    attributes = ((name, identity(value)) for name, value in content.items() if name not in _TORCHS_OWN)
    # A hook is a user's code that may hold on to this one client's tensors.
    hooked = id(layer) if any(content[hooks] for hooks in _HOOKS) else None
    tensors = (
        (name, None if t is None else (t.shape, t.dtype, t.requires_grad))
        for group in (layer._parameters, layer._buffers)
        for name, t in group.items()
    )
    return (path, cast(Hashable, type(layer)), hooked, *attributes, *tensors)
