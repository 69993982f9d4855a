"""CREMA-D (H. Cao and others, IEEE Trans. Affective Computing 2014): acted emotional speech of 91 actors.

By default the label is the emotion requested from the actor: six classes. With ``labels="voted"`` it is the emotion that most
raters perceived in sound and video (``MultiModalVote`` of ``summaryTable.csv``), and clips without a majority are left out. The
published clip ``1076_MTI_SAD_XX`` has no sound and is always left out.

    raydfl data info jobs/tiny.yaml data='{name: crema_d, root: PATH/TO/CREMA-D, test_folds: [5]}'

The list of FedAudio, used by FedMLAC (4,798 clips of the full set):

    data:
      name: crema_d
      root: PATH/TO/CREMA-D
      labels: voted
      emotions: [neutral, happy, sad, anger]
      test_folds: [5]
      features: {normalise: group, seconds: 3.0}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card
from raydfl.data.sets._files import FileDataset, add_test_split, make_layout_error, read_rows

_EMOTIONS = {"ANG": "anger", "DIS": "disgust", "FEA": "fear", "HAP": "happy", "NEU": "neutral", "SAD": "sad"}
_NO_SOUND = "AudioWAV/1076_MTI_SAD_XX.wav"
_TABLES = ("processedResults/summaryTable.csv", "summaryTable.csv")
_FOLDS = 5

Emotion = Literal["anger", "disgust", "fear", "happy", "neutral", "sad"]


@dataclass(frozen=True, kw_only=True)
class CremaD(FileDataset):
    """Acted emotions.

    Groups are actors. Extra columns: ``sentence``, ``level``, ``fold`` (int64, 1 to 5). The set has no official split. The
    folds divide the sorted actors into five ranges, as in FedAudio's cross-validation.
    """

    card: ClassVar[Card] = Card(
        title="CREMA-D",
        layout=f"AudioWAV/{{actor}}_{{sentence}}_{{emotion}}_{{level}}.wav (and {_TABLES[0]} for voted labels)",
        licence="ODbL 1.0",
        url="https://github.com/CheyneyComputerScience/CREMA-D",
        classes=len(_EMOTIONS),
    )
    files: ClassVar = r"AudioWAV/.*\.wav"
    pattern: ClassVar = (
        r"AudioWAV/(?P<group>\d{4})_(?P<sentence>[A-Z]{3})_(?P<label>[A-Z]{3})_(?P<level>[A-Z]{1,2})\.wav"
    )
    codes: ClassVar = {"label": _EMOTIONS}

    labels: Annotated[
        Literal["acted", "voted"],
        Field(description="acted: emotion requested from the actor. voted: emotion perceived by most raters."),
    ] = "acted"
    emotions: Annotated[
        tuple[Emotion, ...] | None, Field(min_length=1, description="Classes to read. null: all six.")
    ] = None
    test_folds: Annotated[
        tuple[int, ...],
        Field(description="Folds of actors (1 to 5, by the actors' numbers) in the test set. Empty: no split."),
    ] = ()

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the clips of the chosen emotions."""
        rows = [row for row in super().rows(root) if row["clip"] != _NO_SOUND]
        if self.labels == "voted":
            votes = self._read_votes(root)
            for row in rows:
                name = Path(row["clip"]).stem
                if name not in votes:
                    raise DataError(f"{self.card.title}: summaryTable.csv has no row for {name}. Remove the file")
                row["label"] = votes[name]
        emotions = self.emotions or _EMOTIONS.values()
        rows = [row for row in rows if row["label"] in emotions]
        ranges = np.array_split(sorted({row["group"] for row in rows}), _FOLDS)
        folds = {actor: fold for fold, actors in enumerate(ranges, start=1) for actor in actors.tolist()}
        rows = [row | {"fold": folds[row["group"]]} for row in rows]
        return add_test_split(rows, "fold", self.test_folds, self.card)

    def _read_votes(self, root: Path) -> dict[str, str | None]:
        """Read the winning emotion by file name without suffix; ``None`` for a tie."""
        emotions = {emotion[0].upper(): emotion for emotion in _EMOTIONS.values()}
        for name in _TABLES:
            if (root / name).is_file():
                rows = read_rows(root, name, ("FileName", "MultiModalVote"), self.card)
                return {row["FileName"]: emotions.get(row["MultiModalVote"]) for row in rows}
        raise make_layout_error(root, self.card, f"labels: voted needs {_TABLES[0]}, but the file is missing")
