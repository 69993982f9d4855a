"""The contents of a search's file; docs/search.md explains it with an example."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from raydfl.core.errors import ConfigError
from raydfl.core.metrics import HIGHER_IS_BETTER, base_name
from raydfl.core.settings import Settings
from raydfl.experiments.metric import MetricSettings
from raydfl.experiments.plan import StudySettings
from raydfl.experiments.search.space import Domain


class SearchMetric(MetricSettings):
    """The number that is searched for the best of."""

    split: str = Field(
        "validation",
        description="what it was measured on: validation (the clients' own hold-out), or test, which chooses on the test data",
    )
    mode: Literal["max", "min"] | None = Field(
        None, description="whether the largest or the smallest is best; null: max of accuracies and F1, min of losses"
    )

    @property
    def best(self) -> Literal["max", "min"]:
        """The mode, of the score itself where none is given."""
        return self.mode or ("max" if HIGHER_IS_BETTER.get(base_name(self.score), True) else "min")

    @property
    def sign(self) -> float:
        """Factor that makes larger scores better ones."""
        return 1.0 if self.best == "max" else -1.0


class NoScheduler(Settings):
    """Every trial does all of its rounds."""

    name: Literal["none"] = Field("none", description="every trial does all of its rounds")


class AshaScheduler(Settings):
    """Asynchronous successive halving (L. Li and others, MLSys 2020), Ray Tune's AsyncHyperBandScheduler with one bracket."""

    name: Literal["asha"] = Field(description="trials that are behind at rising numbers of rounds are stopped")
    grace: int = Field(1, ge=1, description="rounds that every trial does")
    factor: float = Field(
        3.0,
        gt=1,
        description="one trial in so many goes on at each rung: grace, grace * factor, grace * factor^2 ... rounds",
    )


class MedianScheduler(Settings):
    """The median rule of Google Vizier (D. Golovin and others, KDD 2017), Ray Tune's MedianStoppingRule."""

    name: Literal["median"] = Field(description="a trial whose best score is worse than the others' median is stopped")
    grace: int = Field(1, ge=1, description="rounds that every trial does")
    trials: int = Field(3, ge=1, description="trials that must have come as far before any is stopped")


class PopulationScheduler(Settings):
    """Population based training (M. Jaderberg and others, 2017), all members in step."""

    name: Literal["pbt"] = Field(
        description="in turns, the worst members of a population go on as changed copies of the best"
    )
    interval: int = Field(ge=1, description="rounds between two turns")
    share: float = Field(
        0.25,
        gt=0,
        le=0.5,
        description="share of the members that copy at a turn, and of those that are copied; at least one",
    )
    factor: float = Field(1.2, gt=1, description="a copy's settings are multiplied by this or divided by it")
    resample: float = Field(0.25, ge=0, le=1, description="probability that a copy's setting is drawn anew instead")


Scheduler = Annotated[NoScheduler | AshaScheduler | MedianScheduler | PopulationScheduler, Field(discriminator="name")]


class SearchSettings(StudySettings):
    """The contents of a search's file."""

    space: dict[str, Domain] = Field(
        min_length=1, description="by setting, what it is drawn from: {method.alpha: {uniform: [0.1, 0.9]}}"
    )
    metric: SearchMetric = Field(SearchMetric(), description="the number that is searched for the best of")
    samples: int | None = Field(
        None, ge=1, description="trials; more may be asked for later; null: 10, or with searcher grid every combination"
    )
    scheduler: Scheduler = Field(NoScheduler(), description="which trials are stopped early: none, asha, median or pbt")
    searcher: Literal["random", "grid", "optuna"] = Field(
        "random",
        description="where settings come from: random draws, every combination, or Optuna's TPE, which learns from earlier trials",
    )
    parallel: int | None = Field(
        None, ge=1, description="trials at a time; null: as many as the cluster's resources allow"
    )
    rounds: int | None = Field(
        None, ge=1, description="most rounds of a trial; null: train.rounds of the configuration"
    )
    patience: int | None = Field(
        None, ge=1, description="a trial whose score did not improve for so many evaluations is stopped; null: never"
    )
    seed: int = Field(1, ge=0, description="decides the draws of the settings; the trials' own seed is run.seed")
    cpus: float = Field(1.0, gt=0, description="CPUs of a trial's own process, beside those of its client actors")
    retries: int = Field(3, ge=0, description="times a trial goes on elsewhere after its process or node was lost")

    @field_validator("scheduler", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _parts_fit(self) -> SearchSettings:
        space, pbt = self.space.items(), isinstance(self.scheduler, PopulationScheduler)
        ranges = [(key, domain.kind) for key, domain in space if domain.kind not in ("grid", "choice")]
        grids = [key for key, domain in space if domain.kind == "grid"]
        if self.searcher == "grid":
            for key, kind in ranges[:1]:
                raise ConfigError(
                    f"space.{key}: searcher grid needs a list of values, {{grid: [...]}}, not {kind}; or take searcher: random"
                )
            if self.samples is not None:
                raise ConfigError("samples: searcher grid does every combination; leave samples out")
        elif grids:
            raise ConfigError(
                f"space.{grids[0]}: grid needs searcher: grid; for searcher {self.searcher} write {{choice: [...]}}"
            )
        if pbt and self.searcher != "random":
            raise ConfigError(
                f"searcher: {self.searcher} does not go with scheduler pbt, whose members change their settings themselves; "
                f"take searcher: random"
            )
        if pbt and self.patience is not None:
            raise ConfigError("patience does not go with scheduler pbt, whose members all do the same rounds")
        return self
