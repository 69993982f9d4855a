"""ToyADMOS (Y. Koizumi et al., WASPAA 2019): toy cars, conveyors and trains, four microphones in files of their own.

``{machine}/case{n}/{NormalSound,AnomalousSound}_IND/{number}_{machine}_case{n}_{normal|ab{nn}}_IND_ch{n}_{nnnn}.wav``. A case is
one toy, of parts of its own. Long recordings (``_CNT``) and the noise of the surroundings are not listed. The set has no split.
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
    r"(?:.*/)?(?P<machine>[^/]+)/case(?P<id>\d+)/(?:Normal|Anomalous)Sound_IND/"
    r"\w+_case\d+_(?P<anomaly>normal|ab\d+)_IND_ch(?P<channel>\d+)_\d+\.wav"
)


@dataclass(frozen=True, kw_only=True)
class ToyADMOS(Dataset):
    """Toys, some with broken parts."""

    card: ClassVar[Card] = Card(
        title="ToyADMOS",
        layout="{machine}/case{n}/{NormalSound,AnomalousSound}_IND/ with "
        "{number}_{machine}_case{n}_{normal|ab{nn}}_IND_ch{n}_{nnnn}.wav",
        licence="NTT's own, for research",
        url="https://github.com/YumaKoizumi/ToyADMOS-dataset",
        classes=2,
    )

    root: Annotated[Path, Field(description="folder that holds ToyCar ..., at any depth")]
    machines: Annotated[
        tuple[str, ...], Field(description="only these types, ToyCar ...; none: all that are there")
    ] = ()
    microphone: Annotated[int, Field(ge=1, description="the microphone whose files are taken, 1 to 4")] = 1

    def manifest(self) -> pa.Table:
        """List one microphone's clips. A group is a toy.

        Extra columns: ``condition``, ``machine``, ``id`` (the case), ``domain`` and ``anomaly`` (ab01 ..., or none).

        Raises:
            DataError: there are no clips, or none of that microphone.
        """
        root = find_root(self.root, self.card)
        found = [(name, match) for name in list_audio(root) if (match := _NAME.fullmatch(name))]
        rows = [
            {
                "clip": name,
                "label": NORMAL if match["anomaly"] == "normal" else ANOMALY,
                "group": f"{match['machine']}_{match['id']}",
                "condition": NORMAL if match["anomaly"] == "normal" else ANOMALY,
                "machine": match["machine"],
                "id": match["id"],
                "domain": "source",
                "anomaly": "none" if match["anomaly"] == "normal" else match["anomaly"],
            }
            for name, match in found
            if int(match["channel"]) == self.microphone
        ]
        if found and not rows:
            there = sorted({int(match["channel"]) for _, match in found})
            raise DataError(
                f"{self.card.title}: {root} has no clips of microphone {self.microphone}; there are {', '.join(map(str, there))}"
            )
        return manifest_of(chosen_machines(rows, self.machines, root, self.card), root, self.card)
