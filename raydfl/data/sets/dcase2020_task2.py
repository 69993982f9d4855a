"""DCASE 2020 task 2 (Y. Koizumi et al., DCASE workshop 2020): six types of machines of MIMII and ToyADMOS, several of each.

``{machine}/train`` and ``test`` with ``{normal|anomaly}_id_{nn}_{nnnnnnnn}.wav``; training clips are normal.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar

import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.data.dataset import Card, Dataset
from raydfl.data.sets._files import find_root, list_audio, manifest_of
from raydfl.data.sets._machine_sets import chosen_machines

_NAME = re.compile(
    r"(?:.*/)?(?P<machine>[^/]+)/(?P<split>train|test)/(?P<condition>normal|anomaly)_id_(?P<id>\d+)_(?P<take>\d+)\.wav"
)


@dataclass(frozen=True, kw_only=True)
class DCASE2020Task2(Dataset):
    """Machines, DCASE 2020's."""

    card: ClassVar[Card] = Card(
        title="DCASE 2020 task 2, development set",
        layout="{machine}/{train,test}/{normal|anomaly}_id_{nn}_{nnnnnnnn}.wav",
        licence="CC BY-SA 4.0",
        url="https://zenodo.org/record/3678171",
        classes=2,
    )

    root: Annotated[
        Path, Field(description="folder that holds a folder for each type of machine, at any depth (dev_data ...)")
    ]
    machines: Annotated[
        tuple[str, ...], Field(description="only these types of machines, fan ...; none: all that are there")
    ] = ()

    def manifest(self) -> pa.Table:
        """List the clips. Official split. A group is a machine. Extra columns: ``condition``, ``machine``, ``id``, ``domain``."""
        root = find_root(self.root, self.card)
        rows = [
            {
                "clip": name,
                "label": found["condition"],
                "group": f"{found['machine']}_{found['id']}",
                "split": found["split"],
                "condition": found["condition"],
                "machine": found["machine"],
                "id": found["id"],
                "domain": "source",
            }
            for name in list_audio(root)
            if (found := _NAME.fullmatch(name))
        ]
        return manifest_of(chosen_machines(rows, self.machines, root, self.card), root, self.card)
