"""Initial state of a run, joined from the initial states of its parts (``data.parts``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from raydfl.core import seeds
from raydfl.core.errors import ConfigError
from raydfl.core.part_names import check_name, own_name
from raydfl.core.types import Client, ModelSpec, State
from raydfl.core.users_code import naming_failures
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.evaluation import Variants
from raydfl.engine.networks import build_models
from raydfl.engine.storage.store import as_stored


def make_initial_state(config: Config, clients: Clients, variants: Mapping[str, Variants]) -> State:
    """Create the initial state of the method. With several parts it is joined from their states.

    Args:
        config: Configuration of the run.
        clients: Clients of all parts.
        variants: Built networks of each part.

    Raises:
        ClientError: The method's code failed.
        ConfigError: The state has no keys, or no tensors that fit the rule.
    """
    states = {part: _init(config, clients.of_part(part), [m for _, m in built]) for part, built in variants.items()}
    if "" in states:
        state = states[""]
    else:
        state = join_states(states, _init_wider(config, clients, variants), config.data.heads == "common")
    if not state.tensors:
        raise ConfigError(
            f"method {config.method['name']!r}: init() returned a state without keys. Return one key or more, such as "
            f'{{"global": tensors}}. If clients share nothing, return an empty mapping of tensors'
        )
    config.components.rule.check(state.tensors)
    return as_stored(state)


def _init(config: Config, clients: Sequence[Client], models: Sequence[Mapping[str, nn.Module]]) -> State:
    with naming_failures(config.components.method, "init"):
        return config.components.method.init(clients, models, seeds.generator(config.run.seed, 0, "", "init"))


def _init_wider(config: Config, clients: Clients, variants: Mapping[str, Variants]) -> State:
    """Create the first part's state with an additional class. Tensors with a different shape depend on the classes."""
    method = config.components.method

    def widen(spec: ModelSpec) -> ModelSpec:
        width = None if spec.outputs is None else method.objective.outputs(spec.classes + 1)
        return dataclasses.replace(spec, classes=spec.classes + 1, outputs=width, init_from=())

    # The comparison of shapes for two numbers of classes shows which tensors depend on the classes, also in users' networks.
    wider = [[widen(spec) for spec in specs] for specs, _ in next(iter(variants.values()))]
    return _init(config, clients, [build_models(method, specs, config.run.seed) for specs in wider])


def join_states(states: Mapping[str, State], wider: State, common: bool = False) -> State:
    """Join the states of parts. A tensor is shared unless its shape depends on the classes or features of a part.

    Args:
        states: Result of ``Method.init`` for each part, with plain names. Shared tensors are copied from the first part.
        wider: Result of ``Method.init`` for the first part with an additional class and for all clients. Its ``extra`` holds for
            the whole federation. The ``extra`` of a part is stored under the part's name.
        common: Whether parts also share tensors that depend on the classes, if the shapes are equal.

    Raises:
        ConfigError: A tensor's name has the form of a part's name.
    """
    first = next(iter(states.values()))
    for part, state in states.items():
        for tensors in state.tensors.values():
            for name in tensors:
                check_name(name, part)
    joined: dict[str, dict[str, Tensor]] = {}
    for part, state in states.items():
        for key, tensors in state.tensors.items():
            shared = joined.setdefault(key, {})  # stays empty if each client keeps the whole model
            for name, tensor in tensors.items():
                shapes = {other.tensors[key][name].shape for other in states.values() if _has(other, key, name)}
                depends = (
                    not common
                    and _has(wider, key, name)
                    and wider.tensors[key][name].shape != first.tensors[key][name].shape
                )
                full = own_name(name, part) if depends or len(shapes) > 1 else name
                shared.setdefault(full, tensor)
    own = {own_name(name, part): value for part, state in states.items() for name, value in state.extra.items()}
    return dataclasses.replace(first, tensors=joined, extra={**wider.extra, **own})


def _has(state: State, key: str, name: str) -> bool:
    return name in state.tensors.get(key, {})
