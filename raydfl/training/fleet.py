"""Settings of asynchronous training in virtual time: the group ``train.fleet``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from raydfl.core.settings import Settings


class StaleSettings(Settings):
    """Treatment of stale updates, trained from an earlier state of the server."""

    power: float = Field(
        0.5,
        ge=0,
        allow_inf_nan=False,
        description="Exponent of the factor (1 + staleness)^-power on a client's change. 0: no factor.",
    )
    most: int | None = Field(
        None, ge=0, description="Largest staleness in server steps. Older results are dropped. null: no limit."
    )


Duration = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SecondsSettings(Settings):
    """Virtual duration of a client's work."""

    start: Duration | str = Field(
        0.0, description="Seconds before the first example: a number of at least 0, or a column of the profile."
    )
    example: Duration | str = Field(
        1.0,
        description="Seconds for a training example in a local epoch: a number of at least 0, or a column of the profile.",
    )
    down: Rate | str | None = Field(
        None,
        description="Download rate in bytes per second: a number above 0, or a column of the profile. null: no download time.",
    )
    up: Rate | str | None = Field(
        None,
        description="Upload rate in bytes per second, for an update as large as the received tensors: a number above 0, or a "
        "column of the profile. null: no upload time.",
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
        if self.start == 0 == self.example:
            raise ValueError("start and example are both 0, so work would take no time. Set one of them above 0")
        return self

    @property
    def columns(self) -> dict[str, str]:
        """Required columns of the profile by setting."""
        values = {name: getattr(self, name) for name in ("start", "example", "down", "up")}
        return {name: value for name, value in values.items() if isinstance(value, str)}


class HoursSettings(Settings):
    """Training hours of clients, in virtual time."""

    column: str = Field(
        description="Column of the profile with the hours of each client: spans of seconds within the period, such as "
        "'0-3600 7200-10800'. A client starts within its hours, and is lost if its work ends later."
    )
    period: float = Field(86400.0, gt=0, allow_inf_nan=False, description="Seconds after which the hours repeat.")
    most: float = Field(
        10.0,
        gt=0,
        allow_inf_nan=False,
        description="Largest duration of a server step in periods. A longer step ends then, with the clients that have arrived.",
    )


class FleetSettings(Settings):
    """Asynchronous training in virtual time. A round is a server step."""

    buffer: int | None = Field(
        None, ge=1, description="Number of updates in a server step. null: the size of train.cohort."
    )
    concurrency: int | None = Field(
        None,
        ge=1,
        description="Number of clients in training at the same time, at least buffer. null: buffer (synchronous training).",
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
    lost: float = Field(0.0, ge=0, lt=1, description="Probability of losing a client's result.")
    seconds: SecondsSettings = SecondsSettings()
    hours: HoursSettings | None = None
