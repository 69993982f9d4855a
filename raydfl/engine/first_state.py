"""The state with which a run begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import nn

from raydfl.core import seeds
from raydfl.core.errors import ConfigError
from raydfl.core.types import Client, ModelSpec, State
from raydfl.core.users_code import naming_failures
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.evaluation import Variants
from raydfl.engine.networks import build_models
from raydfl.engine.parts import join_states
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
