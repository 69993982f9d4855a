"""Common parts of sets of machines' sounds: the two conditions, and files named by section as DCASE has it since 2021."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.sets._files import FileDataset

NORMAL, ANOMALY = "normal", "anomaly"
"""The labels."""
SECTION_FORM = "section_{nn}_{source|target}_{train|test}_{normal|anomaly}_{nnnn}[_{attributes}].wav"


@dataclass(frozen=True, kw_only=True)
class MachineSet(FileDataset):
    """Base of sets of machines' sounds. Patterns name ``machine`` (its type), ``id`` or ``section``, and ``label``.

    Labels are ``normal`` and ``anomaly``. A group is a machine: a type with an id or section. The column ``condition`` is the label
    again, for pools and hold-outs. ``domain`` is ``source`` if no file name states it.
    """

    machines: Annotated[
        tuple[str, ...], Field(description="only these types of machines, fan ...; none: all that are there")
    ] = ()

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the clips of the chosen types of machines."""
        rows = super().rows(root)
        there = sorted({row["machine"] for row in rows})
        for name in self.machines:
            if name not in there:
                raise DataError(
                    f"{self.card.title}: {root} has no machines of the type {name!r}; there are {', '.join(there)}"
                )
        return [
            {
                "condition": row["label"],
                **row,
                "group": f"{row['machine']}_{row.get('id') or row['section']}",
                "domain": row.get("domain", "source"),
            }
            for row in rows
            if not self.machines or row["machine"] in self.machines
        ]


@dataclass(frozen=True, kw_only=True)
class SectionSet(MachineSet):
    """Base of sets whose files are named by section; a section of a type of machine is a group. Official split.

    Extra columns: ``condition``, ``machine``, ``section``, ``domain`` (source or target), ``attributes`` (as in the file name, null
    without) and ``attribute_NAME`` for each attribute that all clips have.
    """

    pairs: ClassVar[bool] = True
    """True where attributes are pairs of a name and a value, as ``vel_9_loc_A``."""
    pattern: ClassVar = (
        r"(?:.*/)?(?P<machine>[^/]+)/(?:train|test|source_test|target_test)/section_(?P<section>\d+)_"
        r"(?P<domain>source|target)_(?P<split>train|test)_(?P<label>normal|anomaly)_\d+(?:_(?P<attributes>.+))?\.wav"
    )
    files: ClassVar = pattern

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the clips with their attributes."""
        rows = super().rows(root)
        given = [_pairs(row["attributes"]) if self.pairs else {} for row in rows]
        common = [name for name in given[0] if all(name in pairs for pairs in given)]
        return [
            row | {f"attribute_{name}": pairs[name] for name in common} for row, pairs in zip(rows, given, strict=True)
        ]


def _pairs(attributes: str | None) -> dict[str, str]:
    words = (attributes or "").split("_")
    return dict(zip(words[::2], words[1::2], strict=False))  # a word that stands alone at the end is part of no pair
