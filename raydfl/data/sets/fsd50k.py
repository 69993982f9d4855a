"""FSD50K (E. Fonseca et al., IEEE/ACM TASLP 2022): Freesound clips with sets of labels of AudioSet's ontology.

The two lists are the official split; dev.csv also marks the validation clips. A label is a comma-separated list of classes: set
``data.label_sets: {separator: ","}`` for the objective multi_label (docs/objectives.md#multi_label). The objective contrast
ignores labels. No sample was available: the reader is tested on small trees in this layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.data.dataset import Card
from raydfl.data.sets._files import SPLIT_OF, FileDataset, make_layout_error, read_rows

_PARTS = {"dev": ("fname", "labels", "split"), "eval": ("fname", "labels")}


@dataclass(frozen=True, kw_only=True)
class FSD50K(FileDataset):
    """Sounds of 200 classes, several for a clip.

    Clips have no owner (group is null): partition by clips.
    """

    card: ClassVar[Card] = Card(
        title="FSD50K",
        layout="FSD50K.ground_truth/dev.csv and eval.csv, FSD50K.dev_audio/ and FSD50K.eval_audio/ with {number}.wav",
        licence="Creative Commons, each clip's own",
        url="https://zenodo.org/records/4060432",
    )

    subset: Annotated[
        Literal["all", "dev", "eval"],
        Field(description="dev: training and validation set. eval: test set alone. all: both."),
    ] = "all"

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the clips of the CSV files."""
        rows: list[dict[str, Any]] = []
        for part in _PARTS if self.subset == "all" else (self.subset,):
            folder = f"FSD50K.{part}_audio"
            table = read_rows(root, f"FSD50K.ground_truth/{part}.csv", _PARTS[part], self.card)
            # A single missing file is an unreadable clip, but a missing folder is a wrong layout.
            if not any((root / folder / f"{row['fname']}.wav").is_file() for row in table):
                raise make_layout_error(root, self.card, f"{folder}/ has none of the files of {part}.csv")
            for row in table:
                split = SPLIT_OF.get(row["split"].lower(), "train") if part == "dev" else "test"
                clip = {"clip": f"{folder}/{row['fname']}.wav", "label": row["labels"]}
                rows.append({**clip, "split": None if self.subset == "eval" else split})
        return sorted(rows, key=lambda row: str(row["clip"]))
