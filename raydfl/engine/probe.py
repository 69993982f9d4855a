"""One batch through every network before the first round, so that one that cannot be used is refused while nothing is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from raydfl.core.errors import ConfigError, DataError, RaydflError
from raydfl.core.settings import FIRST_VIEW
from raydfl.core.types import Batch, ModelSpec
from raydfl.core.users_code import FAILURES, place_of
from raydfl.data import DataSettings, Population
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.networks import build_models
from raydfl.methods import Method, compute_logits
from raydfl.training import fixed_tensors, preserved

_FRAMES = 96
"""Frames of the noise that stands for recordings which are not here, where their lengths differ."""


def try_models(config: Config, population: Population) -> dict[str, list[dict[str, Any]]]:
    """Build each combination of architectures, compute a batch in evaluation mode, and look at what comes out.

    Returns:
        For every model of the method its architectures, each with its options, number of parameters, and whether all of it is
        shared.

    Raises:
        ConfigError: the objective does not fit the data; a network cannot be built or fails, or gives something else than a finite
            number for each example and output.
    """
    method = config.parts.method
    described: dict[str, dict[ModelSpec, dict[str, Any]]] = {}
    clients = Clients(population, config)
    variants, narrower = clients.variants_of_parts(), clients.built_in_parts()
    for part, data in config.data.each.items():
        of_part = population.parts[part].use(data)
        read = {spec.view: spec.inputs for specs in variants[part] for spec in specs}
        for view, inputs in (read or {FIRST_VIEW: 0}).items():
            length = of_part.views[view].length
            method.objective.check(of_part.classes, None if isinstance(inputs, tuple) else length)
        if config.labels_needed and data.unseen == "stop":
            _check_classes(of_part)
        batch, real = _batch(of_part, data)
        with preserved(), torch.no_grad():
            for specs in narrower[part]:
                models = _built(method, specs, config.run.seed)
                for name in models:
                    _try(method, models, name, specs, batch, real)
            for specs in variants[part]:
                models = _built(method, specs, config.run.seed)
                fixed = fixed_tensors(models, method.fixed)
                for name, model in models.items():
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


def _check_classes(population: Population) -> None:
    """Refuse sets of classes of which one has no training clip; without sets the data know better what became of its clips."""
    if population.sets is None or not population.has_clips:
        return
    for number in np.flatnonzero(population.class_counts() == 0):
        raise DataError(
            f"no client has a clip of class {population.classes[int(number)]!r}; choose data.split or data.partition differently, "
            f"or leave the labels with it out of the data (data.leave_out)"
        )


def _batch(population: Population, data: DataSettings) -> tuple[Batch, bool]:
    """Return two training examples; where none are here, noise of their size."""
    examples = population.first_examples(2)
    if examples is not None:
        return next(examples.batches(len(examples), None)), True
    views = {name: _noise(population.shape(name, data), view.length) for name, view in population.views.items()}
    batch = Batch(
        {name: x for name, (x, _) in views.items()},
        torch.zeros(2, dtype=torch.int64),
        {name: lengths for name, (_, lengths) in views.items() if lengths is not None},
        {name: torch.ones(2, dtype=torch.bool) for name in data.views},
    )
    return batch, False


def _noise(shape: int | tuple[int, int, int], length: int | None) -> tuple[Tensor, Tensor | None]:
    """Return two examples of that shape, and their lengths where these differ."""
    size = shape if isinstance(shape, tuple) else (length or _FRAMES, shape)
    x = torch.randn(2, *size, generator=torch.Generator().manual_seed(0))
    return x, None if length else torch.tensor([x.shape[1], x.shape[1] // 2])


def _built(method: Method, specs: Sequence[ModelSpec], seed: int) -> Mapping[str, nn.Module]:
    where = f"{type(method).__name__}.build()"
    try:
        models: Any = build_models(method, specs, seed)
    except RaydflError:
        raise
    except FAILURES as error:  # whatever a user's code raises
        raise ConfigError(f"{where} fails: {type(error).__name__}: {error} (at {place_of(error)})") from error
    if not isinstance(models, dict) or not all(isinstance(model, nn.Module) for model in models.values()):
        raise ConfigError(f"{where} returns {_what(models)}; it must be a dict of networks (torch.nn.Module) by name")
    return {name: model.eval() for name, model in models.items()}


def _try(
    method: Method, models: Mapping[str, nn.Module], name: str, specs: Sequence[ModelSpec], batch: Batch, real: bool
) -> None:
    network = models[name]
    width = next((spec.width for spec in specs if spec.name == name), specs[0].width)
    what = next((spec.architecture for spec in specs if spec.name == name), type(network).__name__)
    where = f"models.{name}: {what}"
    defined = getattr(type(network).forward, "__code__", type(method).build.__code__)
    place = f"{defined.co_filename}:{defined.co_firstlineno}"
    lazy = [key for key, tensor in network.state_dict(keep_vars=True).items() if is_lazy(tensor)]
    if lazy:
        raise ConfigError(
            f"{where}: the shape of {lazy[0]!r} is not known before the network computes something (a lazy layer), but what is "
            f"sent and kept needs it from the start; use the layer that is told its size ({place})"
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
            f"{place_of(error, place)}); it is called as forward(x, lengths), where lengths may be None"
        ) from error
    if not isinstance(logits, Tensor) or logits.shape != (len(batch.y), width):
        output = "class" if method.objective.answers == "class" else "output of the objective"
        given = f"a tensor of shape {list(logits.shape)}" if isinstance(logits, Tensor) else _what(logits)
        raise ConfigError(
            f"{where}: forward() returns {given} for {len(batch.y)} examples ({place}); it must be logits, "
            f"[{len(batch.y)}, {width}] here: one number for each example and {output}. Where this network is only a part of one, "
            f"name it in the method's class variable partial"
        )
    if real and not bool(torch.isfinite(logits).all()):
        raise ConfigError(
            f"{where}: forward() returns logits that are not finite, for real examples, before it has learnt anything ({place})"
        )


def _what(value: object) -> str:
    return f"a {type(value).__name__}"
