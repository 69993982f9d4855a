"""RAVDESS (S. Livingstone and F. Russo, PLoS ONE 2018): acted emotional speech and song of 24 actors, the audio-only files.

To hold out the second statement:

    data: {name: ravdess, root: PATH/TO/RAVDESS, split: {test: {by: statement, values: [2]}}}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.data.dataset import Card
from raydfl.data.sets._files import FileDataset, make_layout_error

_EMOTIONS = {
    "01": "neutral",
    "02": "calm",
    "03": "happy",
    "04": "sad",
    "05": "angry",
    "06": "fearful",
    "07": "disgust",
    "08": "surprised",
}


@dataclass(frozen=True, kw_only=True)
class RAVDESS(FileDataset):
    """Eight acted emotions in speech (six in song).

    Eight emotions in speech, six in song. Groups are actors. Extra columns: ``channel`` (speech or song), ``intensity`` (normal
    or strong), ``statement`` and ``repetition`` (1 or 2, int64). The set has no official split.
    """

    card: ClassVar[Card] = Card(
        title="RAVDESS",
        layout="Actor_{nn}/03-{vocal channel}-{emotion}-{intensity}-{statement}-{repetition}-{actor}.wav, directly or in "
        "Audio_Speech_Actors_01-24/ and Audio_Song_Actors_01-24/",
        licence="CC BY-NC-SA 4.0",
        url="https://zenodo.org/record/1188976",
        classes=len(_EMOTIONS),
    )
    files: ClassVar = r".*Actor_.*/.*\.wav"
    pattern: ClassVar = (
        r".*/03-(?P<channel>\d\d)-(?P<label>\d\d)-(?P<intensity>\d\d)-(?P<statement>0[12])-(?P<repetition>0[12])"
        r"-(?P<group>\d\d)\.wav"
    )
    codes: ClassVar = {
        "channel": {"01": "speech", "02": "song"},
        "label": _EMOTIONS,
        "intensity": {"01": "normal", "02": "strong"},
        "statement": int,
        "repetition": int,
    }

    channel: Annotated[
        Literal["speech", "song", "both"], Field(description="Recordings to read: speech, song or both.")
    ] = "speech"

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the recordings of the chosen channel."""
        rows = super().rows(root)
        chosen = [row for row in rows if self.channel in (row["channel"], "both")]
        if not chosen:
            raise make_layout_error(root, self.card, f"none of the {len(rows)} files is {self.channel}")
        return chosen
