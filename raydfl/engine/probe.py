"""Trial batch for every network before the first round, to reject unusable networks early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from raydfl.core.errors import ClipError, ConfigError, DataError, RaydflError
from raydfl.core.settings import FIRST_VIEW
from raydfl.core.types import Batch, ModelSpec
from raydfl.core.users_code import FAILURES, place_of
from raydfl.data import DataSettings, Population, list_clips
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.networks import build_models
from raydfl.methods import Method, compute_logits
from raydfl.training import find_fixed_tensors, preserve_generators

_FRAMES = 96
"""Frames of noise examples, which replace absent recordings of variable length."""


def try_models(config: Config, population: Population) -> dict[str, list[dict[str, Any]]]:
    """Build each combination of architectures and check its output for one batch in evaluation mode.

    Returns:
        The architectures of each model, by the model's name. Each has its options, its number of parameters, and ``shared``:
        whether clients share all of its tensors.

    Raises:
        ConfigError: The objective does not fit the data, a network cannot be built or fails, or its output is not finite or of a
            wrong shape.
        DataError: A clip does not fit a network.
    """
    method = config.components.method
    described: dict[str, dict[ModelSpec, dict[str, Any]]] = {}
    clients = Clients(population, config)
    variants, narrower = clients.variants_of_parts(), clients.narrow_variants()
    for part, data in config.data.each.items():
        part_data = population.parts[part].use(data)
        read = {spec.view: spec.inputs for specs in variants[part] for spec in specs}
        for view, inputs in (read or {FIRST_VIEW: 0}).items():
            length = part_data.views[view].length
            method.objective.check(part_data.classes, None if isinstance(inputs, tuple) else length)
        if config.labels_needed and data.unseen == "stop":
            _check_classes(part_data, data)
        batch, real = _make_batch(part_data, data)
        with preserve_generators(), torch.no_grad():
            for specs in narrower[part]:
                models = _build(method, specs, config.run.seed)
                for name in models:
                    _try(method, models, name, specs, batch, real)
            for specs in variants[part]:
                models = _build(method, specs, config.run.seed)
                fixed = find_fixed_tensors(models, method.fixed)
                for name, model in models.items():
                    if name not in (*method.partial, *method.on_features):
                        _check_network(method, f"models.{name}", model, part_data, data)
                    _try(method, models, name, specs, batch, real)
                    spec = next(spec for spec in specs if spec.name == name)
                    described.setdefault(name, {})[spec] = {
                        "architecture": spec.architecture,
                        **dict(spec.options),
                        "parameters": sum(parameter.numel() for parameter in model.parameters()),
                        "shared": all(
                            f"{name}/{key}" in fixed or method.shared(f"{name}/{key}") for key in model.state_dict()
                        ),
                    }
    return {name: list(kinds.values()) for name, kinds in described.items()}


def _check_network(method: Method, where: str, model: nn.Module, population: Population, data: DataSettings) -> None:
    """Let the objective check a network, and name the clip of an error."""
    try:
        method.objective.check_network(where, model, population)
    except ClipError as error:
        name = list_clips(data, 0)[0].column("clip")[error.clip].as_py()  # the seed draws no names
        raise DataError(error.describe(name)) from None


def _check_classes(population: Population, data: DataSettings) -> None:
    """Reject data with sets or sequences of classes if a class or unit has no training clip.

    For data with one class per clip, :mod:`raydfl.data` reports missing classes with more detail.
    """
    if population.sets is population.sequences is None or not population.has_clips:
        return
    for number in np.flatnonzero(population.class_counts() == 0).tolist():
        kind, tested = "class", ""
        if data.label_sequences is not None:
            kind = data.label_sequences.units.removesuffix("s")
            clip = _find_tested_clip(population, number)
            tested = (
                "" if clip is None else f", but clip {list_clips(data, 0)[0].column('clip')[clip].as_py()!r} has it"
            )
        raise DataError(
            f"no client has a clip of {kind} {population.classes[number]!r}{tested}. Change data.split or data.partition, or "
            f"exclude labels with this {kind} (data.leave_out), or use it in tests only (data.unseen=keep)"
        )


def _find_tested_clip(population: Population, unit: int) -> int | None:
    """Return the number of a clip outside the training whose transcript has a unit."""
    for role in ("test", "client_test", "validation"):
        for examples in population.read_role(role):
            found = np.flatnonzero((examples.targets(examples.labels) == unit).any(axis=1))
            if len(found):
                return int(examples.clips[found[0]])
    return None


def _make_batch(population: Population, data: DataSettings) -> tuple[Batch, bool]:
    """Return two training examples and True, or noise of the same shape and False if no clips are available."""
    examples = population.first_examples(2)
    if examples is not None:
        return next(examples.batches(len(examples), None)), True
    views = {name: _make_noise(population.shape(name, data), view.length) for name, view in population.views.items()}
    batch = Batch(
        {name: x for name, (x, _) in views.items()},
        torch.zeros(2, dtype=torch.int64),
        {name: lengths for name, (_, lengths) in views.items() if lengths is not None},
        {name: torch.ones(2, dtype=torch.bool) for name in data.views},
    )
    return batch, False


def _make_noise(shape: int | tuple[int, int, int], length: int | None) -> tuple[Tensor, Tensor | None]:
    """Return noise, float32 [2, *shape], and its lengths, int64 [2]; ``None`` if the length is fixed."""
    size = shape if isinstance(shape, tuple) else (length or _FRAMES, shape)
    x = torch.randn(2, *size, generator=torch.Generator().manual_seed(0))
    return x, None if length else torch.tensor([x.shape[1], x.shape[1] // 2])


def _build(method: Method, specs: Sequence[ModelSpec], seed: int) -> Mapping[str, nn.Module]:
    where = f"{type(method).__name__}.build()"
    try:
        models: Any = build_models(method, specs, seed)
    except RaydflError:
        raise
    except FAILURES as error:  # whatever a user's code raises
        raise ConfigError(f"{where} fails: {type(error).__name__}: {error} (at {place_of(error)})") from error
    if not isinstance(models, dict) or not all(isinstance(model, nn.Module) for model in models.values()):
        raise ConfigError(
            f"{where} returns {_describe_type(models)}. It must return a dict of networks (torch.nn.Module) by name"
        )
    return {name: model.eval() for name, model in models.items()}


def _try(
    method: Method, models: Mapping[str, nn.Module], name: str, specs: Sequence[ModelSpec], batch: Batch, real: bool
) -> None:
    network = models[name]
    width = next((spec.width for spec in specs if spec.name == name), specs[0].width)
    architecture = next((spec.architecture for spec in specs if spec.name == name), type(network).__name__)
    where = f"models.{name}: {architecture}"
    defined = getattr(type(network).forward, "__code__", type(method).build.__code__)
    place = f"{defined.co_filename}:{defined.co_firstlineno}"
    lazy = [key for key, tensor in network.state_dict(keep_vars=True).items() if is_lazy(tensor)]
    if lazy:
        raise ConfigError(
            f"{where}: the shape of {lazy[0]!r} is unknown before the first forward pass (a lazy layer), but the server needs it "
            f"from the start. Use the corresponding layer with explicit sizes ({place})"
        )
    if name in method.partial:
        return
    try:
        logits: Any = compute_logits(method, models, name, batch)
    except RaydflError as error:
        raise ConfigError(f"{where}: {error}") from error
    except FAILURES as error:  # whatever a user's code raises
        raise ConfigError(
            f"{where} cannot compute a batch of x {list(batch.x.shape)}: {type(error).__name__}: {error} (at "
            f"{place_of(error, place)}). raydfl calls forward(x, lengths), where lengths may be None"
        ) from error
    if not isinstance(logits, Tensor) or logits.shape != (len(batch.y), width):
        output = "class" if method.objective.answers == "class" else "output of the objective"
        result = f"a tensor of shape {list(logits.shape)}" if isinstance(logits, Tensor) else _describe_type(logits)
        raise ConfigError(
            f"{where}: forward() returns {result} for {len(batch.y)} examples ({place}). It must return logits of shape "
            f"[{len(batch.y)}, {width}]: a value for each example and {output}. If this network is only a part of a model, add "
            f"its name to the method's class variable partial"
        )
    if real and not bool(torch.isfinite(logits).all()):
        raise ConfigError(
            f"{where}: forward() returns logits that are not finite for real examples, even before training ({place}). Check the "
            f"initial weights and the normalisation of features"
        )


def _describe_type(value: object) -> str:
    return f"a {type(value).__name__}"
