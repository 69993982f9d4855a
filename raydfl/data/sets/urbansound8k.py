"""UrbanSound8K (J. Salamon and others, ACM Multimedia 2014): urban sounds of at most 4 s in ten folds.

Rates and channel counts differ between files. Clips have no owner (group is null): partition by label, or by recording to keep
the slices of a recording together. FedAudio and FedMLAC leave out clips shorter than 0.1 s and hold out one fold at a time:

    data:
      name: urbansound8k
      root: PATH/TO/UrbanSound8K
      test_folds: [2]
      shortest_seconds: 0.1
      features: {bands: 128, window_ms: 64, fft: 1024}
      segment: {frames: 300, stride: 50, test_stride: 100, keep_last: false}
      partition: {by: dirichlet, column: recording, clients: 50, alpha: 0.5, minimum: 5}
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.core.isolation import reading
from raydfl.data.audio import audio_seconds
from raydfl.data.dataset import Card
from raydfl.data.sets._files import FileDataset, add_test_split, read_rows

_TABLE = "metadata/UrbanSound8K.csv"
_COLUMNS = ("slice_file_name", "fsID", "fold", "classID")
# By classID, because copies of the file disagree on the name of the column with the names (class, class_name).
_CLASSES = (
    *("air_conditioner", "car_horn", "children_playing", "dog_bark", "drilling"),
    *("engine_idling", "gun_shot", "jackhammer", "siren", "street_music"),
)


@dataclass(frozen=True, kw_only=True)
class UrbanSound8K(FileDataset):
    """Urban sounds, ten classes.

    Extra columns: ``fold`` (int64) and ``recording`` (the Freesound id). The set has no official split; the official protocol
    is cross-validation over the folds.
    """

    card: ClassVar[Card] = Card(
        title="UrbanSound8K",
        layout=f"{_TABLE} and audio/fold{{n}}/{{freesound id}}-{{class}}-{{occurrence}}-{{slice}}.wav",
        licence="CC BY-NC 3.0",
        url="https://urbansounddataset.weebly.com/urbansound8k.html",
        classes=len(_CLASSES),
    )

    shortest_seconds: Annotated[float, Field(ge=0, description="Leave out shorter clips, in seconds. 0: none.")] = 0.0
    test_folds: Annotated[tuple[int, ...], Field(description="Folds (1 to 10) in the test set. Empty: no split.")] = ()

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the clips of the table."""
        rows: list[dict[str, Any]] = []
        labels = {str(number): label for number, label in enumerate(_CLASSES)}
        for number, row in enumerate(read_rows(root, _TABLE, _COLUMNS, self.card), start=2):
            with reading(f"{self.card.title}: line {number} of {root / _TABLE}", "it has no fold or no class"):
                fold, label = int(row["fold"]), labels[row["classID"]]
            clip, seconds = f"audio/fold{fold}/{row['slice_file_name']}", None
            # Some copies of the set are padded, so only the file has the duration. Reading the clip reports an unreadable file.
            with contextlib.suppress(DataError):
                seconds = audio_seconds(root / clip)
            if seconds is None or seconds >= self.shortest_seconds:
                rows.append({"clip": clip, "label": label, "seconds": seconds, "fold": fold, "recording": row["fsID"]})
        return add_test_split(sorted(rows, key=lambda row: str(row["clip"])), "fold", self.test_folds, self.card)
