"""DCASE 2023 task 2 (K. Dohi et al., arXiv:2305.07828): types of machines with a section each, in source and target domain.

The development set, from MIMII DG and ToyADMOS2+, with its official split. Later years have the same layout, with
``noAttribute`` for empty attributes. Columns are those of ``mimii_dg``. The evaluation set's test files have neither domain nor
condition. They are not listed; ``raydfl predict`` scores them (docs/objectives.md#a-submission-to-dcase).

    raydfl data info jobs/tiny.yaml data='{name: dcase2023_task2, root: PATH/TO/dcase2023_task2,
      machines: [bearing], split: {validation: 0}}' objective='{name: compact, normal: [normal]}'
"""

from __future__ import annotations

from typing import ClassVar

from raydfl.data.dataset import Card
from raydfl.data.sets._machine_sets import SECTION_FORM, SectionSet


class DCASE2023Task2(SectionSet):
    """Machines with domain shifts, from DCASE 2023."""

    card: ClassVar[Card] = Card(
        title="DCASE 2023 task 2, development set",
        layout=f"{{machine}}/{{train,test}}/ with {SECTION_FORM}, at any depth (dev_data/raw ...)",
        licence="CC BY 4.0",
        url="https://zenodo.org/record/7690157",
        classes=2,
    )
