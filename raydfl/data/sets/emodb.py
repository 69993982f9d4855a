"""Berlin Database of Emotional Speech (EmoDB; F. Burkhardt and others, Interspeech 2005): acted German speech, ten speakers.

    raydfl data info jobs/tiny.yaml data='{name: emodb, root: PATH/TO/emodb,
      split: {test: {by: group, values: ["03", "08"]}}}'

Groups are text: write ``"03"`` in quotes, since YAML reads 03 as the number 3.
"""

from __future__ import annotations

from typing import ClassVar

from raydfl.data.dataset import Card
from raydfl.data.sets._files import FileDataset

_EMOTIONS = {
    "W": "anger",
    "L": "boredom",
    "E": "disgust",
    "A": "fear",
    "F": "happiness",
    "T": "sadness",
    "N": "neutral",
}


class EmoDB(FileDataset):
    """Seven acted emotions.

    Groups are speakers. Extra columns: ``text`` (code of one of ten sentences) and ``take`` (a letter). The set has no official
    split.
    """

    card: ClassVar[Card] = Card(
        title="EmoDB, Berlin Database of Emotional Speech",
        layout="wav/{speaker}{text}{emotion letter}{take}.wav",
        licence="no licence text; published free for research",
        url="http://emodb.bilderbar.info",
        classes=len(_EMOTIONS),
    )
    files: ClassVar = r"wav/.*\.wav"
    pattern: ClassVar = r"wav/(?P<group>\d\d)(?P<text>[ab]\d\d)(?P<label>[A-Z])(?P<take>[a-z])\.wav"
    codes: ClassVar = {"label": _EMOTIONS}
