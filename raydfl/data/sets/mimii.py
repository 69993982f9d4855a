"""MIMII (H. Purohit et al., DCASE workshop 2019): fans, pumps, sliders and valves, four to seven of each, eight microphones.

``[{snr}_dB_{machine}/]{machine}/id_{nn}/{normal,abnormal}/{nnnnnnnn}.wav``: the archives hold the machine's folder, and the folders
``-6_dB_fan`` ... tell apart the signal-to-noise ratios for which the same recordings were mixed with noise of a factory. The set
has no split: hold anomalous clips out by condition, and with several ratios hold out by ``recording``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar

import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card, Dataset
from raydfl.data.sets._files import find_root, list_audio, manifest_of
from raydfl.data.sets._machine_sets import ANOMALY, NORMAL, chosen_machines

_NAME = re.compile(
    r"(?:.*?/)??(?:(?P<snr>-?\d+)_?dB_[^/]+/)?"
    r"(?P<recording>(?P<machine>[^/]+)/id_(?P<id>\d+)/(?P<condition>normal|abnormal)/\d+)\.wav"
)


@dataclass(frozen=True, kw_only=True)
class MIMII(Dataset):
    """Machines in a factory, eight microphones."""

    card: ClassVar[Card] = Card(
        title="MIMII",
        layout="[{snr}_dB_{machine}/]{machine}/id_{nn}/{normal,abnormal}/{nnnnnnnn}.wav",
        licence="CC BY-SA 4.0",
        url="https://zenodo.org/record/3384388",
        classes=2,
    )

    root: Annotated[
        Path,
        Field(description="folder that holds fan/id_00 ..., or -6_dB_fan ... with such folders in them, at any depth"),
    ]
    machines: Annotated[
        tuple[str, ...], Field(description="only these types of machines, fan ...; none: all that are there")
    ] = ()
    snr: Annotated[
        int | None, Field(description="only clips of this ratio: -6, 0 or 6 dB; null: all that are there")
    ] = None

    def manifest(self) -> pa.Table:
        """List the clips. A group is a machine.

        Extra columns: ``condition``, ``machine``, ``id``, ``domain``, ``snr`` (dB as text, ``unknown`` where no folder says it) and
        ``recording``, the same for one recording at several ratios.

        Raises:
            DataError: there are no clips of that ratio.
        """
        root = find_root(self.root, self.card)
        rows = []
        for name in list_audio(root):
            if found := _NAME.fullmatch(name):
                condition = NORMAL if found["condition"] == "normal" else ANOMALY
                rows.append(
                    {
                        "clip": name,
                        "label": condition,
                        "group": f"{found['machine']}_{found['id']}",
                        "condition": condition,
                        "machine": found["machine"],
                        "id": found["id"],
                        "domain": "source",
                        "snr": found["snr"] or "unknown",
                        "recording": found["recording"],
                    }
                )
        rows = chosen_machines(rows, self.machines, root, self.card)
        if self.snr is not None:
            there = sorted({row["snr"] for row in rows})
            rows = [row for row in rows if row["snr"] == str(self.snr)]
            if not rows:
                raise DataError(
                    f"{self.card.title}: no clip in {root} is of {self.snr} dB by its folder's name (-6_dB_fan ...); there are "
                    f"{', '.join(there)}"
                )
        return manifest_of(rows, root, self.card)
