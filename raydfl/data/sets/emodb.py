"""Berlin Database of Emotional Speech (EmoDB; F. Burkhardt and others, Interspeech 2005): acted German speech, ten speakers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar

import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.data.dataset import Card, Dataset
from raydfl.data.sets._files import find_root, list_folder, manifest_of, match_name

_NAME = re.compile(r"(?P<speaker>\d\d)(?P<text>[ab]\d\d)(?P<emotion>[WLEAFTN])(?P<take>[a-z])\.wav")
_FORM = "{speaker}{text}{emotion letter}{take}.wav"
_EMOTIONS = {
    "W": "anger",
    "L": "boredom",
    "E": "disgust",
    "A": "fear",
    "F": "happiness",
    "T": "sadness",
    "N": "neutral",
}


@dataclass(frozen=True, kw_only=True)
class EmoDB(Dataset):
    """Seven acted emotions; a group is a speaker."""

    card: ClassVar[Card] = Card(
        title="EmoDB, Berlin Database of Emotional Speech",
        layout=f"wav/{_FORM}",
        licence="no licence text; published free for research",
        url="http://emodb.bilderbar.info",
        classes=len(_EMOTIONS),
    )

    root: Annotated[Path, Field(description="folder that holds wav/")]

    def manifest(self) -> pa.Table:
        """Extra columns: ``text`` (which of ten sentences) and ``take`` (a letter). There is no official split."""
        root = find_root(self.root, self.card)
        rows = []
        for name in list_folder(root, "wav", self.card):
            found = match_name(_NAME, name, self.card, _FORM)
            rows.append(
                {
                    "clip": f"wav/{name}",
                    "label": _EMOTIONS[found["emotion"]],
                    "group": found["speaker"],
                    "text": found["text"],
                    "take": found["take"],
                }
            )
        return manifest_of(rows, root, self.card)
