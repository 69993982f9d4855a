"""Whether two clients' losses and models are the same computation on different tensors.

Each function gives something hashable; equal results mean alike. In doubt the results differ: then clients are computed one
after another, which is never wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def identity(value: Any, within: tuple[int, ...] = ()) -> Hashable:
    """Equal for equal plain values, for containers of them, and for functions of equal code over equal captured values.

    Everything else (a tensor above all) is equal to itself only.

    Args:
        within: the functions around this value, by ``id``, for functions that refer to themselves.
    """
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, (list, tuple)):
        return (type(value), *(identity(item, within) for item in value))
    if isinstance(value, dict):
        return (dict, *((identity(k, within), identity(v, within)) for k, v in value.items()))
    if isinstance(value, functools.partial):
        return (functools.partial, *(identity(p, within) for p in (value.func, value.args, value.keywords)))
    if isinstance(value, types.MethodType):
        return (types.MethodType, identity(value.__func__, within), id(value.__self__))
    if isinstance(value, types.FunctionType):
        if id(value) in within:
            return ("itself", value.__code__)
        inside = (*within, id(value))
        captured = (identity(_content(cell), inside) for cell in value.__closure__ or ())
        given = (identity(v, inside) for v in (value.__defaults__, value.__kwdefaults__, value.__dict__))
        return (value.__code__, id(value.__globals__), *captured, *given)
    return id(value)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def kind(loss: Callable[..., Any]) -> Hashable:
    """What a loss is: its code and the plain values and functions that it captured.

    Of other captured objects it holds the type only, so it outlives them, and what was found out about a loss is remembered.
    """
    if isinstance(loss, functools.partial):
        return (functools.partial, kind(loss.func), _captured(loss.args), _captured(loss.keywords))
    if isinstance(loss, types.MethodType):
        owner = loss.__self__
        options = repr(owner) if dataclasses.is_dataclass(owner) else ""
        return (kind(loss.__func__), type(owner), options)
    if isinstance(loss, types.FunctionType):
        return (loss.__code__, *(_captured(v, (id(loss),)) for v in _given(loss)))
    return f"{type(loss).__module__}.{type(loss).__qualname__}"


def _given(function: types.FunctionType) -> list[Any]:
    """The values that a function has besides its code."""
    return [*map(_content, function.__closure__ or ()), function.__defaults__, function.__kwdefaults__]


def _captured(value: Any, within: tuple[int, ...] = ()) -> Hashable:
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, (list, tuple)):
        return (type(value), *(_captured(item, within) for item in value))
    if isinstance(value, dict):
        return (dict, *((_captured(k, within), _captured(v, within)) for k, v in value.items()))
    if isinstance(value, types.FunctionType):
        if id(value) in within:
            return value.__code__
        return (value.__code__, *(_captured(v, (*within, id(value))) for v in _given(value)))
    if isinstance(value, (types.MethodType, functools.partial)):
        return kind(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


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
    return (path, type(layer), hooked, *attributes, *tensors)
