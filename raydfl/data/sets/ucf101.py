"""UCF101: films of 101 human actions, of which 51 have sound.

K. Soomro, A. R. Zamir, M. Shah, UCF101: A Dataset of 101 Human Actions Classes From Videos in The Wild, arXiv 1212.0402, 2012.

Layout: ``UCF-101/{class}/v_{class}_g{group}_c{number}.avi`` and the lists ``ucfTrainTestlist/{trainlist,testlist}0{1,2,3}.txt``.
The 50 actions that UCF101 took from UCF50 have no sound.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card
from raydfl.data.sets._files import FileDataset, read_text

_FILMS, _LISTS = "UCF-101", "ucfTrainTestlist"
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
"""The classes of UCF50."""


@dataclass(frozen=True, kw_only=True)
class UCF101(FileDataset):
    """Films of human actions. A group is a scene: ``{class}/g{group}``.

    Extra column: ``number`` (int64). Without the folder of lists there is no official split.
    """

    card: ClassVar[Card] = Card(
        title="UCF101",
        layout=f"{_FILMS}/{{class}}/v_{{class}}_g{{group}}_c{{number}}.avi and {_LISTS}/{{trainlist,testlist}}0{{1,2,3}}.txt",
        licence="research use",
        url="https://www.crcv.ucf.edu/data/UCF101.php",
        classes=51,
    )
    files: ClassVar = rf"{_FILMS}/.*\.avi"
    pattern: ClassVar = rf"(?a:{_FILMS}/(?P<label>.*)/v_\w+_g(?P<group>\d+)_c(?P<number>\d+)\.avi)"
    codes: ClassVar = {"number": int}

    fold: Annotated[Literal[1, 2, 3], Field(description="which of the official divisions into training and test")] = 1
    classes: Annotated[
        Literal["with_sound", "all"],
        Field(
            description="`with_sound`: the 51 classes whose films have sound; `all`: all 101, of which 50 are silent"
        ),
    ] = "with_sound"

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the films that are there, divided as the lists say."""
        films = super().rows(root)
        rows = [film for film in films if self.classes == "all" or film["label"] not in _SILENT]
        if not rows:
            raise DataError(
                f"{self.card.title}: the {len(films)} films in {root / _FILMS} are of classes without sound; for pictures alone "
                f"set data.classes=all"
            )
        split_of = self._lists(root)
        for row in rows:
            film = row["clip"].removeprefix(f"{_FILMS}/")
            row["group"] = f"{row['label']}/g{row['group']}"
            if split_of is not None:
                if film not in split_of:
                    raise DataError(
                        f"{self.card.title}: {film} is on neither list of fold {self.fold} in {root / _LISTS}; remove it, or "
                        f"complete the lists"
                    )
                row["split"] = split_of[film]
        return rows

    def _lists(self, root: Path) -> dict[str, str] | None:
        """Return the part of the split by film: ``{class}/{name}``; ``None`` without lists."""
        if not (root / _LISTS).is_dir():
            return None
        return {
            line.split()[0]: split
            for split in ("train", "test")
            for line in read_text(root, f"{_LISTS}/{split}list0{self.fold}.txt", self.card).splitlines()
            if line.strip()
        }
