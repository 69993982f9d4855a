"""Size of a block (``train.block``), and the settings that exclude blocks."""

from __future__ import annotations

from raydfl.core.errors import ConfigError
from raydfl.engine.assembly import Components
from raydfl.engine.groups import Grouped
from raydfl.training import TrainSettings

_LARGEST = 16
"""Largest automatic number of clients in a block. The server's cost for a block of 16 is about that for two clients."""
_BLOCKS = 256
"""Smallest number of blocks in a round with automatic blocks. Fewer blocks would leave actors of a large pool without work."""


def check_block(train: TrainSettings, components: Components) -> None:
    """Reject blocks if the server needs single updates.

    Raises:
        ConfigError: ``train.block`` is a number above 1, and the rule or another setting needs single updates.
    """
    reason = _explain_single_updates(train, components)
    if isinstance(train.block, int) and train.block > 1 and reason:
        raise ConfigError(
            f"train.block={train.block} adds the updates of {train.block} clients before they reach the server, but {reason}. Set "
            f"train.block to 1 or auto"
        )


def choose_block(train: TrainSettings, components: Components, cohort: int) -> int:
    """Return the number of clients in a block: ``train.block``, or the automatic number for a cohort."""
    if isinstance(train.block, int):
        return train.block
    return 1 if _explain_single_updates(train, components) else max(1, min(_LARGEST, cohort // _BLOCKS))


def _explain_single_updates(train: TrainSettings, components: Components) -> str:
    """Return the reason why the server needs single updates; empty: it does not."""
    method, rule = components.method, components.rule
    if not rule.associative:
        return f"rule {type(rule).__name__} needs each update (method.rule)"
    if isinstance(method, Grouped):
        return "train.groups needs each update"
    if not method.associative:
        return f"method {type(method).__name__} needs each update"
    if components.attack is not None:
        return "attack changes single updates"
    if train.fleet is not None:
        return "train.fleet scales single updates"
    if train.deadline is not None:
        return "train.deadline limits the time of each client"
    return ""
