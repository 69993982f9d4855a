"""Common code of sets of machine sounds: conditions, and the names of files by section (DCASE since 2021)."""

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
    """Base class of sets of machine sounds. Patterns have the groups ``machine`` (its type), ``id`` or ``section``, and ``label``.

    Labels are ``normal`` and ``anomaly``. A group is a machine: a type with an id or section. The column ``condition`` repeats the
    label, for pools and held-out sets. ``domain`` is ``source`` by default.
    """

    machines: Annotated[
        tuple[str, ...], Field(description="Types of machines to read, such as fan. Empty: all types in the root.")
    ] = ()

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the clips of the chosen types of machines."""
        rows = super().rows(root)
        present = sorted({row["machine"] for row in rows})
        for name in self.machines:
            if name not in present:
                raise DataError(
                    f"{self.card.title}: {root} has no machines of the type {name!r}. Choose from {', '.join(present)}"
                )
        return [
            {
                "condition": row["label"],
                **row,
                "group": f"{row['machine']}_{row.get('id') or row['section']}",  # ids repeat between types
                "domain": row.get("domain", "source"),
            }
            for row in rows
            if not self.machines or row["machine"] in self.machines
        ]


@dataclass(frozen=True, kw_only=True)
class SectionSet(MachineSet):
    """Base class of sets with the section in the names of files. A group is a section of a type of machine. Official split.

    Extra columns: ``condition``, ``machine``, ``section``, ``domain`` (source or target), ``attributes`` (as in the file name, or
    null) and ``attribute_NAME`` for each attribute common to all clips.
    """

    pairs: ClassVar[bool] = True
    """True if attributes are pairs of a name and a value, as in ``vel_9_loc_A``."""
    pattern: ClassVar = (
        r"(?:.*/)?(?P<machine>[^/]+)/(?:train|test|source_test|target_test)/section_(?P<section>\d+)_"
        r"(?P<domain>source|target)_(?P<split>train|test)_(?P<label>normal|anomaly)_\d+(?:_(?P<attributes>.+))?\.wav"
    )
    files: ClassVar = pattern

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the clips with their attributes."""
        rows = super().rows(root)
        attributes = [_parse_pairs(row["attributes"]) if self.pairs else {} for row in rows]
        common = [name for name in attributes[0] if all(name in pairs for pairs in attributes)]
        return [
            row | {f"attribute_{name}": pairs[name] for name in common}
            for row, pairs in zip(rows, attributes, strict=True)
        ]


def _parse_pairs(attributes: str | None) -> dict[str, str]:
    words = (attributes or "").split("_")
    return dict(zip(words[::2], words[1::2], strict=False))  # drops a last word without a partner
