"""Numeric columns of the clients' profiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from raydfl.core.errors import ConfigError


def read_number(
    profile: Mapping[str, Any],
    column: str,
    option: str,
    meaning: str,
    is_valid: Callable[[float], bool],
    who: str = "a client",
) -> float:
    """Return the number in a column of a client's profile.

    Args:
        profile: The client's profile.
        column: Name of the column.
        option: The method's option with this name, for the message.
        meaning: The number's meaning and range, for the message.
        is_valid: Returns whether a number is in the range.
        who: The client, for the message.

    Raises:
        ConfigError: The column has no number, or a number out of range.
    """
    value = profile.get(column)
    try:
        number = math.nan if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not is_valid(number):
        raise ConfigError(
            f"method.{option}: the profile of {who} has {value!r} under {column!r}. It must be {meaning}. Set "
            f"data.profile='{{{column}: {{values: [...]}}}}'."
        )
    return number
