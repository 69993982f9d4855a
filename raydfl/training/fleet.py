"""Settings of asynchronous training in virtual time: the group ``train.fleet``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from raydfl.core.settings import Settings


class StaleSettings(Settings):
    """Treatment of updates whose training began some server steps ago."""

    power: float = Field(
        0.5,
        ge=0,
        allow_inf_nan=False,
        description="Exponent of the factor (1 + staleness)^-power on a client's change. 0: no factor.",
    )
    most: int | None = Field(
        None, ge=0, description="Largest staleness in server steps. Older results are dropped. null: no limit."
    )


class SecondsSettings(Settings):
    """Virtual duration of a client's work."""

    start: float = Field(0.0, ge=0, allow_inf_nan=False, description="Seconds before the first example.")
    example: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="Seconds for a training example in a local epoch."
    )
    down: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Download rate in bytes per second. null: no download time."
    )
    up: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Upload rate in bytes per second, for an update of the size of the received entries. null: no upload time.",
    )
    spread: float = Field(
        0.0,
        ge=0,
        le=10,
        description="Sigma of the log-normal factor on a client's start and example, drawn once per client from run.seed. 0: equal "
        "clients.",
    )

    @model_validator(mode="after")
    def _check_duration(self) -> SecondsSettings:
        if self.start + self.example == 0:
            raise ValueError("start and example are both 0, so work would take no time. Set one of them above 0")
        return self


class FleetSettings(Settings):
    """Asynchronous training in virtual time. A round is a server step."""

    buffer: int | None = Field(
        None, ge=1, description="Number of updates in a server step. null: the size of train.cohort."
    )
    concurrency: int | None = Field(
        None,
        ge=1,
        description="Number of clients that train at the same time, at least buffer. null: buffer, which is synchronous training.",
    )
    stale: StaleSettings = StaleSettings()
    mix: Literal["change", "model"] = Field(
        "change",
        description="Contribution of a stale client. change: the difference between its model and the state at its start "
        "(FedBuff). model: the difference between its model and the current state (FedAsync).",
    )
    over: float = Field(
        1.0,
        ge=1,
        allow_inf_nan=False,
        description="Factor on the number of clients that start in a synchronous step. The last to finish are dropped.",
    )
    lost: float = Field(0.0, ge=0, lt=1, description="Probability that a client's result never arrives.")
    seconds: SecondsSettings = SecondsSettings()
