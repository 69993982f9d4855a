"""DCASE 2020 task 2 (Y. Koizumi et al., DCASE workshop 2020): six types of machines from MIMII and ToyADMOS, several of each type.

Official split. Training clips are normal.
"""

from __future__ import annotations

from typing import ClassVar

from raydfl.data.dataset import Card
from raydfl.data.sets._machine_sets import MachineSet


class DCASE2020Task2(MachineSet):
    """Machines from DCASE 2020.

    Extra columns: ``condition``, ``machine``, ``id`` and ``domain``.
    """

    card: ClassVar[Card] = Card(
        title="DCASE 2020 task 2, development set",
        layout="{machine}/{train,test}/{normal|anomaly}_id_{nn}_{nnnnnnnn}.wav, at any depth (dev_data ...)",
        licence="CC BY-SA 4.0",
        url="https://zenodo.org/record/3678171",
        classes=2,
    )
    pattern: ClassVar = (
        r"(?:.*/)?(?P<machine>[^/]+)/(?P<split>train|test)/(?P<label>normal|anomaly)_id_(?P<id>\d+)_\d+\.wav"
    )
    files: ClassVar = pattern
