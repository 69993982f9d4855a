"""MIMII DG (K. Dohi et al., DCASE workshop 2022): five types of machines for anomaly detection in domains with few clips.

DCASE 2022 task 2, with its official split. The lists ``attributes_{nn}.csv`` repeat the names of the files and are not read.
The reader is tested on small trees in this layout.
"""

from __future__ import annotations

from typing import ClassVar

from raydfl.data.dataset import Card
from raydfl.data.sets._machine_sets import SECTION_FORM, SectionSet


class MIMIIDG(SectionSet):
    """Machines with domain shifts, from DCASE 2022.

    Extra columns: ``condition``, ``machine``, ``section``, ``domain``, and ``attribute_NAME`` for each attribute of all listed
    clips (choose a single type with ``machines``).
    """

    card: ClassVar[Card] = Card(
        title="MIMII DG, DCASE 2022 task 2",
        layout=f"{{machine}}/{{train,test}}/ with {SECTION_FORM}, at any depth",
        licence="CC BY-SA 4.0",
        url="https://zenodo.org/record/6529888",
        classes=2,
    )
