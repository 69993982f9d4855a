"""Fates of a tensor: shared, private, or fixed.

A shared tensor leaves the client, a private one stays with it, and a fixed one goes nowhere, because everybody knows it from the
run's seed or from a file: it is in no message, in no commit and in no client's private state, and never changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn


def find_fixed_tensors(models: Mapping[str, nn.Module], fixed: tuple[str, ...] | None) -> frozenset[str]:
    """Return the flat names of the floating tensors that are fixed.

    Those are the parameters that do not train, or whose names begin as ``fixed`` says, and the buffers that belong to such
    parameters alone: of the smallest part of a network around a buffer that has parameters, all are fixed.

    Args:
        models: by name, as they were built.
        fixed: the method's; ``None``: nothing is fixed.
    """
    if fixed is None:
        return frozenset()
    found: set[str] = set()
    for model_name, model in models.items():
        parameters = {
            name: not p.requires_grad or f"{model_name}/{name}".startswith(fixed) for name, p in _all_parameters(model)
        }
        if not any(parameters.values()):
            continue
        found.update(f"{model_name}/{name}" for name, is_fixed in parameters.items() if is_fixed)
        for name, value in model.state_dict().items():
            if name not in parameters and value.is_floating_point() and _around(name, parameters):
                found.add(f"{model_name}/{name}")
    return frozenset(found)


def _all_parameters(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Return parameters under all their names: tied ones have several."""
    return model.named_parameters(remove_duplicate=False)


def _around(buffer: str, parameters: Mapping[str, bool]) -> bool:
    """Return whether all parameters of the smallest part around a buffer that has any are fixed."""
    part = buffer
    while part:
        part = part.rpartition(".")[0]
        inside = [is_fixed for name, is_fixed in parameters.items() if not part or name.startswith(f"{part}.")]
        if inside:
            return all(inside)
    return False


def begin_training(models: Iterable[tuple[str, nn.Module]], fixed: frozenset[str]) -> None:
    """Set networks to training, but parts of which all parameters are fixed to evaluation: these stay the functions that they are.

    Args:
        models: with their names.
        fixed: flat names of fixed tensors.
    """
    for model_name, model in models:
        model.train()
        if not fixed:
            continue
        for path, part in model.named_modules():
            names = [
                f"{model_name}/{path}.{name}" if path else f"{model_name}/{name}" for name, _ in part.named_parameters()
            ]
            if names and fixed.issuperset(names):
                part.eval()
