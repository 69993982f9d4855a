"""DESED (N. Turpault and others, DCASE 2019): sounds in homes, ten classes, in clips of 10 s with the times of their events.

A list ``metadata/LIST.tsv`` describes the recordings in ``audio/LIST``. Lists of single events have onset and offset, lists such as
``train/weak`` only the classes of a clip. Set ``data.unreadable: skip`` if some recordings could not be downloaded. The set has no
owners: partition the clips at random or by label. No sample was available: the reader is tested on small trees in this layout.

    data:
      name: desed
      root: PATH/TO/DESED
      events: {}
      features: {sample_rate: 16000, bands: 128, window_ms: 128, hop_ms: 16, seconds: 10}
      partition: {by: iid, clients: 20}
    objective: {name: events, median_filter: 0.45}
    models: {model: crnn_base}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.data.dataset import Card
from raydfl.data.sets._files import FileDataset, make_layout_error
from raydfl.data.steps.events import read_events, write_events


@dataclass(frozen=True, kw_only=True)
class DESED(FileDataset):
    """Sounds in homes. The label lists the events of a clip."""

    card: ClassVar[Card] = Card(
        title="DESED",
        layout="metadata/train/weak.tsv and further lists, and the recordings of each list in audio/train/weak and so on",
        licence="various Creative Commons",
        url="https://project.inria.fr/desed",
        classes=10,
    )

    train: Annotated[tuple[str, ...], Field(min_length=1, description="Lists of training clips, without .tsv.")] = (
        "train/weak",
        "train/synthetic21_train/soundscapes",
    )
    test: Annotated[tuple[str, ...], Field(description="Lists of test clips. Empty: no split.")] = (
        "validation/validation",
    )

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the clips of the lists.

        Raises:
            DataError: a list is missing or invalid.
        """
        rows = []
        for name in (*self.train, *self.test):
            path = root / "metadata" / f"{name}.tsv"
            if not path.is_file():
                raise make_layout_error(root, self.card, f"metadata/{name}.tsv is missing")
            split = ("test" if name in self.test else "train") if self.test else None
            rows += [
                {"clip": f"audio/{name}/{clip}", "label": write_events(events), "split": split}
                for clip, events in read_events(path, self.card.title).items()
            ]
        return rows
