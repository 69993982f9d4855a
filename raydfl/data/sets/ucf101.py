"""UCF101: films of 101 human actions, of which 51 have sound.

K. Soomro, A. R. Zamir, M. Shah, UCF101: A Dataset of 101 Human Actions Classes From Videos in The Wild, arXiv 1212.0402, 2012.

Layout: ``UCF-101/{class}/v_{class}_g{group}_c{number}.avi`` and the lists ``ucfTrainTestlist/{trainlist,testlist}0{1,2,3}.txt``.
The 50 actions that UCF101 took from UCF50 have no sound.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card, Dataset
from raydfl.data.sets._files import find_root, list_audio, manifest_of, match_name, read_lines, wrong_layout

_FILMS, _LISTS = "UCF-101", "ucfTrainTestlist"
_NAME = re.compile(r"v_(\w+)_g(\d+)_c(\d+)\.avi", re.ASCII)
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
class UCF101(Dataset):
    """Films of human actions."""

    card: ClassVar[Card] = Card(
        title="UCF101",
        layout=f"{_FILMS}/{{class}}/v_{{class}}_g{{group}}_c{{number}}.avi and {_LISTS}/{{trainlist,testlist}}0{{1,2,3}}.txt",
        licence="research use",
        url="https://www.crcv.ucf.edu/data/UCF101.php",
        classes=51,
    )

    root: Annotated[Path, Field(description=f"folder that holds `{_FILMS}/` and `{_LISTS}/`")]
    fold: Annotated[Literal[1, 2, 3], Field(description="which of the official divisions into training and test")] = 1
    classes: Annotated[
        Literal["with_sound", "all"],
        Field(
            description="`with_sound`: the 51 classes whose films have sound; `all`: all 101, of which 50 are silent"
        ),
    ] = "with_sound"

    def manifest(self) -> pa.Table:
        """List the films that lie there, divided as the lists say. A group is a scene: ``{class}/g{group}``.

        Extra column: ``number`` (int64). Without the folder of lists there is no official split.
        """
        root = find_root(self.root, self.card)
        films = list_audio(root / _FILMS, (".avi",)) if (root / _FILMS).is_dir() else []
        if not films:
            raise wrong_layout(root, self.card, f"there is no {_FILMS}/ with avi files")
        split_of = self._lists(root)
        rows: list[dict[str, Any]] = []
        for film in films:
            label, _, name = film.rpartition("/")
            _, group, number = match_name(_NAME, name, self.card, "v_{class}_g{group}_c{number}.avi").groups()
            if self.classes == "with_sound" and label in _SILENT:
                continue
            row = {"clip": f"{_FILMS}/{film}", "label": label, "group": f"{label}/g{group}", "number": int(number)}
            if split_of is not None:
                if film not in split_of:
                    raise DataError(
                        f"{self.card.title}: {film} is on neither list of fold {self.fold} in {root / _LISTS}; remove it, or "
                        f"complete the lists"
                    )
                row["split"] = split_of[film]
            rows.append(row)
        if not rows:
            raise DataError(
                f"{self.card.title}: the {len(films)} films in {root / _FILMS} are of classes without sound; for pictures alone "
                f"set data.classes=all"
            )
        return manifest_of(rows, root, self.card)

    def _lists(self, root: Path) -> dict[str, str] | None:
        """Return the part of the split by film: ``{class}/{name}``; ``None`` without lists."""
        if not (root / _LISTS).is_dir():
            return None
        return {
            line.split()[0]: split
            for split in ("train", "test")
            for line in read_lines(root / _LISTS / f"{split}list0{self.fold}.txt", self.card)
        }
