"""Norm clipping: no client's change is longer than a bound.

Z. Sun, P. Kairouz, A. T. Suresh, H. B. McMahan, Can You Really Backdoor Federated Learning?, 2019, section 5 (norm
thresholding of updates):

    w <- w + sum of a_k delta_k / max(1, ||delta_k|| / norm) / sum of a_k,      delta_k = w_k - w
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.types import Ratio, Tensors, Update
from raydfl.rules._changes import Base
from raydfl.rules._cuts import filled
from raydfl.rules._rule import Aggregate
from raydfl.rules.centred_clipping import shortening
from raydfl.rules.weighted_mean import WeightedMean


@dataclass(frozen=True)
class NormClipping(WeightedMean):
    """The weighted mean of the clients' models, each pulled towards the server's until it is no further from it than a bound.

    The paper also adds noise, which this rule does not. A client's change is all that it sends for one key, taken as one vector;
    elements without weight (masks) do not count, and where the server has no such tensor the difference is to 0. A client within
    the bound counts exactly as in the weighted mean. With a number for ``norm`` updates are taken one after another, so that memory
    does not grow with the cohort. The report has the clients clipped (``norm_clipping/clipped``) and the mean length
    of the changes (``norm_clipping/norm``); a client's influence is the share of its change that was left.
    """

    relative: ClassVar[bool] = True

    norm: Annotated[
        float | None,
        Field(
            gt=0,
            allow_inf_nan=True,
            description="longest change that counts in full; null: the median over the round's clients (a deviation from the "
            "paper, which sets it by hand); .inf: the weighted mean",
        ),
    ] = None

    def __call__(
        self, updates: Iterable[Update], current: Mapping[str, Tensors], rng: np.random.Generator | None = None
    ) -> Aggregate:
        """See :class:`Rule`."""
        base = Base(current)
        whole = (filled(update, current.get(update.key, {})) for update in updates)
        measured: Iterable[tuple[Update, float]] = ((update, base.length(update)) for update in whole)
        limit = self.norm
        if limit is None:
            measured = list(measured)
            limit = float(np.median([length for _, length in measured])) if measured else 0.0
        lengths: list[float] = []
        factors: list[float] = []

        def clipped(limit: float) -> Iterable[Update]:
            for update, length in measured:
                lengths.append(length)
                factors.append(float(shortening(np.array([length]), limit)[0]))
                yield update if factors[-1] == 1 else base.shortened(update, factors[-1])

        result = super().__call__(clipped(limit), current)
        report = {
            "norm_clipping/clipped": Ratio(sum(factor < 1 for factor in factors), len(factors)),
            "norm_clipping/norm": Ratio(sum(lengths), len(lengths)),
        }
        return Aggregate(result.tensors, report, np.array(factors))
