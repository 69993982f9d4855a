"""ActivityNet 1.3: films from the web with 200 human activities, marked in time.

F. Caba Heilbron, V. Escorcia, B. Ghanem, J. C. Niebles, ActivityNet: A Large-Scale Video Benchmark for Human Activity
Understanding, CVPR 2015.

Layout: ``activity_net.v1-3.min.json`` and, at any depth, films ``v_{id}.mp4`` (or another ending of films). The published
validation set is the test set here, for the labels of the published test set are not public: its films are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.audio import read_audio
from raydfl.data.dataset import Card
from raydfl.data.images import read_image
from raydfl.data.manifest import VIDEO_SUFFIXES
from raydfl.data.sets._files import FileDataset, list_audio, read_text, wrong_layout

_LIST = "activity_net.v1-3.min.json"
_SPLIT_OF = {"training": "train", "validation": "test"}


@dataclass(frozen=True, kw_only=True)
class ActivityNet(FileDataset):
    """Films of human activities. A group is a film.

    Extra columns: ``start`` and ``stop`` (float64, seconds; null: the whole film).
    """

    card: ClassVar[Card] = Card(
        title="ActivityNet 1.3",
        layout=f"{_LIST} and films v_{{id}}.mp4 (or .mkv, .webm ...) at any depth",
        licence="research use, rights with the uploaders",
        url="http://activity-net.org/download.html",
        classes=200,
    )

    clips: Annotated[
        Literal["segments", "films"],
        Field(
            description="`segments`: each marked activity is a clip; `films`: each film is, of its first activity's class"
        ),
    ] = "segments"

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the clips of the films that are there."""
        database = self._database(root)
        films = {Path(name).stem.removeprefix("v_"): name for name in list_audio(root, VIDEO_SUFFIXES)}
        rows = [
            {"path": str(root / films[film]), "group": film, "split": _SPLIT_OF[about["subset"]], **row}
            for film, about in sorted(database.items())
            if film in films and about.get("subset") in _SPLIT_OF
            for row in self._clips(films[film], about)
        ]
        if not rows:
            raise wrong_layout(root, self.card, f"there is no film of those that {_LIST} marks activities in")
        return rows

    def _clips(self, name: str, about: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            marks = [(mark["label"], *map(float, mark["segment"])) for mark in about["annotations"]]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{self.card.title}: {_LIST} marks activities of {name} in another way than published: {error}"
            ) from error
        if self.clips == "films":
            marks = [(label, 0.0, math.inf) for label, *_ in marks[:1]]
        for number, (label, start, stop) in enumerate(dict.fromkeys(marks)):
            whole = self.clips == "films"
            yield {
                "clip": name if whole else f"{name}@{number}",
                "label": label,
                "start": None if whole else start,
                "stop": None if whole else stop,
                "seconds": None if whole else stop - start,
            }

    def read(self, row: Mapping[str, Any]) -> tuple[npt.NDArray[np.float32], int]:
        """Read the sound of the segment."""
        samples, rate = read_audio(row["path"])
        start, stop = row["start"], row["stop"]
        if start is None:
            return samples, rate
        # Marks may end a little after a film that was encoded anew.
        part = samples[round(start * rate) : max(round(start * rate) + 1, round(stop * rate))]
        if not len(part):
            raise DataError(
                f"{row['path']}: the activity begins at {start:g} s, and the film is {len(samples) / rate:g} s long"
            )
        return part, rate

    def image(self, row: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
        """Read the middle of the segment."""
        image: npt.NDArray[np.uint8] = read_image(row["path"], row["start"] or 0.0, row["stop"])
        return image

    def part(self, row: Mapping[str, Any]) -> str | None:
        """Return ``@start-stop`` of a segment."""
        return None if row["start"] is None else f"@{row['start']!r}-{row['stop']!r}"

    def _database(self, root: Path) -> Mapping[str, Mapping[str, Any]]:
        """Return what the published list says of each film, by its id."""
        try:
            found = json.loads(read_text(root, _LIST, self.card))["database"]
            if not isinstance(found, dict) or not all(isinstance(about, dict) for about in found.values()):
                raise TypeError("the entry database is no table of films")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.card.title}: {root / _LIST} cannot be read: {type(error).__name__}: {error}"
            ) from error
        return found
