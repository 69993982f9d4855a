"""Moments of the clients' optimiser that are kept from one participation to the next (``train.optimiser.keep``)."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from raydfl.training.optimiser import Optimiser
from raydfl.training.settings import OptimiserSettings
from raydfl.training.step import Step

Moments = Mapping[str, Mapping[str, Tensor]]
"""By the parameter's flat name and the moment's."""


def _kinds(settings: OptimiserSettings) -> tuple[str, ...]:
    """Return the names of an optimiser's moments; ``step`` counts, the others have the parameter's shape."""
    if settings.name == "sgd":
        return ("momentum_buffer",) if settings.momentum else ()
    return ("step", "exp_avg", "exp_avg_sq")


def begin_with_kept(
    optimiser: Optimiser, parameters: Mapping[str, Tensor], steps: Sequence[Step], stacked: bool = False
) -> Moments:
    """Give an optimiser the moments that clients have kept, those of new parameters 0; return them, live.

    Args:
        optimiser: of the parameters.
        parameters: by flat name.
        steps: of the clients.
        stacked: whether parameters are stacked, [clients, ...] in the order of ``steps``; else there is one client.
    """
    found: dict[str, Mapping[str, Tensor]] = {}
    for name, parameter in parameters.items() if steps[0].training.optimiser.keep else ():
        own = parameter.detach()[0] if stacked else parameter.detach()
        moments: dict[str, Tensor] = {}
        for kind in _kinds(optimiser.settings):
            none = torch.zeros((), device=own.device) if kind == "step" else torch.zeros_like(own)
            each = [step.moments.get(f"{name}/{kind}", none) for step in steps]
            moments[kind] = torch.stack(each) if stacked else each[0].clone()
        if moments:
            found[name] = moments
            optimiser.state[parameter] = dict(moments)
    return found


def keep(moments: Moments, into: MutableMapping[str, Tensor], client: int | None = None) -> None:
    """Keep a client's moments.

    Args:
        moments: as an optimiser left them.
        into: ``step.moments``.
        client: its position, where they are stacked.
    """
    for name, of_parameter in moments.items():
        for kind, value in of_parameter.items():
            into[f"{name}/{kind}"] = (value if client is None else value[client]).clone()
