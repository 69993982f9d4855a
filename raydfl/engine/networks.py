"""The networks of clients, built from the run's seed: equal architectures start from equal weights at every client."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from raydfl.core import seeds
from raydfl.core.tensors import FlatTensors
from raydfl.core.types import ModelSpec
from raydfl.methods import Method
from raydfl.models import start_from_file
from raydfl.training import Replica, find_fixed_tensors


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed what dropout draws from. ``torch.manual_seed`` would also queue calls for devices that are not there, forever."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def build_models(method: Method, models: Sequence[ModelSpec], run_seed: int) -> dict[str, nn.Module]:
    """Build freshly initialised models; equal architectures start from equal weights at every client: the seed's, or a file's."""
    with torch.random.fork_rng(devices=[]):
        seed_torch(seeds.seed_for(run_seed, 0, "", "init"), torch.device("cpu"))
        copies = type(method).copies
        originals = tuple(spec for spec in models if spec.name not in copies)
        built = method.build(originals)
        for spec in originals:
            if not isinstance(built, dict) or not isinstance(built.get(spec.name), nn.Module):
                continue  # try_models says what is wrong
            method.objective.extend(built[spec.name], spec)
            if spec.init_from:
                start_from_file(built[spec.name], spec)
        if isinstance(built, dict):
            built.update({name: copy.deepcopy(built[of]) for name, of in copies.items() if of in built})
        return built


def fixed_of_whole(method: Method, models: Sequence[ModelSpec], run_seed: int) -> FlatTensors:
    """Return the fixed tensors of the whole networks that a client's networks are parts of; none if it has no such parts."""
    if all(spec.whole is None for spec in models):
        return FlatTensors.of({})
    built = build_models(method, [spec.whole or spec for spec in models], run_seed)
    states = {f"{name}/{key}": value for name, model in built.items() for key, value in model.state_dict().items()}
    return FlatTensors.of({name: states[name] for name in sorted(find_fixed_tensors(built, method.fixed))})


class BuiltNetworks:
    """The networks of one process, built once for each combination of architectures.

    Args:
        method: of the run.
        run_seed: of the run.
        device: where the networks are.
        users_code: whether a user's code works with the networks.
    """

    def __init__(self, method: Method, run_seed: int, device: torch.device, users_code: bool) -> None:
        self._method, self._seed, self._device, self._users_code = method, run_seed, device, users_code
        self.replicas: dict[tuple[tuple[ModelSpec, ...], int], Replica] = {}
        self._fixed: dict[tuple[ModelSpec, ...], FlatTensors] = {}

    def build(self, specs: tuple[ModelSpec, ...], place: int) -> Replica:
        """Return networks of these architectures. Clients of one group have different places."""
        built = self.replicas.get((specs, place))
        if built is None or not built.intact:
            models = build_models(self._method, specs, self._seed)
            for model in models.values():
                model.to(self._device)
            built = Replica(models, find_fixed_tensors(models, self._method.fixed), self._users_code)
            self.replicas[specs, place] = built
        return built

    def fixed_of_whole(self, specs: tuple[ModelSpec, ...]) -> FlatTensors:
        """Return the fixed tensors of the networks that these are parts of."""
        if specs not in self._fixed:
            self._fixed[specs] = fixed_of_whole(self._method, specs, self._seed)
        return self._fixed[specs]
