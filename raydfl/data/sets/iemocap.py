"""IEMOCAP (C. Busso and others, Language Resources and Evaluation 2008): dialogues of ten actors in five sessions, by turn.

The label is the majority vote of the raters (``dialog/EmoEvaluation``). Turns without a majority (``xxx``) are left out. By
default the set has the four classes of FedAudio and FedMLAC (neutral, happy including excited, sad, angry) and leaves out all
remaining turns. ``improvised=true`` reads only improvised dialogues, as in both papers. The loader is tested on generated files
in this layout, not on the set itself.

    data: {name: iemocap, root: IEMOCAP_full_release, improvised: true, test_sessions: [5],
           features: {normalise: group, seconds: 5.0}}
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
from raydfl.data.sets._files import FileDataset, add_test_split, make_layout_error

_TURN = re.compile(
    r"\[(?P<start>[\d.]+) - (?P<end>[\d.]+)\]\s+"
    r"(?P<turn>(?P<dialogue>Ses(?P<session>\d\d)[FM]_(?P<kind>impro|script)\w*)_(?P<speaker>[FM])\w+)\s+"
    r"(?P<emotion>[a-z]{3})\s"
)
_FOUR = {"neu": "neu", "hap": "hap", "exc": "hap", "sad": "sad", "ang": "ang"}
_ALL = {code: code for code in ("neu", "hap", "exc", "sad", "ang", "fru", "fea", "sur", "dis", "oth")}


@dataclass(frozen=True, kw_only=True)
class IEMOCAP(FileDataset):
    """Emotions in dialogue.

    Groups are actors (``Ses01F`` ... ``Ses05M``). Extra columns: ``session`` (int64) and ``dialogue``. The set has no official
    split. Durations are from the evaluation files.
    """

    card: ClassVar[Card] = Card(
        title="IEMOCAP",
        layout="Session{1-5}/dialog/EmoEvaluation/{dialogue}.txt and Session{1-5}/sentences/wav/{dialogue}/{turn}.wav",
        licence="on request from the University of Southern California",
        url="https://sail.usc.edu/iemocap",
        classes=len(set(_FOUR.values())),
    )

    improvised: Annotated[bool, Field(description="Leave out scripted dialogues.")] = False
    emotions: Annotated[
        Literal["four", "all"],
        Field(description="Classes. four: neu, hap (includes exc), sad, ang. all: the ten categories."),
    ] = "four"
    test_sessions: Annotated[
        tuple[int, ...], Field(description="Sessions (1 to 5, two actors each) in the test set. Empty: no split.")
    ] = ()

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the turns of the chosen emotions."""
        reports = sorted(
            file for file in root.glob("Session[1-5]/dialog/EmoEvaluation/*.txt") if not file.name.startswith(".")
        )
        if not reports:
            raise make_layout_error(root, self.card, "there is no Session{1-5}/dialog/EmoEvaluation with txt files")
        rows = [row for report in reports for row in self._list_turns(report)]
        return add_test_split(rows, "session", self.test_sessions, self.card)

    def _list_turns(self, report: Path) -> Iterator[dict[str, Any]]:
        """Yield the turns of a dialogue with chosen emotions."""
        labels = _FOUR if self.emotions == "four" else _ALL
        # Latin-1 decodes any byte, and the parsed fields are ASCII.
        for number, line in enumerate(report.read_text("latin-1").splitlines(), start=1):
            if not line.startswith("["):
                continue  # the header or a rater's vote
            turn = _TURN.match(line)
            if turn is None:
                raise DataError(
                    f"{self.card.title}: line {number} of {report} is not '[start - end] turn emotion ...': {line!r}"
                )
            if turn["emotion"] not in labels or (self.improvised and turn["kind"] != "impro"):
                continue
            session = int(turn["session"])
            yield {
                "clip": f"Session{session}/sentences/wav/{turn['dialogue']}/{turn['turn']}.wav",
                "label": labels[turn["emotion"]],
                "group": f"Ses{turn['session']}{turn['speaker']}",
                "seconds": float(turn["end"]) - float(turn["start"]),
                "session": session,
                "dialogue": turn["dialogue"],
            }
