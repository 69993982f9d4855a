"""RAVDESS (S. Livingstone and F. Russo, PLoS ONE 2018): acted emotional speech and song of 24 actors, the audio-only files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.data.dataset import Card, Dataset
from raydfl.data.sets._files import find_root, list_audio, manifest_of, match_name, wrong_layout

_NAME = re.compile(
    r"03-(?P<channel>0[12])-(?P<emotion>0[1-8])-(?P<intensity>0[12])-(?P<statement>0[12])-(?P<repetition>0[12])"
    r"-(?P<actor>\d\d)\.wav"
)
_FORM = "03-{vocal channel}-{emotion}-{intensity}-{statement}-{repetition}-{actor}.wav"
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
_CHANNELS = {"01": "speech", "02": "song"}


@dataclass(frozen=True, kw_only=True)
class RAVDESS(Dataset):
    """Eight acted emotions in speech (six in song); a group is an actor."""

    card: ClassVar[Card] = Card(
        title="RAVDESS",
        layout=f"Actor_{{nn}}/{_FORM}, directly or in Audio_Speech_Actors_01-24/ and Audio_Song_Actors_01-24/",
        licence="CC BY-NC-SA 4.0",
        url="https://zenodo.org/record/1188976",
        classes=len(_EMOTIONS),
    )

    root: Annotated[Path, Field(description="folder that holds the actors' folders, or the folders of speech and song")]
    channel: Annotated[
        Literal["speech", "song", "both"], Field(description="which recordings, where the root has both")
    ] = "speech"

    def manifest(self) -> pa.Table:
        """Extra columns: ``channel``, ``intensity``, ``statement`` and ``repetition``. There is no official split.

        Channels are speech and song, intensities normal and strong; the others are 1 or 2 (int64).
        """
        root = find_root(self.root, self.card)
        files = [name for name in list_audio(root, (".wav",)) if "Actor_" in name.rpartition("/")[0]]
        if not files:
            raise wrong_layout(root, self.card, "there are no Actor_{nn} folders with wav files")
        rows = []
        for name in files:
            found = match_name(_NAME, name.rpartition("/")[2], self.card, _FORM)
            channel = _CHANNELS[found["channel"]]
            if self.channel not in (channel, "both"):
                continue
            rows.append(
                {
                    "clip": name,
                    "label": _EMOTIONS[found["emotion"]],
                    "group": found["actor"],
                    "channel": channel,
                    "intensity": "strong" if found["intensity"] == "02" else "normal",
                    "statement": int(found["statement"]),
                    "repetition": int(found["repetition"]),
                }
            )
        if not rows:
            raise wrong_layout(root, self.card, f"none of the {len(files)} files is {self.channel}")
        return manifest_of(rows, root, self.card)
