"""MIMII (H. Purohit et al., DCASE workshop 2019): fans, pumps, sliders and valves, four to seven of each, eight microphones.

Folders such as ``-6_dB_fan`` distinguish the signal-to-noise ratios, for which the same recordings were mixed with factory
noise. The archives contain the folder ``{machine}``. The set has no split: hold out anomalous clips by condition, and with
several ratios hold out by ``recording``.

    raydfl data info jobs/tiny.yaml data='{name: mimii, root: PATH/TO/mimii,
      features: {channel: 3}, split: {test: null}}'
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card
from raydfl.data.sets._machine_sets import ANOMALY, NORMAL, MachineSet


@dataclass(frozen=True, kw_only=True)
class MIMII(MachineSet):
    """Factory machines, recorded by eight microphones.

    Extra columns: ``condition``, ``machine``, ``id``, ``domain``, ``snr`` (dB as text; ``unknown`` if no folder states it) and
    ``recording``, equal for a recording at several ratios.
    """

    card: ClassVar[Card] = Card(
        title="MIMII",
        layout="[{snr}_dB_{machine}/]{machine}/id_{nn}/{normal,abnormal}/{nnnnnnnn}.wav, at any depth",
        licence="CC BY-SA 4.0",
        url="https://zenodo.org/record/3384388",
        classes=2,
    )
    pattern: ClassVar = (
        r"(?:.*?/)??(?:(?P<snr>-?\d+)_?dB_[^/]+/)?"
        r"(?P<recording>(?P<machine>[^/]+)/id_(?P<id>\d+)/(?P<label>normal|abnormal)/\d+)\.wav"
    )
    files: ClassVar = pattern
    codes: ClassVar = {"label": {"normal": NORMAL, "abnormal": ANOMALY}}

    snr: Annotated[
        int | None, Field(description="Signal-to-noise ratio of the clips to read: -6, 0 or 6 dB. null: all ratios.")
    ] = None

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the clips of the chosen ratio."""
        rows = super().rows(root)
        for row in rows:
            row |= {"snr": row.pop("snr") or "unknown", "recording": row.pop("recording")}
        if self.snr is None:
            return rows
        chosen = [row for row in rows if row["snr"] == str(self.snr)]
        if not chosen:
            raise DataError(
                f"{self.card.title}: no folder of {root} has clips of {self.snr} dB (as in -6_dB_fan). Choose from "
                f"{', '.join(sorted({row['snr'] for row in rows}))}"
            )
        return chosen
