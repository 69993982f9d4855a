"""Labels with several classes each (``data.label_sets``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from raydfl.core.errors import DataError
from raydfl.core.settings import Settings
from raydfl.data.steps.listing import natural_order


class LabelSetSettings(Settings):
    """Settings of labels with several classes each."""

    separator: str = Field(
        "|",
        min_length=1,
        description="Separator of the classes in a label, such as dog|rain. The separator alone is a label without classes.",
    )


def split_labels(labels: Sequence[str], separator: str) -> tuple[list[str], np.ndarray]:
    """Split labels into classes.

    Args:
        labels: the distinct labels of the manifest.
        separator: separator of the classes in a label.

    Returns:
        Names of the classes in natural order, and a mask of each label's classes, bool [labels, classes].

    Raises:
        DataError: the labels are empty.
    """
    sets = [{name.strip() for name in label.split(separator)} - {""} for label in labels]
    classes = natural_order(list(set().union(*sets)))
    if not classes:
        raise DataError(
            f"data.label_sets: no label has a class with the separator {separator!r}. Set data.label_sets.separator"
        )
    return classes, np.array([[name in names for name in classes] for names in sets], bool)
