"""The state with which a run begins; of several parts (``data.parts``), joined from what the method makes for each of them."""

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


def make_first_state(config: Config, clients: Clients, variants: Mapping[str, Variants]) -> State:
    """Return the method's initial state, joined over the parts.

    Args:
        config: of the run.
        clients: of all parts.
        variants: the built networks of each part.

    Raises:
        ClientError: the method's code failed.
        ConfigError: the state has no tensors.
    """
    states = {part: _init(config, clients.of_part(part), [m for _, m in built]) for part, built in variants.items()}
    if "" in states:
        state = states[""]
    else:
        state = join_states(states, _init_wider(config, clients, variants), config.data.heads == "common")
    if not state.tensors:
        raise ConfigError(
            f"method {config.method['name']!r} starts with no tensors at all: its shared() keeps everything private"
        )
    return as_stored(state)


def _init(config: Config, clients: Sequence[Client], models: Sequence[Mapping[str, nn.Module]]) -> State:
    with naming_failures(config.parts.method, "init"):
        return config.parts.method.init(clients, models, seeds.generator(config.run.seed, 0, "", "init"))


def _init_wider(config: Config, clients: Clients, variants: Mapping[str, Variants]) -> State:
    """Return the first part's state with one more class: a tensor that changes its shape depends on the classes."""
    method = config.parts.method

    def widen(spec: ModelSpec) -> ModelSpec:
        width = None if spec.outputs is None else method.objective.outputs(spec.classes + 1)
        return dataclasses.replace(spec, classes=spec.classes + 1, outputs=width, init_from=())

    wider = [[widen(spec) for spec in specs] for specs, _ in next(iter(variants.values()))]
    return _init(config, clients, [build_models(method, specs, config.run.seed) for specs in wider])


def join_states(states: Mapping[str, State], wider: State, common: bool = False) -> State:
    """Return one state: what fits all parts once, what depends on a part's classes or features for each part.

    Args:
        states: what ``Method.init`` made for each part and its clients, by plain names. What all share is the first part's.
        wider: the same for the first part with one class more, and for all clients. What it says in ``extra`` holds for the whole
            federation, what a part's state says there is kept under the part's own name.
        common: whether parts share what depends on classes too, where it has the same shape in all.

    Raises:
        ConfigError: a tensor's name could be taken for a part's.
    """
    first = next(iter(states.values()))
    for part, state in states.items():
        for tensors in state.tensors.values():
            for name in tensors:
                check_name(name, part)
    joined: dict[str, dict[str, Tensor]] = {}
    for part, state in states.items():
        for key, tensors in state.tensors.items():
            for name, tensor in tensors.items():
                shapes = {other.tensors[key][name].shape for other in states.values() if _has(other, key, name)}
                depends = (
                    not common
                    and _has(wider, key, name)
                    and wider.tensors[key][name].shape != first.tensors[key][name].shape
                )
                full = own_name(name, part) if depends or len(shapes) > 1 else name
                joined.setdefault(key, {}).setdefault(full, tensor)
    own = {own_name(name, part): value for part, state in states.items() for name, value in state.extra.items()}
    return dataclasses.replace(first, tensors=joined, extra={**wider.extra, **own})


def _has(state: State, key: str, name: str) -> bool:
    return name in state.tensors.get(key, {})
