"""UrbanSound8K (J. Salamon and others, ACM Multimedia 2014): urban sounds of at most 4 s in ten folds.

Rates and channel counts differ from file to file. Nobody owns a clip (group is null): partition by label or by recording,
since slices of one recording belong together. FedAudio and FedMLAC leave out clips shorter than 0.1 s
(``shortest_seconds=0.1``) and hold out one fold at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.audio import audio_seconds
from raydfl.data.dataset import Card, Dataset
from raydfl.data.sets._files import find_root, manifest_of, read_rows, wrong_layout

_TABLE = "metadata/UrbanSound8K.csv"
_COLUMNS = ("slice_file_name", "fsID", "fold", "classID")
# By classID. The column with the names is called class in some copies of the file and class_name in others.
_CLASSES = {
    "0": "air_conditioner",
    "1": "car_horn",
    "2": "children_playing",
    "3": "dog_bark",
    "4": "drilling",
    "5": "engine_idling",
    "6": "gun_shot",
    "7": "jackhammer",
    "8": "siren",
    "9": "street_music",
}


@dataclass(frozen=True, kw_only=True)
class UrbanSound8K(Dataset):
    """Urban sounds, ten classes."""

    card: ClassVar[Card] = Card(
        title="UrbanSound8K",
        layout=f"{_TABLE} and audio/fold{{n}}/{{freesound id}}-{{class}}-{{occurrence}}-{{slice}}.wav",
        licence="CC BY-NC 3.0",
        url="https://urbansounddataset.weebly.com/urbansound8k.html",
        classes=len(_CLASSES),
    )

    root: Annotated[Path, Field(description="folder that holds metadata/ and audio/")]
    shortest_seconds: Annotated[float, Field(ge=0, description="leave out clips shorter than this, s")] = 0.0
    test_folds: Annotated[
        tuple[int, ...], Field(description="these folds (1 to 10) are the test set; none: no split")
    ] = ()

    def manifest(self) -> pa.Table:
        """Extra columns: ``fold`` (int64) and ``recording`` (the Freesound id).

        The official protocol is cross-validation over the folds.
        """
        root = find_root(self.root, self.card)
        if not (root / _TABLE).is_file():
            raise wrong_layout(root, self.card, f"there is no {_TABLE}")
        rows: list[dict[str, Any]] = []
        for number, row in enumerate(read_rows(root / _TABLE, _COLUMNS, self.card), start=2):
            try:
                fold = int(row["fold"])
                label = _CLASSES[row["classID"]]
            except (ValueError, KeyError) as error:
                table = root / _TABLE
                raise DataError(
                    f"{self.card.title}: line {number} of {table} has no fold or no class: {error}"
                ) from error
            clip = f"audio/fold{fold}/{row['slice_file_name']}"
            seconds = _seconds(root / clip)
            if seconds is None or seconds >= self.shortest_seconds:
                rows.append(
                    {
                        "clip": clip,
                        "label": label,
                        "seconds": seconds,
                        "fold": fold,
                        "recording": row["fsID"],
                    }
                )
        if rows and all(row["seconds"] is None for row in rows):
            raise wrong_layout(root, self.card, f"audio/ has none of the {len(rows)} files of {_TABLE}")
        rows.sort(key=lambda row: row["clip"])
        return manifest_of(rows, root, self.card, "fold", self.test_folds)


def _seconds(path: Path) -> float | None:
    """Read it from the file, since some copies of the set are padded; ``None`` if it cannot be read: reading the clip says so."""
    try:
        return audio_seconds(path)
    except DataError:
        return None
