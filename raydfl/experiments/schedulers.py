"""Settings of schedulers: early stopping of trials, and population based training. experiment.py makes Ray Tune's schedulers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raydfl.core.settings import Settings


class NoScheduler(Settings):
    """No early stopping: every trial trains for all rounds."""

    name: Literal["none"] = Field("none", description="Train every trial for all rounds.")


class AshaScheduler(Settings):
    """Asynchronous successive halving (L. Li et al., MLSys 2020): Ray Tune's AsyncHyperBandScheduler with a single bracket."""

    name: Literal["asha"] = Field(description="Stop all but the best trials at increasing numbers of rounds.")
    grace: int = Field(1, ge=1, description="Minimum rounds of every trial.")
    factor: float = Field(
        3.0,
        gt=1,
        description="The best 1 / factor of the trials continue after grace, grace * factor, grace * factor^2 ... rounds.",
    )


class MedianScheduler(Settings):
    """The median stopping rule of Google Vizier (D. Golovin et al., KDD 2017): Ray Tune's MedianStoppingRule."""

    name: Literal["median"] = Field(
        description="Stop trials with a best score below the median of the remaining trials."
    )
    grace: int = Field(1, ge=1, description="Minimum rounds of every trial.")
    trials: int = Field(3, ge=1, description="Minimum number of trials with as many rounds before a trial is stopped.")


class PopulationScheduler(Settings):
    """Population based training (M. Jaderberg et al., 2017): Ray Tune's PopulationBasedTraining with synch=True."""

    name: Literal["pbt"] = Field(description="Replace the worst members of a population by changed copies of the best.")
    interval: int = Field(ge=1, description="Rounds between two exchanges.")
    share: float = Field(
        0.25,
        gt=0,
        le=0.5,
        description="Fraction of the members that are replaced. The same number of members is copied.",
    )
    factor: float = Field(1.2, gt=1, description="A copy's settings are multiplied or divided by this factor.")
    resample: float = Field(
        0.25, ge=0, le=1, description="Probability of a new draw of a copy's setting instead of a change by factor."
    )


Scheduler = Annotated[NoScheduler | AshaScheduler | MedianScheduler | PopulationScheduler, Field(discriminator="name")]
