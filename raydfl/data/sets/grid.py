"""GRID (M. Cooke and others, JASA 120, 2006): 34 speakers of British English, 1,000 sentences each. The label is the sentence.

A sentence has a command, a colour, a preposition, a letter, a digit and an adverb. Its letters are the name of the file:
``bbaf2n`` is "bin blue at f two now". ``root`` contains a folder for each speaker (s1 to s34), of videos or of recordings.
Videos need the extra ``video`` (docs/data.md#videos). Other files, such as alignments, are ignored. Only six videos without a
speaker were available: folders of speakers are tested on small trees.

    data:
      name: grid
      root: PATH/TO/video/GRID
      label_sequences: {units: words}
      partition: {by: iid, clients: 2}
      split: {test: null}
    objective: transcribe
    models: {model: crnn_base}

For the complete set write ``partition: {by: group}``, and for example ``split: {test: {by: group, values: [s1, s2, s20, s22]}}``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.audio import AUDIO_SUFFIXES
from raydfl.data.dataset import Card
from raydfl.data.manifest import VIDEO_SUFFIXES
from raydfl.data.sets._files import FileDataset

_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
GRAMMAR: tuple[Mapping[str, str], ...] = (
    {"b": "bin", "l": "lay", "p": "place", "s": "set"},
    {"b": "blue", "g": "green", "r": "red", "w": "white"},
    {"a": "at", "b": "by", "i": "in", "w": "with"},
    {letter: letter for letter in "abcdefghijklmnopqrstuvxyz"},
    {"z": "zero", **{str(digit): word for digit, word in enumerate(_NUMBERS, start=1)}},
    {"a": "again", "n": "now", "p": "please", "s": "soon"},
)
"""Words at each position of a sentence, by their letter in names of files."""


def _decode(name: str) -> str:
    """Return the sentence of a file name without suffix.

    Raises:
        KeyError: a letter has no word at its position.
        ValueError: the name does not have six letters.
    """
    return " ".join(words[letter] for words, letter in zip(GRAMMAR, name, strict=True))


@dataclass(frozen=True, kw_only=True)
class Grid(FileDataset):
    """Sentences of six words, with sound and video.

    Groups are speakers (``s1``). A file outside a speaker's folder has no group. The set has no official split.
    """

    card: ClassVar[Card] = Card(
        title="GRID audio-visual sentence corpus",
        layout="s{speaker}/{letters of the sentence}.mpg or .wav, such as s1/bbaf2n.mpg for 'bin blue at f two now'",
        licence="CC BY 4.0",
        url="https://zenodo.org/records/3625687",
    )
    files: ClassVar = f".*({'|'.join(map(re.escape, (*AUDIO_SUFFIXES, *VIDEO_SUFFIXES)))})"
    pattern: ClassVar = r"(?:(?:.*/)?(?P<group>s\d+)/)?(?:.*/)?(?P<label>[^/.]+)\.\w+"
    codes: ClassVar = {"label": _decode}

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the sentences.

        Raises:
            DataError: a file has an unexpected name, or a speaker has two files of a sentence.
        """
        rows = super().rows(root)
        clips: dict[tuple[str | None, str], str] = {}
        for row in rows:
            other = clips.setdefault((row["group"], row["label"]), row["clip"])
            if other != row["clip"]:
                raise DataError(
                    f"{self.card.title}: {root} has two files of the sentence {row['label']!r}: {other} and {row['clip']}. Set "
                    f"data.root to the folder of the videos, or of the recordings"
                )
        return rows
