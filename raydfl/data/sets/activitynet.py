"""ActivityNet 1.3: web videos of 200 human activities, with their times.

F. Caba Heilbron, V. Escorcia, B. Ghanem, J. C. Niebles, ActivityNet: A Large-Scale Video Benchmark for Human Activity
Understanding, CVPR 2015.

The published validation set is raydfl's test set, because the labels of the published test set are not public. Its videos are
left out, and missing videos are ignored. Only the loader was tested, on small trees in this layout and on one video. The
complete job is ``jobs/modality_mirror/activitynet.yaml``; docs/views.md#videos explains videos.
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
from raydfl.core.isolation import reading
from raydfl.data.audio import read_audio
from raydfl.data.dataset import Card
from raydfl.data.images import read_image
from raydfl.data.manifest import VIDEO_SUFFIXES
from raydfl.data.sets._files import FileDataset, list_audio, make_layout_error, read_text

_LIST = "activity_net.v1-3.min.json"
_SPLIT_OF = {"training": "train", "validation": "test"}


@dataclass(frozen=True, kw_only=True)
class ActivityNet(FileDataset):
    """Videos of human activities.

    Groups are videos. Extra columns: ``start`` and ``stop`` (float64, seconds; null: the whole video).
    """

    card: ClassVar[Card] = Card(
        title="ActivityNet 1.3",
        layout=f"{_LIST} and videos v_{{id}}.mp4 (or .mkv, .webm ...) at any depth",
        licence="research use, rights with the uploaders",
        url="http://activity-net.org/download.html",
        classes=200,
    )

    clips: Annotated[
        Literal["segments", "films"],
        Field(
            description="segments: each annotated activity is a clip. films: each video is a clip of its first activity's class."
        ),
    ] = "segments"

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the clips of the videos below the root."""
        database = self._read_list(root)
        videos = {Path(name).stem.removeprefix("v_"): name for name in list_audio(root, VIDEO_SUFFIXES)}
        rows = [
            {"path": str(root / videos[video]), "group": video, "split": _SPLIT_OF[entry["subset"]], **row}
            for video, entry in sorted(database.items())
            if video in videos and entry.get("subset") in _SPLIT_OF
            for row in self._list_clips(videos[video], entry)
        ]
        if not rows:
            raise make_layout_error(root, self.card, f"there is no video with activities in {_LIST}")
        return rows

    def _list_clips(self, name: str, entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        place = f"{self.card.title}: {_LIST}"
        with reading(place, f"there are no valid activities of {name}", "Download the list again"):
            activities = [(mark["label"], *map(float, mark["segment"])) for mark in entry["annotations"]]
        if self.clips == "films":
            activities = [(label, 0.0, math.inf) for label, *_ in activities[:1]]
        for number, (label, start, stop) in enumerate(dict.fromkeys(activities)):
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
        # Re-encoding may shorten a video slightly, so activities may end after it.
        segment = samples[round(start * rate) : max(round(start * rate) + 1, round(stop * rate))]
        if not len(segment):
            raise DataError(
                f"{row['path']}: the activity starts at {start:g} s, but the video is only {len(samples) / rate:g} s long. "
                f"Download the video again"
            )
        return segment, rate

    def image(self, row: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
        """Read the frame in the middle of the segment."""
        image: npt.NDArray[np.uint8] = read_image(row["path"], row["start"] or 0.0, row["stop"])
        return image

    def part(self, row: Mapping[str, Any]) -> str | None:
        """Return ``@start-stop`` for a segment, and ``None`` for a whole video."""
        return None if row["start"] is None else f"@{row['start']!r}-{row['stop']!r}"

    def _read_list(self, root: Path) -> Mapping[str, Mapping[str, Any]]:
        """Read the published list: entries of the videos by id."""
        with reading(f"{self.card.title}: {root / _LIST}", remedy="Download it again"):
            database = json.loads(read_text(root, _LIST, self.card))["database"]
            if not isinstance(database, dict) or not all(isinstance(entry, dict) for entry in database.values()):
                raise TypeError("the entry database must be an object of objects")
        return database
