"""Common parts of sets of machines' sounds: the two conditions, and files named by section as DCASE has it since 2021.

All these sets have the label ``normal`` or ``anomaly``, a machine as the group, and the columns ``condition`` (the label again,
for pools and hold-outs), ``machine`` (its type), ``id`` or ``section`` (which one of the type, as text), and ``domain``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card, Dataset
from raydfl.data.sets._files import find_root, list_audio, manifest_of, wrong_layout

NORMAL, ANOMALY = "normal", "anomaly"
"""The labels."""

SECTION_FORM = "section_{nn}_{source|target}_{train|test}_{normal|anomaly}_{nnnn}[_{attributes}].wav"
_SECTION = re.compile(
    r"(?:.*/)?(?P<machine>[^/]+)/(?:train|test|source_test|target_test)/section_(?P<section>\d+)_(?P<domain>source|target)_"
    r"(?P<split>train|test)_(?P<condition>normal|anomaly)_(?P<take>\d+)(?:_(?P<attributes>.+))?\.wav"
)


def chosen_machines(
    rows: list[dict[str, Any]], machines: tuple[str, ...], root: Path, card: Card
) -> list[dict[str, Any]]:
    """Return the rows of some types of machines; of all where none is named.

    Raises:
        DataError: there are no clips at all, or none of a type.
    """
    if not rows:
        raise wrong_layout(root, card, "there are no clips of machines")
    there = sorted({row["machine"] for row in rows})
    for name in machines:
        if name not in there:
            raise DataError(f"{card.title}: {root} has no machines of the type {name!r}; there are {', '.join(there)}")
    return [row for row in rows if not machines or row["machine"] in machines]


@dataclass(frozen=True, kw_only=True)
class SectionSet(Dataset):
    """Base of sets whose files are named by section; a section of a type of machine is a group."""

    pairs: ClassVar[bool] = True
    """True where attributes are pairs of a name and a value, as ``vel_9_loc_A``."""

    root: Annotated[
        Path, Field(description="folder that holds a folder for each type of machine, at any depth (dev_data/raw ...)")
    ]
    machines: Annotated[
        tuple[str, ...], Field(description="only these types of machines, fan ...; none: all that are there")
    ] = ()

    def manifest(self) -> pa.Table:
        """List the clips. Official split.

        Extra columns: ``condition``, ``machine``, ``section``, ``domain`` (source or target), ``attributes`` (as the file's name
        has them, null without) and, of an attribute that all clips have, ``attribute_NAME``.
        """
        root = find_root(self.root, self.card)
        rows = [_row(name, found) for name in list_audio(root) if (found := _SECTION.fullmatch(name))]
        rows = chosen_machines(rows, self.machines, root, self.card)
        given = [_pairs(row["attributes"]) for row in rows] if self.pairs else [{}]
        common = [name for name in given[0] if all(name in pairs for pairs in given)]
        for row, pairs in zip(rows, given, strict=False):
            row |= {f"attribute_{name}": pairs[name] for name in common}
        return manifest_of(rows, root, self.card)


def _pairs(attributes: str | None) -> dict[str, str]:
    words = (attributes or "").split("_")
    return dict(zip(words[::2], words[1::2], strict=False))  # a word that stands alone at the end is part of no pair


def _row(name: str, found: re.Match[str]) -> dict[str, Any]:
    return {
        "clip": name,
        "label": found["condition"],
        "group": f"{found['machine']}_{found['section']}",
        "split": found["split"],
        "condition": found["condition"],
        "machine": found["machine"],
        "section": found["section"],
        "domain": found["domain"],
        "attributes": found["attributes"],
    }
