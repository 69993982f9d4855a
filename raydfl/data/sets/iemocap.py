"""IEMOCAP (C. Busso and others, Language Resources and Evaluation 2008): dialogues of ten actors in five sessions, by turn.

The label is the one that most raters gave (``dialog/EmoEvaluation``); turns without a majority (``xxx``) are left out. By
default the classes are the four of FedAudio and FedMLAC: neutral, happy with excited merged into it, sad, angry; other turns
are left out. ``improvised=true`` keeps the improvised dialogues only, as both do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card
from raydfl.data.sets._files import FileDataset, hold_out, wrong_layout

_TURN = re.compile(
    r"\[(?P<start>[\d.]+) - (?P<end>[\d.]+)\]\s+"
    r"(?P<turn>(?P<dialogue>Ses(?P<session>\d\d)[FM]_(?P<kind>impro|script)\w*)_(?P<speaker>[FM])\w+)\s+"
    r"(?P<emotion>[a-z]{3})\s"
)
_FOUR = {"neu": "neu", "hap": "hap", "exc": "hap", "sad": "sad", "ang": "ang"}
_ALL = {code: code for code in ("neu", "hap", "exc", "sad", "ang", "fru", "fea", "sur", "dis", "oth")}


@dataclass(frozen=True, kw_only=True)
class IEMOCAP(FileDataset):
    """Emotions in dialogue; a group is an actor (``Ses01F`` ... ``Ses05M``).

    Extra columns: ``session`` (int64) and ``dialogue``. There is no official split. Durations are those of the evaluation files.
    """

    card: ClassVar[Card] = Card(
        title="IEMOCAP",
        layout="Session{1-5}/dialog/EmoEvaluation/{dialogue}.txt and Session{1-5}/sentences/wav/{dialogue}/{turn}.wav",
        licence="on request from the University of Southern California",
        url="https://sail.usc.edu/iemocap",
        classes=len(set(_FOUR.values())),
    )

    improvised: Annotated[bool, Field(description="only the improvised dialogues, not the scripted ones")] = False
    emotions: Annotated[
        Literal["four", "all"], Field(description="four: neu, hap (with exc), sad, ang; all: the ten categories")
    ] = "four"
    test_sessions: Annotated[
        tuple[int, ...], Field(description="these sessions (1 to 5, two actors each) are the test set; none: no split")
    ] = ()

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the turns of the chosen emotions."""
        reports = sorted(
            file for file in root.glob("Session[1-5]/dialog/EmoEvaluation/*.txt") if not file.name.startswith(".")
        )
        if not reports:
            raise wrong_layout(root, self.card, "there is no Session{1-5}/dialog/EmoEvaluation with txt files")
        rows = [row for report in reports for row in self._turns(report)]
        return hold_out(rows, "session", self.test_sessions, self.card)

    def _turns(self, report: Path) -> Iterator[dict[str, Any]]:
        """Yield the kept turns of one dialogue."""
        labels = _FOUR if self.emotions == "four" else _ALL
        for number, line in enumerate(report.read_text("latin-1").splitlines(), start=1):
            if not line.startswith("["):
                continue  # the header, and what each rater said
            found = _TURN.match(line)
            if found is None:
                raise DataError(
                    f"{self.card.title}: line {number} of {report} is no '[start - end] turn emotion ...': {line!r}"
                )
            if found["emotion"] not in labels or (self.improvised and found["kind"] != "impro"):
                continue
            session = int(found["session"])
            yield {
                "clip": f"Session{session}/sentences/wav/{found['dialogue']}/{found['turn']}.wav",
                "label": labels[found["emotion"]],
                "group": f"Ses{found['session']}{found['speaker']}",
                "seconds": float(found["end"]) - float(found["start"]),
                "session": session,
                "dialogue": found["dialogue"],
            }
