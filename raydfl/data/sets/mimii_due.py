"""MIMII DUE (R. Tanabe et al., WASPAA 2021): five types of machines with domain shifts in load and environment.

DCASE 2021 task 2, including its toy car and toy train, with its official split. Test files have no attributes. The reader is
tested on small trees in this layout.
"""

from __future__ import annotations

from typing import ClassVar

from raydfl.data.dataset import Card
from raydfl.data.sets._machine_sets import SECTION_FORM, SectionSet


class MIMIIDUE(SectionSet):
    """Machines with domain shifts, from DCASE 2021.

    Extra columns: ``condition``, ``machine``, ``section``, ``domain`` and ``attributes``.
    """

    card: ClassVar[Card] = Card(
        title="MIMII DUE, DCASE 2021 task 2",
        layout=f"{{machine}}/{{train,source_test,target_test}}/ with {SECTION_FORM}, at any depth",
        licence="CC BY-SA 4.0",
        url="https://zenodo.org/record/4740355",
        classes=2,
    )
    pairs: ClassVar[bool] = False
