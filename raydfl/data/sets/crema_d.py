"""CREMA-D (H. Cao and others, IEEE Trans. Affective Computing 2014): acted emotional speech of 91 actors.

By default the label is the emotion that the actor was asked for: six classes. With ``labels="voted"`` it is the one that
most raters saw and heard (``MultiModalVote`` of ``summaryTable.csv``); clips without a majority are left out. The list of
FedAudio, used by FedMLAC (4,798 clips of the full set), is
``labels="voted", emotions=["neutral", "happy", "sad", "anger"]``.

Clip ``1076_MTI_SAD_XX`` has no sound in the published set and is always left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card, Dataset
from raydfl.data.sets._files import find_root, list_folder, manifest_of, match_name, read_rows, wrong_layout

_NAME = re.compile(
    r"(?P<actor>\d{4})_(?P<sentence>[A-Z]{3})_(?P<emotion>ANG|DIS|FEA|HAP|NEU|SAD)_(?P<level>[A-Z]{1,2})\.wav"
)
_FORM = "{actor}_{sentence}_{emotion}_{level}.wav"
_EMOTIONS = {"ANG": "anger", "DIS": "disgust", "FEA": "fear", "HAP": "happy", "NEU": "neutral", "SAD": "sad"}
_OF_LETTER = {code[0]: emotion for code, emotion in _EMOTIONS.items()}
_NO_SOUND = "1076_MTI_SAD_XX.wav"
_TABLES = ("processedResults/summaryTable.csv", "summaryTable.csv")
_FOLDS = 5

Emotion = Literal["anger", "disgust", "fear", "happy", "neutral", "sad"]


@dataclass(frozen=True, kw_only=True)
class CremaD(Dataset):
    """Acted emotions; a group is an actor."""

    card: ClassVar[Card] = Card(
        title="CREMA-D",
        layout=f"AudioWAV/{_FORM} (and {_TABLES[0]} for voted labels)",
        licence="ODbL 1.0",
        url="https://github.com/CheyneyComputerScience/CREMA-D",
        classes=len(_EMOTIONS),
    )

    root: Annotated[Path, Field(description="folder that holds AudioWAV/")]
    labels: Annotated[
        Literal["acted", "voted"], Field(description="the emotion asked for, or the one that most raters saw and heard")
    ] = "acted"
    emotions: Annotated[
        tuple[Emotion, ...] | None, Field(min_length=1, description="keep only clips of these classes; null: all six")
    ] = None
    test_folds: Annotated[
        tuple[int, ...],
        Field(
            description="the actors of these folds (1 to 5, by number of the actor) are the test set; none: no split"
        ),
    ] = ()

    def manifest(self) -> pa.Table:
        """Extra columns: ``sentence``, ``level``, ``fold`` (int64, 1 to 5). There is no official split.

        The folds are the actors in order, cut in five: FedAudio cross-validates like this.
        """
        root = find_root(self.root, self.card)
        files = list_folder(root, "AudioWAV", self.card)
        votes = self._votes(root) if self.labels == "voted" else {}
        kept = set(self.emotions or _EMOTIONS.values())
        rows: list[dict[str, Any]] = []
        for name in files:
            found = match_name(_NAME, name, self.card, _FORM)
            if name == _NO_SOUND:
                continue
            if self.labels == "voted":
                if name[:-4] not in votes:
                    raise DataError(f"{self.card.title}: summaryTable.csv has no row for {name[:-4]}; remove the file")
                label = _OF_LETTER.get(votes[name[:-4]])
            else:
                label = _EMOTIONS[found["emotion"]]
            if label in kept:
                rows.append(
                    {
                        "clip": f"AudioWAV/{name}",
                        "label": label,
                        "group": found["actor"],
                        "sentence": found["sentence"],
                        "level": found["level"],
                    }
                )
        folds = _actor_folds(sorted({row["group"] for row in rows}))
        rows = [row | {"fold": folds[row["group"]]} for row in rows]
        return manifest_of(rows, root, self.card, "fold", self.test_folds)

    def _votes(self, root: Path) -> dict[str, str]:
        """Return the letter (or, in a draw, letters with colons between) that won, by file name without suffix."""
        for name in _TABLES:
            if (root / name).is_file():
                rows = read_rows(root / name, ("FileName", "MultiModalVote"), self.card)
                return {row["FileName"]: row["MultiModalVote"] for row in rows}
        raise wrong_layout(root, self.card, f"labels: voted needs {_TABLES[0]}, which is not there")


def _actor_folds(actors: list[str]) -> dict[str, int]:
    """Cut a list in five whose sizes differ by at most one, the longer ones first."""
    size, longer = divmod(len(actors), _FOLDS)
    lengths = [size + (fold < longer) for fold in range(_FOLDS)]
    numbers = [fold + 1 for fold, length in enumerate(lengths) for _ in range(length)]
    return dict(zip(actors, numbers, strict=True))
