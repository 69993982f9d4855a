"""Gaussian mechanism: the sum of the clients' clipped changes plus noise, divided by the expected cohort.

H. B. McMahan, D. Ramage, K. Talwar, L. Zhang, Learning Differentially Private Recurrent Language Models, ICLR 2018, algorithm 1
with the estimator of fixed denominator:

    w <- w + (sum of delta_k min(1, clip / ||delta_k||) + z) / cohort,      delta_k = w_k - w,      z ~ N(0, (noise clip)^2 I)

The clip may follow a quantile of the norms: G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy, Differentially Private Learning
with Adaptive Clipping, NeurIPS 2021, algorithm 1 and theorem 1:

    b    <- 1/2 + (sum of (1[||delta_k|| <= clip] - 1/2) + N(0, sigma^2)) / cohort
    clip <- clip exp(-rate (b - quantile)),      z ~ N(0, (noise' clip)^2 I),      noise' = (noise^-2 - (2 sigma)^-2)^(-1/2)

With ``noise'`` in the sum and ``sigma`` in the count, a round has the guarantee of ``noise`` alone.

The norm may be bounded for each tensor by itself: tensor i of size d_i by clip (d_i / d)^(1/2), with d the sum of sizes. These
bounds together are ``clip``, so the noise and the guarantee do not change.

The cohort is the expected number of clients, a constant. Leaving out any client moves the sum by at most ``clip``, and replacing
it by at most ``2 clip``. Dividing by the number of arrived clients would break this bound.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.errors import ConfigError, RaydflError
from raydfl.core.settings import StrictTypes
from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Metrics, Ratio, Tensors, Update
from raydfl.rules._changes import ServerTensors
from raydfl.rules._cuts import fill_cuts
from raydfl.rules._rule import Aggregate
from raydfl.rules._weights import find_unweighted, flatten_current, scale_weight
from raydfl.rules.centred_clipping import clip_factors
from raydfl.rules.uniform_mean import UniformMean
from raydfl.rules.weighted_mean import WeightedMean

Normals = Callable[[int], np.ndarray]
"""Function from a size to independent standard normal numbers, float64 [size]."""
_STRIP = 8192
"""Elements of a change within the first-level cache as float64."""
_WHOLE = ""
"""Name of the vector of all tensors. No tensor has it."""


@dataclass(frozen=True)
class AdaptiveClip(StrictTypes):
    """Clip that follows a quantile of the norms of the clients' changes."""

    start: Annotated[float, Field(gt=0, description="Clip of the first round.")]
    quantile: Annotated[
        float, Field(gt=0, lt=1, description="Fraction of the clients whose changes are not clipped.")
    ] = 0.5
    rate: Annotated[float, Field(gt=0, description="Step size of the logarithm of the clip.")] = 0.2
    noise: Annotated[
        float | None,
        Field(
            gt=0,
            description="Standard deviation of the noise in the number of clients without clipping. It exceeds half of the rule's "
            "noise. null: train.cohort / 20.",
        ),
    ] = None

    def count_noise(self, cohort: int) -> float:
        """Return the standard deviation of the noise in the count."""
        return cohort / 20 if self.noise is None else self.noise


@dataclasses.dataclass(frozen=True, slots=True)
class NoisySum:
    """Noisy sum of a round."""

    update: Update
    """Partial sum over the expected cohort (:attr:`raydfl.Update.senders`)."""
    metrics: Metrics
    """``gaussian/clipped`` (share of clipped vectors) and ``gaussian/norm`` (mean norm of the changes), outside the guarantee."""
    clip: float
    """Clip of the next round."""


@dataclass(frozen=True)
class Gaussian(UniformMean):
    """Differentially private mean: clipped changes and Gaussian noise, divided by the expected cohort.

    All clients count the same. The change of a client is one vector over all tensors that it sends (option ``groups``). Elements of
    weight 0, and tensors that a client does not send, are unchanged. So are the tensors of a missing client: the sum is divided by
    the expected cohort in any case. Every tensor of the state's entry ``global`` receives noise, also in a round without clients.
    The accounting, the key of the noise and the limits of the guarantee are described on the page about differential privacy.
    """

    relative: ClassVar[bool] = True
    associative: ClassVar[bool] = False

    key: ClassVar[str] = "global"
    """The only entry of the server's state that clients may update."""

    clip: Annotated[
        Annotated[float, Field(gt=0, allow_inf_nan=True)] | AdaptiveClip,
        Field(
            description="Maximum Euclidean norm of a client's change. .inf: no clipping, only without noise. {start: 1.0}: the "
            "clip follows a quantile of the norms, with the options quantile, rate and noise.",
        ),
    ] = 1.0
    noise: Annotated[
        float | None,
        Field(
            ge=0,
            description="Noise multiplier: standard deviation of the noise in the sum, divided by clip. 0: no noise and no "
            "guarantee. null: calibrated to epsilon.",
        ),
    ] = None
    epsilon: Annotated[
        float | None,
        Field(
            gt=0,
            description="Epsilon after train.rounds rounds, to calibrate the noise before the first round. null: noise "
            "is set.",
        ),
    ] = None
    groups: Annotated[
        Literal["all", "tensors"],
        Field(
            description="Vectors with a clip of their own. all: the whole change. tensors: each tensor, by clip times the root of "
            "its share of all elements.",
        ),
    ] = "all"
    bands: Annotated[
        int,
        Field(
            ge=1,
            description="Rounds with correlated noise. Above 1, the noise of a round cancels parts of the earlier noise. It needs "
            "train.clients.rest of at least this number.",
        ),
    ] = 1

    @model_validator(mode="after")
    def _check_noise(self) -> Gaussian:
        if self.noise is not None and self.epsilon is not None:
            raise ValueError(
                f"noise ({self.noise:g}) and epsilon ({self.epsilon:g}) are both set. Remove one of the two"
            )
        if self.clip == np.inf and (self.noise or self.epsilon):
            raise ValueError("clip is .inf, so no noise can hide a client. Set clip to a number")
        for name, neutral in {"groups": "all", "bands": 1}.items():
            if isinstance(self.clip, AdaptiveClip) and getattr(self, name) != neutral:
                raise ValueError(f"{name}={getattr(self, name)} needs a constant clip. Set clip to a number")
        return self

    def check(self, tensors: Mapping[str, Tensors]) -> None:
        """Reject states whose tensors cannot bear noise.

        Raises:
            ConfigError: The state has no entry ``global``, or statistics of batch normalisation.
        """
        if self.key not in tensors:
            raise ConfigError(
                f"method.rule: gaussian adds noise to the state's entry {self.key!r}, but this method has "
                f"{', '.join(tensors)}. Choose a method with one global model"
            )
        variances = [name for name in tensors[self.key] if name.endswith("running_var")]
        if variances and self.noise != 0:
            raise ConfigError(
                f"method.rule: with noise, the variance {variances[0]!r} of batch normalisation may become negative. Choose a "
                f"model with group normalisation, or the method fedbn"
            )

    @property
    def first_clip(self) -> float:
        """Clip of the first round."""
        return self.clip.start if isinstance(self.clip, AdaptiveClip) else self.clip

    def split_noise(self, noise: float, cohort: int) -> tuple[float, float]:
        """Divide the noise of a round between the sum and the count of clients without clipping.

        Args:
            noise: Noise multiplier of the round.
            cohort: Expected number of clients.

        Returns:
            The noise multiplier of the sum, and the standard deviation of the noise in the count (0: the clip is constant).

        Raises:
            ConfigError: The noise of the count alone reveals more than ``noise`` allows.
        """
        if not isinstance(self.clip, AdaptiveClip) or not noise:
            return noise, 0.0
        count = self.clip.count_noise(cohort)
        if 2 * count <= noise:
            raise ConfigError(
                f"method.rule.clip.noise: {count:g} is at most half of the noise multiplier {noise:.4g}, so the count of clients "
                f"without clipping reveals more than the whole round may. Set it above {noise / 2:.4g}"
            )
        return (noise**-2 - (2 * count) ** -2) ** -0.5, count

    def sum_privately(
        self,
        updates: Iterable[Update],
        current: Mapping[str, Tensors],
        cohort: int,
        noise: float,
        normals: Normals,
        clip: float | None = None,
    ) -> NoisySum:
        """Add up the clipped updates of a round, and add the noise.

        Args:
            updates: Updates with finite tensors, in client order. They can be read once.
            current: The server's tensors by key.
            cohort: Expected number of clients.
            noise: Noise multiplier.
            normals: Source of the noise.
            clip: Clip of the round; ``None``: of the first round.

        Returns:
            The sum over ``cohort`` clients, for :meth:`__call__`. Clients that are missing count as clients without a change.

        Raises:
            RaydflError: An update is for an unexpected key, does not fit the server's tensors, or has an invalid weight.
        """
        clip = self.first_clip if clip is None else clip
        base, layout = ServerTensors(current), Layout.from_tensors(current[self.key])
        lengths: list[float] = []
        factors: list[float] = []
        limits = {_WHOLE: clip}
        if self.groups == "tensors":
            sizes = {name: math.prod(shape) for name, shape in zip(layout.names, layout.shapes, strict=True)}
            limits = {name: clip * math.sqrt(size / layout.size) for name, size in sizes.items()}

        def clip_changes(updates: Iterable[Update]) -> Iterator[Update]:
            for update in updates:
                if update.key != self.key:
                    raise RaydflError(
                        f"client {update.client_id!r} updates {update.key!r}, but gaussian protects {self.key!r} only."
                    )
                whole = fill_cuts(update, current[self.key])
                squares = _square_changes(whole, base, limits)
                lengths.append(math.sqrt(sum(squares.values())))
                own = clip_factors(np.sqrt([*squares.values()]), np.array([limits[name] for name in squares])).tolist()
                factors.extend(own)
                # A factor on the weight is exact, whereas a float32 model with a scaled change would exceed the norm slightly.
                weight = _scale_weights(self._effective_weight(whole.weight), dict(zip(squares, own, strict=True)))
                yield dataclasses.replace(whole, weight=weight)

        sums = WeightedMean().sum_updates(clip_changes(updates), {self.key: layout})
        total = _fill_missing(sums, layout, flatten_current(current[self.key], layout), cohort)
        of_sum, of_count = self.split_noise(noise, cohort)
        drawn = normals(layout.size + (of_count > 0)) if noise else np.zeros(0)
        if noise:
            total += of_sum * clip * drawn[: layout.size]
        if isinstance(self.clip, AdaptiveClip):
            count = sum((length <= clip) - 0.5 for length in lengths) + of_count * float(sum(drawn[layout.size :]))
            clip *= math.exp(-self.clip.rate * (0.5 + count / cohort - self.clip.quantile))
        metrics: Metrics = {
            "gaussian/clipped": Ratio(sum(factor < 1 for factor in factors), len(factors)),
            "gaussian/norm": Ratio(sum(lengths), len(lengths)),
        }
        senders = dict.fromkeys(layout.names, cohort)
        update = Update(FlatTensors(layout, total), float(cohort), key=self.key, senders=senders)
        return NoisySum(update, metrics, clip)

    def __call__(
        self, updates: Iterable[Update], current: Mapping[str, Tensors], rng: np.random.Generator | None = None
    ) -> Aggregate:
        """Divide the noisy sum of :meth:`sum_privately` by the cohort.

        Raises:
            RaydflError: An update is of a single client.
        """
        return super().__call__(map(_check_summed, updates), current)

    def _effective_weight(self, weight: Any) -> Any:
        """Return weights of 0 and 1 in float64. Factors in float32 would exceed the norm slightly."""
        effective = super()._effective_weight(weight)
        return effective.double() if isinstance(effective, Tensor) else effective


def _scale_weights(weight: Any, factors: Mapping[str, float]) -> Any:
    """Multiply a weight by the factor of the whole update, or by a factor for each tensor."""
    if _WHOLE in factors:
        return scale_weight(weight, factors[_WHOLE])
    return {
        name: (weight[name] if isinstance(weight, Mapping) else weight) * factor for name, factor in factors.items()
    }


def _square_changes(update: Update, base: ServerTensors, limits: Mapping[str, float]) -> dict[str, float]:
    """Compute the squared norm of each vector of an update's change in float64, because the guarantee depends on it.

    Args:
        update: The update.
        base: The server's tensors.
        limits: Clips of the vectors: of the whole change, or by name of the server's tensors.

    Raises:
        RaydflError: The server has no tensor of this name.
    """
    sent = FlatTensors.from_tensors(update.tensors)
    server, mask = base.flatten_like(update, sent.layout), find_unweighted(update, sent.layout)
    groups = {_WHOLE: slice(0, sent.layout.size)}
    if _WHOLE not in limits:
        if unknown := [name for name in sent.layout.names if name not in limits]:
            raise RaydflError(f"client {update.client_id!r} sends {unknown[0]!r}, a tensor without a clip.")
        groups = {name: sent.layout.columns(name) for name in sent.layout.names}
    squares = {}
    for name, columns in groups.items():
        squares[name] = 0.0
        for begin in range(columns.start, columns.stop, _STRIP):
            strip = slice(begin, min(begin + _STRIP, columns.stop))
            change = np.subtract(sent.vector[strip], server[strip], dtype=np.float64)
            if mask is not None:
                change[mask[strip]] = 0
            squares[name] += float(np.dot(change, change))
    return squares


def _fill_missing(sums: Sequence[Update], layout: Layout, server: np.ndarray, cohort: int) -> np.ndarray:
    """Add the server's values, for clients without a change, until the weights are the cohort: float64 [layout.size]."""
    total, missing = np.zeros(layout.size), np.full(layout.size, float(cohort))
    for summed in sums:
        sent = cast(FlatTensors, summed.tensors)
        for name, shape in zip(sent.layout.names, sent.layout.shapes, strict=True):
            weight = summed.weight[name] if isinstance(summed.weight, Mapping) else summed.weight
            total[layout.columns(name)] = sent.vector[sent.layout.columns(name)]
            missing[layout.columns(name)] -= np.broadcast_to(np.asarray(weight), shape).ravel()
    total += missing * server
    return total


def _check_summed(update: Update) -> Update:
    """Reject the update of a single client, which has neither been clipped nor received noise.

    Raises:
        RaydflError: The update is of a single client.
    """
    if update.senders is None:
        raise RaydflError("gaussian adds its noise in a run. Outside of a run, call sum_privately first.")
    return update
