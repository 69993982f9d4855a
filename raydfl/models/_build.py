"""Finding, checking and building networks by name."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import nn

from raydfl.core import registry
from raydfl.core.errors import ConfigError, DataError, nearest
from raydfl.core.options import explain
from raydfl.core.settings import StrictTypes
from raydfl.core.types import ModelSpec
from raydfl.core.users_code import FAILURES

_PACKAGE = "raydfl.models"

Architecture = tuple[type[nn.Module], Mapping[str, Any]]


def architectures() -> list[str]:
    """Return the names of the built-in architectures, sorted."""
    return sorted(_built_in())


def build_model(spec: ModelSpec) -> nn.Module:
    """Build a freshly initialised network, on the CPU, from PyTorch's global generator (which the engine seeds before).

    Raises:
        ConfigError: no such architecture, an option that it does not have (the nearest is named), a value of the wrong type
            or out of range, or a user's constructor that fails.
    """
    where = f"models.{spec.name}"
    cls, preset = find_architecture(spec.architecture, where)
    options = _checked(cls, {**preset, **dict(spec.options)}, f"{where}: {spec.architecture}")
    try:
        network = cls(spec.inputs, spec.width, **options)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except FAILURES as error:  # whatever a user's constructor does
        raise ConfigError(f"{where}: {spec.architecture} cannot be built: {type(error).__name__}: {error}") from error
    if spec.view:
        network.view = spec.view  # type: ignore[assignment]  # what Batch.input_of looks for
    return network


def check_model(
    architecture: str,
    options: Mapping[str, Any],
    inputs: int | tuple[int, int, int],
    frames: int | None,
    where: str,
) -> None:
    """Refuse an architecture that cannot be built or cannot take the clips, before any client tries to.

    A built-in is built and tried on one clip; of a user's class only the options are checked.

    Args:
        options: as configured.
        inputs: feature bands of a frame; of images channels, rows and columns.
        frames: of every clip; ``None`` when they differ.
        where: the place in the configuration, for the messages.

    Raises:
        ConfigError: see :func:`build_model`; or the clips have too few frames.
    """
    cls, preset = find_architecture(architecture, where)
    checked = _checked(cls, {**preset, **options}, f"{where}: {architecture}")
    network = (architecture, repr(sorted(checked.items())), inputs, frames)
    if ":" in architecture or network in _TRIED:
        return
    if getattr(cls, "images", False) not in (None, isinstance(inputs, tuple)):
        takes, given = ("images", "features") if isinstance(inputs, int) else ("features", "images")
        fits = (None, given == "images")
        fitting = [
            name
            for name, (kind, _) in _built_in().items()
            if getattr(kind, "images", False) in fits and not getattr(kind, "on_features", False)
        ]
        raise ConfigError(
            f"{where}: {architecture} takes {takes}, and the data are {given}; set {where} to one of {', '.join(fitting)}, or to a "
            f"network of your own"
        )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = build_model(ModelSpec(where.rpartition(".")[2], architecture, inputs, 2, tuple(options.items())))
        try:
            if frames is not None:
                model(torch.zeros(1, *(inputs if isinstance(inputs, tuple) else (frames, inputs))))
        except DataError as error:
            raise ConfigError(f"{where}: {architecture}: {error}") from error
    _TRIED.add(network)


_TRIED: set[tuple[str, str, int | tuple[int, int, int], int | None]] = set()
"""Built-in networks that were found good in this process: all the configurations of a study may have the same."""


def model_options(architecture: str) -> dict[str, Any]:
    """Return the options of a built-in architecture with their defaults."""
    cls, preset = find_architecture(architecture, "models")
    parameters = list(inspect.signature(cls).parameters.values())[2:]
    return {parameter.name: preset.get(parameter.name, parameter.default) for parameter in parameters}


@cache
def _built_in() -> Mapping[str, Architecture]:
    """Return all of this package's architectures by name."""
    found: dict[str, Architecture] = {}
    for file in registry.names(_PACKAGE):
        found |= getattr(importlib.import_module(f"{_PACKAGE}.{file}"), "ARCHITECTURES", {})
    return found


def find_architecture(name: str, where: str) -> Architecture:
    """Return the class of that name, and the options that the name stands for.

    Args:
        name: a built-in, or ``my_file.py:Class``.
        where: the place in the configuration, for the messages.

    Raises:
        ConfigError: there is none, or it is no network.
    """
    if ":" in name:
        cls = registry.load_object(name)
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ConfigError(f"{where}: {name!r} is not a subclass of torch.nn.Module")
        return cls, {}
    known = _built_in()
    if name not in known:
        raise ConfigError(
            f"{where}: unknown architecture {name!r}; {nearest(name, known)} Your own class: my_file.py:Class"
        )
    return known[name]


def _checked(cls: type[nn.Module], options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert each option to the type that the constructor's annotation gives, and check its range."""
    parameters = list(inspect.signature(cls).parameters.values())
    known = [parameter.name for parameter in parameters[2:] if parameter.kind is not parameter.VAR_KEYWORD]
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    checked = {}
    for key, value in options.items():
        if key not in known and not anything:
            hint = nearest(key, known) if known else "it has no options"
            raise ConfigError(f"{where}: unknown option {key!r}; {hint}")
        try:
            checked[key] = _adapter(cls, key).validate_python(value)
        except ValidationError as error:
            raise ConfigError(explain(error, f"{where}.{key}", value)) from error
    return checked


def _adapter(cls: type[nn.Module], option: str) -> TypeAdapter[Any]:
    """Return what checks an option of a class."""
    if (cls, option) not in _ADAPTERS:
        given = _annotations(cls).get(option, Any)
        strict: Any = Annotated[given, StrictTypes]
        _ADAPTERS[cls, option] = TypeAdapter(strict, config=ConfigDict(arbitrary_types_allowed=True))
    return _ADAPTERS[cls, option]


def _annotations(cls: type[nn.Module]) -> Mapping[str, Any]:
    if cls not in _ANNOTATIONS:
        try:
            _ANNOTATIONS[cls] = typing.get_type_hints(cls.__init__, include_extras=True)
        except NameError:  # a user's annotation that only a type checker can resolve: its options go unchecked
            _ANNOTATIONS[cls] = {}
    return _ANNOTATIONS[cls]


_ADAPTERS: dict[tuple[type[nn.Module], str], TypeAdapter[Any]] = {}
_ANNOTATIONS: dict[type[nn.Module], Mapping[str, Any]] = {}
"""Kept: making both takes longer than building a tiny network does."""
