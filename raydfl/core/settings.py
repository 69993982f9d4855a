"""Base classes of configurations: strict types and groups of settings."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema

FIRST_VIEW = ""
"""Name of the view of ``data.features`` in run folders."""


class StrictTypes:
    """Base class for strict options: no conversion between text, booleans, integers and fractions. Numbers are finite.

    A field that accepts infinity declares it: ``Annotated[float, Field(allow_inf_nan=True)]``.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Make numbers and booleans strict. Lists still convert to tuples, and text to paths."""
        schema = handler(source)
        _make_strict(handler.resolve_ref_schema(schema))
        return schema


def _make_strict(schema: Any) -> None:
    """Make numbers and booleans of a pydantic core schema strict, in place."""
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
            if key not in ("default", "expected", "metadata") or not isinstance(kind, str):  # else a field name
                _make_strict(part)


class Settings(StrictTypes, BaseModel):
    """A frozen, validated group of settings. Unknown keys are errors.

    Give each field a description with its unit and range: ``raydfl config FILE`` prints them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    tree: ClassVar[type[Settings] | None] = None
    """The root group, for suggestions after an unknown key."""
