"""Speech Commands v0.01 and v0.02 (P. Warden, arXiv:1804.03209), and the archive with the 12-class test set.

The published split is in ``validation_list.txt`` and ``testing_list.txt``; unlisted clips are for training. Listed clips may be
missing in the folder. A clip's group is the hash of its speaker.

With ``task="keywords"`` the classes are ten words, ``_unknown_`` (all remaining words) and ``_silence_``. As in the published
12-class protocol, silence is cut from the files of ``_background_noise_``, 1 s every 0.5 s: ``running_tap.wav`` for validation
and the rest for training. Without this folder the set has no silence. The protocol's test set is a separate archive. Set
``test_root`` to its folder to replace the clips of the testing list.

Silence has no speaker. To split or partition a set with silence by group, deal it to the speakers with ``ungrouped: deal``, or
leave it out with ``leave_out: [_silence_]`` (docs/data.md#which-clips).

    data:
      name: speech_commands
      root: PATH/TO/speech_commands_v0.01
      partition: {by: group, minimum: 2, smaller: drop}
      split: {official_validation: drop}

The test archive as a set of its own:

    raydfl data info jobs/tiny.yaml data='{name: speech_commands,
      root: PATH/TO/speech_commands_test_set_v0.02, ungrouped: deal,
      split: {test: {by: group, fraction: 0.2}}}'
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError, nearest
from raydfl.core.files import content_digest
from raydfl.data.audio import audio_seconds, read_audio
from raydfl.data.dataset import Card
from raydfl.data.sets._files import FileDataset, find_root, list_audio, make_layout_error, read_text

KEYWORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
"""The ten commands of the 12-class task."""

WORDS = (
    *KEYWORDS,
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("bed", "bird", "cat", "dog", "happy", "house", "marvin", "sheila", "tree", "wow"),
    *("backward", "forward", "follow", "learn", "visual"),
)
"""The 35 words of v0.02; v0.01 has the first 30."""

UNKNOWN = "_unknown_"
SILENCE = "_silence_"
_NOISE = "_background_noise_"
_VALIDATION_NOISE = "running_tap.wav"
_SILENCE_SECONDS = 1.0
_SILENCE_STEP = 0.5
_LISTS = {"validation_list.txt": "validation", "testing_list.txt": "test"}


@dataclass(frozen=True, kw_only=True)
class SpeechCommands(FileDataset):
    """One-second clips of single words by many speakers of very uneven size.

    Extra columns: ``word`` (null for silence), ``take`` (int64) and ``start`` (position of silence in its file, in seconds; null
    for whole files).
    """

    card: ClassVar[Card] = Card(
        title="Speech Commands (v0.01, v0.02, or the 12-class test archive)",
        layout=f"a folder for each word with {{speaker}}_nohash_{{take}}.wav, and {' and '.join(_LISTS)}; "
        f"or the test archive's word folders with {UNKNOWN}/ and {SILENCE}/",
        licence="CC BY 4.0",
        url="http://download.tensorflow.org/data/speech_commands_v0.02.tar.gz",
    )

    files: ClassVar = rf"(?!{_NOISE}/)[^/]+/.*\.wav"
    # In the test archive, names of files of unknown words start with the word.
    pattern: ClassVar = (
        rf"{SILENCE}/.*|(?P<word>[^/]+)/(?:.*/)?"
        r"(?:(?P<other>[a-z]+)_)?(?P<group>[0-9a-f]+)_nohash_(?P<take>\d+)\.wav(?:\.wav)?"
    )
    codes: ClassVar = {"take": int}

    task: Annotated[
        Literal["words", "keywords"],
        Field(description=f"words: each folder is a class. keywords: classes are `keywords`, {UNKNOWN} and {SILENCE}."),
    ] = "words"
    keywords: Annotated[
        tuple[str, ...], Field(min_length=1, description="Words with their own classes in the keywords task.")
    ] = KEYWORDS
    test_root: Annotated[
        Path | None,
        Field(
            description="Folder of the 12-class test archive, in place of the clips of the testing list. null: none."
        ),
    ] = None

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the words, and the silence of the keywords task."""
        if _is_test_archive(root):
            rows = self._list_words(root, {})
        else:
            split_of = {
                line.strip(): split
                for name, split in _LISTS.items()
                for line in read_text(root, name, self.card).splitlines()
            }
            rows = self._list_words(root, split_of, "train")
            if self.task == "keywords" and (root / _NOISE).is_dir():
                rows += _list_silence(root)
        if self.test_root is not None:
            archive = find_root(self.test_root, self.card)
            if not _is_test_archive(archive):
                raise make_layout_error(
                    archive, self.card, f"test_root is not the test archive: no {UNKNOWN} or {SILENCE}"
                )
            rows = [row for row in rows if row["split"] != "test"]
            rows += [row | {"clip": f"test_root/{row['clip']}"} for row in self._list_words(archive, {}, "test")]
        return rows

    def read(self, row: Mapping[str, Any]) -> tuple[npt.NDArray[np.float32], int]:
        """Read the whole file, or a second of a file of noise for silence."""
        samples, rate = read_audio(row["path"])
        if row["start"] is None:
            return samples, rate
        first = round(row["start"] * rate)
        return samples[first : first + round(_SILENCE_SECONDS * rate)], rate

    def identity(self, row: Mapping[str, Any]) -> str | None:
        """Return ``None`` for whole files, and the file's digest with the segment for silence."""
        if row["start"] is None:
            return None
        return f"{content_digest(Path(row['path']))} from {row['start']} s for {_SILENCE_SECONDS} s"

    def _list_words(self, root: Path, split_of: Mapping[str, str], default: str | None = None) -> list[dict[str, Any]]:
        """List the clips of a folder, with their words, labels and splits.

        Args:
            root: the folder.
            split_of: split by path.
            default: split of files outside ``split_of``.
        """
        rows, folders = super().rows(root), set()
        for row in rows:
            clip, unknown_word = row["clip"], row.pop("other")
            folder = clip.split("/")[0]
            folders.add(folder)
            # In the test archive all unknown words share a folder, so the file's name has the word.
            unknown = self.task == "keywords" and folder not in (*self.keywords, SILENCE)
            row |= {"label": UNKNOWN if unknown else folder, "word": unknown_word if folder == UNKNOWN else row["word"]}
            row |= {"path": str(root / clip), "split": split_of.get(clip, default), "start": None}
        for word in self.keywords if self.task == "keywords" else ():
            if word not in folders:
                known = nearest(word, folders - {UNKNOWN, SILENCE})
                raise DataError(f"{self.card.title}: there is no folder for the keyword {word!r}. {known}")
        return rows


def _is_test_archive(root: Path) -> bool:
    return (root / UNKNOWN).is_dir() or (root / SILENCE).is_dir()


def _list_silence(root: Path) -> Iterator[dict[str, Any]]:
    for name in list_audio(root / _NOISE):
        path = root / _NOISE / name
        split = "validation" if name == _VALIDATION_NOISE else "train"
        starts = np.arange(0.0, audio_seconds(path) - _SILENCE_SECONDS, _SILENCE_STEP)
        for take, start in enumerate(starts.tolist()):
            clip = f"{_NOISE}/{name}@{start:g}"
            row = {"clip": clip, "path": str(path), "label": SILENCE, "group": None, "split": split}
            yield {**row, "seconds": _SILENCE_SECONDS, "word": None, "take": take, "start": start}
