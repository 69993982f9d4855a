"""VoxCeleb1 and VoxCeleb2: voices of celebrities (A. Nagrani and others, Interspeech 2017; J. S. Chung and others, 2018).

Unpack the archives below one folder. Folders named ``test`` are the test set, ``dev`` and ``train`` are for training. Without
such folders, the 40 speakers id10270 to id10309 are the test set, as in VoxCeleb1. The names of clips are those of the published
lists of trials (``veri_test2.txt``), wherever the folders are. VoxCeleb2 has m4a files: convert them to wav or flac. No sample was
available: the reader is tested on small trees in this layout.

    data:
      name: voxceleb
      root: PATH/TO/voxceleb1
      trials: PATH/TO/veri_test2.txt
      unseen: keep
      partition: {by: classes, clients: 100, classes: 12}
    objective: verify
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from raydfl.data.dataset import Card
from raydfl.data.sets._files import FileDataset

_SPLITS = {"test": "test", "dev": "train", "train": "train"}
_TEST_SPEAKERS = range(10270, 10310)


@dataclass(frozen=True, kw_only=True)
class VoxCeleb(FileDataset):
    """Interviews of celebrities, cut from videos.

    Labels and groups are the speakers. Extra columns: ``video`` and ``take``.
    """

    card: ClassVar[Card] = Card(
        title="VoxCeleb",
        layout="id{speaker}/{video}/{take}.wav, at any depth",
        licence="CC BY 4.0",
        url="https://www.robots.ox.ac.uk/~vgg/data/voxceleb/",
    )

    pattern: ClassVar = r"(?:(?P<above>.*)/)?(?P<group>id\d{5})/(?P<video>[^/]+)/(?P<take>\d+)\.\w+"

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the clips by the names of the published trials."""
        rows = []
        for row in super().rows(root):
            folders = [_SPLITS[name] for name in (row.pop("above") or "").split("/") if name in _SPLITS]
            official = "test" if int(row["group"][2:]) in _TEST_SPEAKERS else "train"
            clip = "/".join(row["clip"].split("/")[-3:])
            split = folders[-1] if folders else official
            rows.append({**row, "clip": clip, "path": str(root / row["clip"]), "label": row["group"], "split": split})
        return rows
