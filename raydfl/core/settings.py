"""The base of every typed part of a configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen, validated group of settings; unknown keys are errors.

    Each field carries a description, and its unit and range where it has them: ``raydfl config FILE`` prints them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
