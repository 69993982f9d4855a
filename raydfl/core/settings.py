"""Bases of everything that a configuration sets: strict types, and typed groups of settings."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema

FIRST_VIEW = ""
"""Name of the view that ``data.features`` describes, as run folders have it."""


class StrictTypes:
    """Base of a class with options: booleans and text are no numbers, a fraction is no integer, and numbers are finite.

    A field that accepts infinity declares it: ``Annotated[float, Field(allow_inf_nan=True)]``.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's schema with strict numbers and booleans; lists still become tuples, and text paths."""
        schema = handler(source)
        _make_strict(handler.resolve_ref_schema(schema))
        return schema


def _make_strict(schema: Any) -> None:
    if isinstance(schema, (list, tuple)):
        for part in schema:
            _make_strict(part)
    elif isinstance(schema, dict):
        kind = schema.get("type")
        if kind in ("bool", "int", "float"):
            schema.setdefault("strict", True)
        if kind == "float":
            schema.setdefault("allow_inf_nan", False)
        for key, part in schema.items():
            if key not in ("default", "expected", "metadata") or not isinstance(kind, str):  # else a field's name
                _make_strict(part)


class Settings(StrictTypes, BaseModel):
    """A frozen, validated group of settings; unknown keys are errors.

    Each field carries a description, and its unit and range where it has them: ``raydfl config FILE`` prints them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    tree: ClassVar[type[Settings] | None] = None
    """The group of all settings, in which the nearest one to an unknown key is looked for."""
