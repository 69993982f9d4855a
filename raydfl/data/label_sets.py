"""Labels that are sets of classes: what ``data.label_sets`` says, and the classes of each such label."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from raydfl.core.errors import DataError
from raydfl.core.settings import Settings
from raydfl.data.steps.listing import natural_order


class LabelSetSettings(Settings):
    """A clip's label names several classes at once."""

    separator: str = Field(
        "|",
        min_length=1,
        description="What stands between the classes of a label: dog|rain. A label of it alone is of no class.",
    )


def sets_of(labels: Sequence[str], separator: str) -> tuple[list[str], np.ndarray]:
    """Return the classes that labels name, and which of them each label has.

    Args:
        labels: as the manifest has them, each once.
        separator: of :class:`LabelSetSettings`.

    Returns:
        Names of the classes, in natural order, and bool [labels, classes].

    Raises:
        DataError: no label names a class.
    """
    parts = [{part.strip() for part in label.split(separator)} - {""} for label in labels]
    classes = natural_order(list(set().union(*parts)))
    if not classes:
        raise DataError(f"data.label_sets: no label names a class; the separator is {separator!r}")
    return classes, np.array([[name in part for name in classes] for part in parts], bool)
