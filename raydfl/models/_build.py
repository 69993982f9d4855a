"""Construction and checks of networks by the name of their architecture."""

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
    return sorted(_list_architectures())


def build_model(spec: ModelSpec) -> nn.Module:
    """Build a network on the CPU with initial weights from PyTorch's global generator, which the engine seeds.

    Raises:
        ConfigError: the architecture or an option is unknown, a value is of the wrong type or out of range, or a
            user-defined constructor fails.
    """
    where = f"models.{spec.name}"
    cls, preset = find_architecture(spec.architecture, where)
    options = _check_options(cls, {**preset, **dict(spec.options)}, f"{where}: {spec.architecture}")
    try:
        network = cls(spec.inputs, spec.width, **options)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except FAILURES as error:  # a user-defined constructor may raise anything
        raise ConfigError(f"{where}: {spec.architecture} cannot be built: {type(error).__name__}: {error}") from error
    if spec.view:
        network.view = spec.view  # type: ignore[assignment]  # read by Batch.input_of
    return network


def check_model(
    architecture: str,
    options: Mapping[str, Any],
    inputs: int | tuple[int, int, int],
    frames: int | None,
    where: str,
) -> None:
    """Check an architecture before any client builds it.

    Built-in architectures are built and applied to a clip of zeros. For user-defined classes only the options are checked.

    Args:
        architecture: name of the architecture.
        options: its configured options.
        inputs: feature bands of a frame, or channels, rows and columns of an image.
        frames: frames of each clip. ``None`` if lengths differ.
        where: the place in the configuration, for error messages.

    Raises:
        ConfigError: as for :func:`build_model`, or the clips do not fit the architecture.
    """
    cls, preset = find_architecture(architecture, where)
    checked = _check_options(cls, {**preset, **options}, f"{where}: {architecture}")
    network = (architecture, repr(sorted(checked.items())), inputs, frames)
    if ":" in architecture or network in _TRIED:
        return
    if getattr(cls, "images", False) not in (None, isinstance(inputs, tuple)):
        reads, data = ("images", "features") if isinstance(inputs, int) else ("features", "images")
        accepted = (None, data == "images")
        suggestions = [
            name
            for name, (kind, _) in _list_architectures().items()
            if getattr(kind, "images", False) in accepted and not getattr(kind, "on_features", False)
        ]
        raise ConfigError(
            f"{where}: {architecture} reads {reads}, but the data are {data}. Set {where} to one of {', '.join(suggestions)}, or "
            f"to your own network."
        )
    # The check must not advance the caller's random state.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = build_model(ModelSpec(where.rpartition(".")[2], architecture, inputs, 2, tuple(options.items())))
        try:
            if frames is not None:
                model(torch.zeros(1, *(inputs if isinstance(inputs, tuple) else (frames, inputs))))
        except DataError as error:
            raise ConfigError(f"{where}: {architecture}: {error}") from error
    _TRIED.add(network)


_TRIED: set[tuple[str, str, int | tuple[int, int, int], int | None]] = set()
"""Networks that passed the check in this process. Configurations of a study often share them."""


def model_options(architecture: str) -> dict[str, Any]:
    """Return the options of a built-in architecture with their defaults."""
    cls, preset = find_architecture(architecture, "models")
    parameters = list(inspect.signature(cls).parameters.values())[2:]
    return {parameter.name: preset.get(parameter.name, parameter.default) for parameter in parameters}


@cache
def _list_architectures() -> Mapping[str, Architecture]:
    """Return the built-in architectures by name."""
    built_in: dict[str, Architecture] = {}
    for file in registry.names(_PACKAGE):
        built_in |= getattr(importlib.import_module(f"{_PACKAGE}.{file}"), "ARCHITECTURES", {})
    return built_in


def find_architecture(name: str, where: str) -> Architecture:
    """Find an architecture's class and its preset options.

    Args:
        name: a built-in architecture, or ``my_file.py:Class``.
        where: the place in the configuration, for error messages.

    Raises:
        ConfigError: the architecture is unknown, or the class is not a network.
    """
    if ":" in name:
        cls = registry.load_object(name)
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ConfigError(f"{where}: {name!r} is not a subclass of torch.nn.Module")
        return cls, {}
    known = _list_architectures()
    if name not in known:
        raise ConfigError(
            f"{where}: unknown architecture {name!r}. {nearest(name, known)} Your own class: my_file.py:Class"
        )
    return known[name]


def _check_options(cls: type[nn.Module], options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert each option to the type of its annotation in the constructor, and check its range."""
    parameters = list(inspect.signature(cls).parameters.values())
    known = [parameter.name for parameter in parameters[2:] if parameter.kind is not parameter.VAR_KEYWORD]
    accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    checked = {}
    for key, value in options.items():
        if key not in known and not accepts_any:
            hint = nearest(key, known) if known else "It has no options."
            raise ConfigError(f"{where}: unknown option {key!r}. {hint}")
        try:
            checked[key] = _get_adapter(cls, key).validate_python(value)
        except ValidationError as error:
            raise ConfigError(explain(error, f"{where}.{key}", value)) from error
    return checked


def _get_adapter(cls: type[nn.Module], option: str) -> TypeAdapter[Any]:
    """Return the cached validator of an option."""
    if (cls, option) not in _ADAPTERS:
        annotation = _get_annotations(cls).get(option, Any)
        strict: Any = Annotated[annotation, StrictTypes]
        _ADAPTERS[cls, option] = TypeAdapter(strict, config=ConfigDict(arbitrary_types_allowed=True))
    return _ADAPTERS[cls, option]


def _get_annotations(cls: type[nn.Module]) -> Mapping[str, Any]:
    if cls not in _ANNOTATIONS:
        try:
            _ANNOTATIONS[cls] = typing.get_type_hints(cls.__init__, include_extras=True)
        except NameError:  # an annotation that only a type checker can resolve: options are not checked
            _ANNOTATIONS[cls] = {}
    return _ANNOTATIONS[cls]


_ADAPTERS: dict[tuple[type[nn.Module], str], TypeAdapter[Any]] = {}
_ANNOTATIONS: dict[type[nn.Module], Mapping[str, Any]] = {}
"""Caches, because computing annotations and validators takes longer than building a tiny network."""
