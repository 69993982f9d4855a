"""UCF101: videos of 101 human actions, 51 of them with sound.

K. Soomro, A. R. Zamir, M. Shah, UCF101: A Dataset of 101 Human Actions Classes From Videos in The Wild, arXiv 1212.0402, 2012.

The 50 actions that UCF101 took from UCF50 have no sound. The official split is a fold of the lists. A video outside both lists
is an error, and listed videos may be missing. Only the loader was tested, on small trees in this layout and on two videos of a
class without sound. The complete job is ``jobs/modality_mirror/ucf101.yaml``; docs/views.md#videos explains videos.

    data:
      name: ucf101
      root: UCF101
      features: {kind: kaldi, seconds: 5.0, frames: 512}
      views: {video: {column: path, features: {kind: image, size: 224, channels: 3, resize: true}}}
      unreadable: skip # a video of these classes may still be silent
      partition: {by: dirichlet, clients: 100, alpha: 0.1, minimum: 5}
    method: multifl
    models: {audio: crnn_lite, video: {name: cnn_small, view: video}}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card
from raydfl.data.sets._files import FileDataset, read_text

_VIDEOS, _LISTS = "UCF-101", "ucfTrainTestlist"
_SILENT = frozenset(
    [
        *("BaseballPitch", "Basketball", "BenchPress", "Biking", "Billiards", "BreastStroke", "CleanAndJerk", "Diving"),
        *("Drumming", "Fencing", "GolfSwing", "HighJump", "HorseRace", "HorseRiding", "HulaHoop", "JavelinThrow"),
        *("JugglingBalls", "JumpRope", "JumpingJack", "Kayaking", "Lunges", "MilitaryParade", "Mixing", "Nunchucks"),
        *("PizzaTossing", "PlayingGuitar", "PlayingPiano", "PlayingTabla", "PlayingViolin", "PoleVault", "PommelHorse"),
        *("PullUps", "Punch", "PushUps", "RockClimbingIndoor", "RopeClimbing", "Rowing", "SalsaSpin", "SkateBoarding"),
        *("Skiing", "Skijet", "SoccerJuggling", "Swing", "TaiChi", "TennisSwing", "ThrowDiscus", "TrampolineJumping"),
        *("VolleyballSpiking", "WalkingWithDog", "YoYo"),
    ]
)
"""Classes of UCF50, without sound."""


@dataclass(frozen=True, kw_only=True)
class UCF101(FileDataset):
    """Videos of human actions.

    Groups are scenes of similar videos (``Archery/g08``). Extra column: ``number`` (int64). Without the folder of lists, the
    set has no split.
    """

    card: ClassVar[Card] = Card(
        title="UCF101",
        layout=f"{_VIDEOS}/{{class}}/v_{{class}}_g{{group}}_c{{number}}.avi and {_LISTS}/{{trainlist,testlist}}0{{1,2,3}}.txt",
        licence="research use",
        url="https://www.crcv.ucf.edu/data/UCF101.php",
        classes=51,
    )
    files: ClassVar = rf"{_VIDEOS}/.*\.avi"
    pattern: ClassVar = rf"(?a:{_VIDEOS}/(?P<label>.*)/v_\w+_g(?P<group>\d+)_c(?P<number>\d+)\.avi)"
    codes: ClassVar = {"number": int}

    fold: Annotated[Literal[1, 2, 3], Field(description="Number of the official training and test split.")] = 1
    classes: Annotated[
        Literal["with_sound", "all"],
        Field(description="with_sound: the 51 classes with sound. all: all 101 classes, 50 of them silent."),
    ] = "with_sound"

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the videos of the chosen classes, split by the lists."""
        videos = super().rows(root)
        rows = [video for video in videos if self.classes == "all" or video["label"] not in _SILENT]
        if not rows:
            raise DataError(
                f"{self.card.title}: the {len(videos)} videos in {root / _VIDEOS} are of classes without sound. For images alone "
                f"set data.classes=all"
            )
        split_of = self._read_lists(root)
        for row in rows:
            video = row["clip"].removeprefix(f"{_VIDEOS}/")
            row["group"] = f"{row['label']}/g{row['group']}"  # numbers repeat between classes
            if split_of is not None:
                if video not in split_of:
                    raise DataError(
                        f"{self.card.title}: {video} is on neither list of fold {self.fold} in {root / _LISTS}. Remove it, or "
                        f"complete the lists"
                    )
                row["split"] = split_of[video]
        return rows

    def _read_lists(self, root: Path) -> dict[str, str] | None:
        """Read the split of each video ``{class}/{name}``; ``None`` without lists."""
        if not (root / _LISTS).is_dir():
            return None
        return {
            line.split()[0]: split
            for split in ("train", "test")
            for line in read_text(root, f"{_LISTS}/{split}list0{self.fold}.txt", self.card).splitlines()
            if line.strip()
        }
