"""FSD50K (E. Fonseca et al., IEEE/ACM TASLP 2022): Freesound clips with sets of labels of AudioSet's ontology.

As published: ``FSD50K.dev_audio/`` and ``FSD50K.eval_audio/`` hold ``{number}.wav``, ``FSD50K.ground_truth/dev.csv`` and
``eval.csv`` say which classes a clip has, and dev.csv which clips are for validation. A label is the classes with commas between
them: ``data.label_sets: {separator: ","}`` with the objective multi_label; for contrast labels do not matter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.data.dataset import Card, Dataset
from raydfl.data.sets._files import SPLIT_OF, find_root, manifest_of, read_rows, wrong_layout

_PARTS = {"dev": ("fname", "labels", "split"), "eval": ("fname", "labels")}


@dataclass(frozen=True, kw_only=True)
class FSD50K(Dataset):
    """Sounds of 200 classes, several for a clip."""

    card: ClassVar[Card] = Card(
        title="FSD50K",
        layout="FSD50K.ground_truth/dev.csv and eval.csv, FSD50K.dev_audio/ and FSD50K.eval_audio/ with {number}.wav",
        licence="Creative Commons, each clip's own",
        url="https://zenodo.org/records/4060432",
    )

    root: Annotated[Path, Field(description="folder that holds the four folders of FSD50K")]
    subset: Annotated[
        Literal["all", "dev", "eval"], Field(description="dev: without the test set; eval: it alone; all: both")
    ] = "all"

    def manifest(self) -> pa.Table:
        """List the clips of the CSV files. Nobody owns a clip (group is null): partition by clips.

        Raises:
            DataError: a CSV file is missing, lacks a column, or names no file that is there.
        """
        root = find_root(self.root, self.card)
        rows: list[dict[str, Any]] = []
        for part in ("dev", "eval") if self.subset == "all" else (self.subset,):
            file = root / "FSD50K.ground_truth" / f"{part}.csv"
            if not file.is_file():
                raise wrong_layout(root, self.card, f"there is no FSD50K.ground_truth/{part}.csv")
            table = read_rows(file, _PARTS[part], self.card)
            folder = f"FSD50K.{part}_audio"
            if not any((root / folder / f"{row['fname']}.wav").is_file() for row in table):
                raise wrong_layout(root, self.card, f"{folder}/ has none of the files of {part}.csv")
            rows += [
                {
                    "clip": f"{folder}/{row['fname']}.wav",
                    "label": row["labels"],
                    "split": "test" if part == "eval" else SPLIT_OF.get(row["split"].lower(), "train"),
                }
                for row in table
            ]
        if self.subset == "eval":
            rows = [{**row, "split": None} for row in rows]
        return manifest_of(sorted(rows, key=lambda row: str(row["clip"])), root, self.card)
