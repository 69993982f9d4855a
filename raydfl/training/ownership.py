"""Ownership of a tensor: shared, private or fixed.

A shared tensor leaves the client. A private tensor stays with the client. A fixed (frozen) tensor never changes: every
process rebuilds it from the run's seed or a file, so messages, checkpoints and private state omit it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn


def find_fixed_tensors(models: Mapping[str, nn.Module], fixed: tuple[str, ...] | None) -> frozenset[str]:
    """Return the flat names of the fixed floating-point tensors.

    A parameter is fixed if it requires no gradient or its name starts with a prefix in ``fixed``. A buffer is fixed if the
    smallest module around it with parameters has fixed parameters only.

    Args:
        models: freshly built networks by name.
        fixed: ``Method.fixed``, prefixes of flat names. ``None``: no tensor is fixed.
    """
    if fixed is None:
        return frozenset()
    names: set[str] = set()
    for model_name, model in models.items():
        parameters = {
            name: not p.requires_grad or f"{model_name}/{name}".startswith(fixed) for name, p in _list_parameters(model)
        }
        if not any(parameters.values()):
            continue
        names.update(f"{model_name}/{name}" for name, is_fixed in parameters.items() if is_fixed)
        for name, value in model.state_dict().items():
            if name not in parameters and value.is_floating_point() and _is_fixed_buffer(name, parameters):
                names.add(f"{model_name}/{name}")
    return frozenset(names)


def _list_parameters(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Return the parameters under all their names: tied parameters have several."""
    return model.named_parameters(remove_duplicate=False)


def _is_fixed_buffer(buffer: str, parameters: Mapping[str, bool]) -> bool:
    """Return whether the smallest module around a buffer with parameters has fixed parameters only."""
    path = buffer
    while path:
        path = path.rpartition(".")[0]
        inside = [is_fixed for name, is_fixed in parameters.items() if not path or name.startswith(f"{path}.")]
        if inside:
            return all(inside)
    return False


def set_training_mode(models: Iterable[tuple[str, nn.Module]], fixed: frozenset[str]) -> None:
    """Set networks to training mode, and their fixed modules to evaluation mode.

    Args:
        models: names and networks.
        fixed: flat names of fixed tensors.
    """
    for model_name, model in models:
        model.train()
        if not fixed:
            continue
        for path, module in model.named_modules():
            names = [
                f"{model_name}/{path}.{name}" if path else f"{model_name}/{name}"
                for name, _ in module.named_parameters()
            ]
            if names and fixed.issuperset(names):
                module.eval()  # training mode would apply dropout and change the statistics of batch normalisation
