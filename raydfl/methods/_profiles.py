"""Numbers in the clients' profiles, which an option names by their column."""

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
        profile: of the client.
        column: the column.
        option: the option that names it, for the message.
        meaning: the number with its range, for the message.
        is_valid: whether a number is in the range.
        who: the client, for the message.

    Raises:
        ConfigError: there is no number in the range.
    """
    value = profile.get(column)
    try:
        number = math.nan if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not is_valid(number):
        raise ConfigError(
            f"method.{option}: the profile of {who} has {value!r} under {column!r}; it must be {meaning}. Set "
            f"data.profile='{{{column}: {{values: [...]}}}}'"
        )
    return number
