"""Construction of clients' networks from the run seed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from raydfl.core import seeds
from raydfl.core.tensors import FlatTensors
from raydfl.core.types import ModelSpec
from raydfl.methods import Method
from raydfl.models import start_from_file
from raydfl.training import Replica, find_fixed_tensors


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed the generators of dropout on the CPU and on ``device``."""
    # torch.manual_seed would also queue a call for every absent device, and the queue would grow forever.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def build_models(method: Method, models: Sequence[ModelSpec], run_seed: int) -> dict[str, nn.Module]:
    """Build initialised models by name.

    Equal architectures have equal initial weights at every client. The weights come from the run seed or from a file.
    """
    with torch.random.fork_rng(devices=[]):  # restores the caller's generator
        seed_torch(seeds.seed_for(run_seed, 0, "", "init"), torch.device("cpu"))
        copies = type(method).copies
        originals = tuple(spec for spec in models if spec.name not in copies)
        built = method.build(originals)
        for spec in originals:
            if not isinstance(built, dict) or not isinstance(built.get(spec.name), nn.Module):
                continue  # try_models reports the problem to the user
            method.objective.extend(built[spec.name], spec)
            if spec.init_from:
                start_from_file(built[spec.name], spec)
        if isinstance(built, dict):
            built.update({name: copy.deepcopy(built[source]) for name, source in copies.items() if source in built})
        return built


def build_variants(
    method: Method, variants: Mapping[str, Sequence[tuple[ModelSpec, ...]]], run_seed: int
) -> dict[str, list[tuple[tuple[ModelSpec, ...], dict[str, nn.Module]]]]:
    """Build the networks of each part's combinations of architectures.

    Args:
        method: The method.
        variants: Combinations of architectures by part.
        run_seed: ``run.seed``.
    """
    return {
        part: [(specs, build_models(method, specs, run_seed)) for specs in combinations]
        for part, combinations in variants.items()
    }


def build_fixed_tensors(method: Method, models: Sequence[ModelSpec], run_seed: int) -> FlatTensors:
    """Build the complete networks of which a client has slices, and return their fixed tensors.

    Returns an empty result for a client with complete networks.
    """
    if all(spec.whole is None for spec in models):
        return FlatTensors.from_tensors({})
    built = build_models(method, [spec.whole or spec for spec in models], run_seed)
    states = {f"{name}/{key}": value for name, model in built.items() for key, value in model.state_dict().items()}
    return FlatTensors.from_tensors({name: states[name] for name in sorted(find_fixed_tensors(built, method.fixed))})


class BuiltNetworks:
    """Networks of one process, built once for each combination of architectures.

    Args:
        method: Method of the run.
        run_seed: Seed of the run.
        device: Device of the networks.
        users_code: Whether a user's code may access the networks.
    """

    def __init__(self, method: Method, run_seed: int, device: torch.device, users_code: bool) -> None:
        self._method, self._seed, self._device, self._users_code = method, run_seed, device, users_code
        self.replicas: dict[tuple[tuple[ModelSpec, ...], int], Replica] = {}
        self._fixed: dict[tuple[ModelSpec, ...], FlatTensors] = {}

    def build(self, specs: tuple[ModelSpec, ...], place: int) -> Replica:
        """Build networks, or return the existing ones.

        Args:
            specs: Architectures.
            place: Number of the client in its group. Clients in batched training need networks of their own.
        """
        built = self.replicas.get((specs, place))
        if built is None or not built.intact:
            models = build_models(self._method, specs, self._seed)
            for model in models.values():
                model.to(self._device)
            built = Replica(models, find_fixed_tensors(models, self._method.fixed), self._users_code)
            self.replicas[specs, place] = built
        return built

    def build_fixed(self, specs: tuple[ModelSpec, ...]) -> FlatTensors:
        """Return the fixed tensors of the complete networks of which a client has slices."""
        if specs not in self._fixed:
            self._fixed[specs] = build_fixed_tensors(self._method, specs, self._seed)
        return self._fixed[specs]
