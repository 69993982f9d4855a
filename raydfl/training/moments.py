"""Persistence of optimiser moments between a client's participations (``train.optimiser.keep``)."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from raydfl.training.optimiser import Optimiser
from raydfl.training.settings import OptimiserSettings
from raydfl.training.step import Step

Moments = Mapping[str, Mapping[str, Tensor]]
"""Moments by the parameter's flat name and the moment's name."""


def _list_kinds(settings: OptimiserSettings) -> tuple[str, ...]:
    """Return the names of an optimiser's moments: ``step`` is a scalar count, all else has the parameter's shape."""
    if settings.name == "sgd":
        return ("momentum_buffer",) if settings.momentum else ()
    return ("step", "exp_avg", "exp_avg_sq")


def restore_moments(
    optimiser: Optimiser, parameters: Mapping[str, Tensor], steps: Sequence[Step], stacked: bool = False
) -> Moments:
    """Load the clients' saved moments into an optimiser. New parameters start from zero.

    Args:
        optimiser: the optimiser of ``parameters``, without state.
        parameters: trained parameters by flat name.
        steps: steps of the clients.
        stacked: whether parameters are [clients, ...] in the order of ``steps``. Otherwise ``steps`` has one client.

    Returns:
        The live moments, updated by the optimiser. Empty without ``train.optimiser.keep``.
    """
    restored: dict[str, Mapping[str, Tensor]] = {}
    for name, parameter in parameters.items() if steps[0].training.optimiser.keep else ():
        example = parameter.detach()[0] if stacked else parameter.detach()
        moments: dict[str, Tensor] = {}
        for kind in _list_kinds(optimiser.settings):
            initial = torch.zeros((), device=example.device) if kind == "step" else torch.zeros_like(example)
            values = [step.moments.get(f"{name}/{kind}", initial) for step in steps]
            moments[kind] = torch.stack(values) if stacked else values[0].clone()
        if moments:
            restored[name] = moments
            optimiser.state[parameter] = dict(moments)
    return restored


def save_moments(moments: Moments, into: MutableMapping[str, Tensor], client: int | None = None) -> None:
    """Copy a client's moments into its step.

    Args:
        moments: live moments from :func:`restore_moments`.
        into: ``step.moments``.
        client: position of the client in stacked moments. ``None``: the moments are not stacked.
    """
    for name, parameter_moments in moments.items():
        for kind, value in parameter_moments.items():
            into[f"{name}/{kind}"] = (value if client is None else value[client]).clone()
