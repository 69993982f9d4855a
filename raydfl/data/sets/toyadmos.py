"""ToyADMOS (Y. Koizumi et al., WASPAA 2019): toy cars, conveyors and trains, recorded by four microphones in separate files.

A case is a toy with its own parts. Long recordings (``_CNT``) and environmental noise are not listed. The set has no split. The
reader is tested on small trees in this layout.
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
class ToyADMOS(MachineSet):
    """Toys, some with broken parts.

    Groups are toys. Extra columns: ``condition``, ``machine``, ``id`` (the case), ``domain`` and ``anomaly`` (ab01 ..., or
    none).
    """

    card: ClassVar[Card] = Card(
        title="ToyADMOS",
        layout="{machine}/case{n}/{NormalSound,AnomalousSound}_IND/ with "
        "{number}_{machine}_case{n}_{normal|ab{nn}}_IND_ch{n}_{nnnn}.wav, at any depth",
        licence="NTT's own, for research",
        url="https://github.com/YumaKoizumi/ToyADMOS-dataset",
        classes=2,
    )
    pattern: ClassVar = (
        r"(?:.*/)?(?P<machine>[^/]+)/case(?P<id>\d+)/(?:Normal|Anomalous)Sound_IND/"
        r"\w+_case\d+_(?P<anomaly>(?P<label>normal|ab(?=\d))\d*)_IND_ch(?P<channel>\d+)_\d+\.wav"
    )
    files: ClassVar = pattern
    codes: ClassVar = {"label": {"normal": NORMAL, "ab": ANOMALY}, "channel": int}

    microphone: Annotated[int, Field(ge=1, description="Number of the microphone to read, 1 to 4.")] = 1

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the clips of the chosen microphone."""
        rows = super().rows(root)
        present = sorted({row["channel"] for row in rows})
        if self.microphone not in present:
            raise DataError(
                f"{self.card.title}: {root} has no clips of microphone {self.microphone}. Choose from "
                f"{', '.join(map(str, present))}"
            )
        chosen = [row for row in rows if row.pop("channel") == self.microphone]
        for row in chosen:
            row["anomaly"] = row.pop("anomaly").replace("normal", "none")
        return chosen
