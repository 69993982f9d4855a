"""Transcripts as labels: sequences of words or characters (``data.label_sequences``)."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from raydfl.core.errors import DataError
from raydfl.core.settings import Settings
from raydfl.data.steps.listing import natural_order

END = -1
"""Value after the last unit of a sequence."""


class LabelSequenceSettings(Settings):
    """Settings of transcripts as labels."""

    units: Literal["words", "characters"] = Field(
        "characters",
        description="Units of a transcript, the classes of the data. characters: letters, digits and the space.",
    )
    separator: str = Field(
        " ", min_length=1, description="Separator of the words in a label. A space: any white space."
    )
    keep: str = Field(
        "",
        description="Characters to keep in addition to letters and digits, for example an apostrophe. The rest is removed, and "
        "letters become lower case. A label without any is the transcript of silence.",
    )

    @property
    def joint(self) -> str:
        """Text between two units of a transcript."""
        return " " if self.units == "words" else ""

    def split(self, label: str) -> list[str]:
        """Normalise a label, and split it into units."""
        separator = None if self.separator == " " else _normalise(self.separator)  # None: any white space
        words = ["".join(filter(self._is_kept, word)) for word in _normalise(label).split(separator)]
        words = [word for word in words if word]
        return words if self.units == "words" else list(" ".join(words))

    def _is_kept(self, character: str) -> bool:
        # Marks (M) are parts of letters in many scripts.
        return character in self.keep or unicodedata.category(character)[0] in "LMN"


def _normalise(label: str) -> str:
    return unicodedata.normalize("NFC", label.lower())


def split_sequences(labels: Sequence[str], settings: LabelSequenceSettings) -> tuple[list[str], np.ndarray]:
    """Split labels into sequences of units.

    Args:
        labels: the distinct labels of the manifest.
        settings: units and normalisation.

    Returns:
        Names of the units in natural order, and their indices in each label: int32 [labels, longest], -1 after the end.

    Raises:
        DataError: all transcripts are empty.
    """
    transcripts = [settings.split(label) for label in labels]
    units = natural_order(list({unit for transcript in transcripts for unit in transcript}))
    if not units:
        raise DataError(
            f"data.label_sequences: all {len(labels)} transcripts are empty. Labels need letters or digits, or characters in "
            f"data.label_sequences.keep"
        )
    code = {unit: number for number, unit in enumerate(units)}
    sequences = np.full((len(labels), max(map(len, transcripts))), END, np.int32)
    for row, transcript in zip(sequences, transcripts, strict=True):
        row[: len(transcript)] = [code[unit] for unit in transcript]
    return units, sequences


def join_units(units: Sequence[str], sequence: np.ndarray, joint: str) -> str:
    """Convert a sequence of unit indices (int [length], -1 after the end) to text.

    Args:
        units: names of the units.
        sequence: the indices.
        joint: text between two units.
    """
    return joint.join(units[index] for index in sequence.tolist() if index != END)


def contains_units(sequences: np.ndarray, units: int) -> np.ndarray:
    """Return the units in each sequence (int32 [labels, longest]): bool [labels, units]."""
    members = np.zeros((len(sequences), units + 1), bool)
    members[np.arange(len(sequences))[:, None], sequences] = True  # END is the last column
    return members[:, :units]


def find_rarest_units(labels: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Return the rarest unit of each clip by the number of clips with it, the smallest index in a tie: int64 [clips].

    Clips without units, or without a label, have the code -1.

    Args:
        labels: int [clips], rows of ``members``. Negative: unknown.
        members: bool [labels, units], the units of each label.
    """
    counts = np.bincount(labels[labels >= 0], minlength=len(members)) @ members
    rarest = np.where(members, counts, counts.max(initial=0) + 1).argmin(axis=1)
    rarest[~members.any(axis=1)] = -1
    return np.where(labels < 0, -1, rarest[labels])


def replace_units(units: Sequence[str], settings: LabelSequenceSettings, drawn: np.ndarray) -> list[str]:
    """Write transcripts with new units, the inverse of :meth:`LabelSequenceSettings.split`.

    Args:
        units: names of the units.
        settings: units and normalisation.
        drawn: int [transcripts, longest], indices of units, -1 after the end.
    """
    texts = [join_units(units, row, settings.joint) for row in drawn]
    # A label must not be empty.
    return [text.replace(" ", settings.separator) or settings.separator for text in texts]
