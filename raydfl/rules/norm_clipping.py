"""Norm clipping: weighted mean of the clients' changes, each clipped to a maximum norm.

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
from raydfl.rules._changes import ServerTensors
from raydfl.rules._cuts import fill_cuts
from raydfl.rules._rule import Aggregate
from raydfl.rules.centred_clipping import clip_factors
from raydfl.rules.weighted_mean import WeightedMean


@dataclass(frozen=True)
class NormClipping(WeightedMean):
    """Weighted mean of the clients' models, with changes clipped to a maximum norm.

    Deviation: the paper also adds noise. The change of a client is one vector over all tensors that it sends for a key.
    Elements of weight 0 are ignored, and tensors that the server lacks count as 0 there. Clients within the bound count
    exactly as in the weighted mean. If ``norm`` is a number, updates are streamed, and memory does not grow with the cohort.
    The report contains the clipped clients (``norm_clipping/clipped``) and the mean norm of the changes
    (``norm_clipping/norm``). The influence of a client is the factor that clipped its change.
    """

    relative: ClassVar[bool] = True

    norm: Annotated[
        float | None,
        Field(
            gt=0,
            allow_inf_nan=True,
            description="Maximum Euclidean norm of a change. null: the median norm of the cohort (deviation: the paper sets a "
            "constant). .inf: no clipping, the weighted mean.",
        ),
    ] = None

    @property
    def collects(self) -> bool:
        """Return True for the median norm, which needs all updates."""
        return self.norm is None

    def __call__(
        self, updates: Iterable[Update], current: Mapping[str, Tensors], rng: np.random.Generator | None = None
    ) -> Aggregate:
        """Clip the changes and average the updates."""
        base = ServerTensors(current)
        whole = (fill_cuts(update, current.get(update.key, {})) for update in updates)
        measured: Iterable[tuple[Update, float]] = ((update, base.change_norm(update)) for update in whole)
        limit = self.norm
        if limit is None:
            measured = list(measured)
            limit = float(np.median([length for _, length in measured])) if measured else 0.0
        lengths: list[float] = []
        factors: list[float] = []

        def clip(limit: float) -> Iterable[Update]:
            for update, length in measured:
                lengths.append(length)
                factors.append(float(clip_factors(np.array([length]), limit)[0]))
                yield update if factors[-1] == 1 else base.scale_change(update, factors[-1])

        result = super().__call__(clip(limit), current)
        report = {
            "norm_clipping/clipped": Ratio(sum(factor < 1 for factor in factors), len(factors)),
            "norm_clipping/norm": Ratio(sum(lengths), len(lengths)),
        }
        return Aggregate(result.tensors, report, np.array(factors))
