"""Speech Commands v0.01 and v0.02 (P. Warden, arXiv:1804.03209), and the archive with the 12-class test set.

The split is the published one: ``validation_list.txt`` and ``testing_list.txt``, all other clips are for training. The lists
may name clips that the folder does not have. A clip's group is the hash of its speaker.

With ``task="keywords"`` the classes are ten words, ``_unknown_`` (every other word) and ``_silence_``. As in the published
12-class protocol, silence is cut from the files of ``_background_noise_``: 1 s every 0.5 s, ``running_tap.wav`` for
validation and the other files for training; there is none when the folder is absent. The protocol's test set is the separate
archive: give its folder as ``test_root``, which then takes the place of the clips on the testing list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError, nearest
from raydfl.core.files import content_digest
from raydfl.data.audio import audio_seconds, read_audio
from raydfl.data.dataset import Card, Dataset
from raydfl.data.sets._files import find_root, list_audio, manifest_of, match_name, wrong_layout

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

_NAME = re.compile(r"(?:(?P<word>[a-z]+)_)?(?P<speaker>[0-9a-f]+)_nohash_(?P<take>\d+)\.wav(?:\.wav)?")
_FORM = "{speaker}_nohash_{take}.wav"


@dataclass(frozen=True, kw_only=True)
class SpeechCommands(Dataset):
    """Speech Commands: one-second clips of single words, many speakers of very uneven size."""

    card: ClassVar[Card] = Card(
        title="Speech Commands (v0.01, v0.02, or the 12-class test archive)",
        layout=f"one folder for each word with {_FORM}, and {' and '.join(_LISTS)}; "
        f"or the test archive's word folders with {UNKNOWN}/ and {SILENCE}/",
        licence="CC BY 4.0",
        url="http://download.tensorflow.org/data/speech_commands_v0.02.tar.gz",
    )

    root: Annotated[Path, Field(description="folder that the archive was unpacked into")]
    task: Annotated[
        Literal["words", "keywords"],
        Field(description=f"words: every folder is a class; keywords: those of `keywords`, {UNKNOWN} and {SILENCE}"),
    ] = "words"
    keywords: Annotated[
        tuple[str, ...], Field(min_length=1, description="the words that the keywords task tells apart")
    ] = KEYWORDS
    test_root: Annotated[
        Path | None,
        Field(description="folder of the 12-class test archive, used in place of the clips on the testing list"),
    ] = None

    def manifest(self) -> pa.Table:
        """Extra columns: ``word``, ``take`` (int64) and ``start`` (s).

        The word is what is said, null in silence. The start is where in its file a clip that is cut out begins, null for
        whole files.
        """
        root = find_root(self.root, self.card)
        rows = list(self._archive_rows(root, "", None) if _is_test_archive(root) else self._tree_rows(root))
        if self.test_root is not None:
            archive = find_root(self.test_root, self.card)
            if not _is_test_archive(archive):
                raise wrong_layout(archive, self.card, f"test_root is not the test archive: no {UNKNOWN} or {SILENCE}")
            rows = [row for row in rows if row["split"] != "test"] + list(
                self._archive_rows(archive, "test_root/", "test")
            )
        return manifest_of(rows, root, self.card)

    def read(self, row: Mapping[str, Any]) -> tuple[npt.NDArray[np.float32], int]:
        """Read the whole file, or for silence one second of it."""
        samples, rate = read_audio(row["path"])
        if row["start"] is None:
            return samples, rate
        first = round(row["start"] * rate)
        return samples[first : first + round(_SILENCE_SECONDS * rate)], rate

    def identity(self, row: Mapping[str, Any]) -> str | None:
        """Return ``None`` for whole files; for silence the file's digest and the place in it."""
        if row["start"] is None:
            return None
        return f"{content_digest(Path(row['path']))} from {row['start']} s for {_SILENCE_SECONDS} s"

    def _tree_rows(self, root: Path) -> Iterator[dict[str, Any]]:
        lists = {name: root / name for name in _LISTS}
        if missing := [name for name, path in lists.items() if not path.is_file()]:
            raise wrong_layout(root, self.card, f"there is no {' and no '.join(missing)}")
        split_of = {
            line.strip(): _LISTS[name] for name, path in lists.items() for line in path.read_text("utf-8").splitlines()
        }
        files = [name for name in list_audio(root) if "/" in name and not name.startswith(f"{_NOISE}/")]
        if not files:
            raise wrong_layout(root, self.card, "there are no word folders with wav files")
        self._check_keywords({name.split("/")[0] for name in files})
        for name in files:
            word = name.split("/")[0]
            found = match_name(_NAME, name.rpartition("/")[2], self.card, _FORM)
            split = split_of.get(name, "train")
            yield _row(name, root / name, self._label(word), found["speaker"], split, word, int(found["take"]))
        if self.task == "keywords" and (root / _NOISE).is_dir():
            yield from _silence_rows(root)

    def _archive_rows(self, root: Path, prefix: str, split: str | None) -> Iterator[dict[str, Any]]:
        files = [name for name in list_audio(root) if "/" in name]
        self._check_keywords({name.split("/")[0] for name in files} - {UNKNOWN, SILENCE})
        for name in files:
            folder, _, file = name.partition("/")
            if folder == SILENCE:
                yield _row(prefix + name, root / name, SILENCE, None, split, None, None)
                continue
            found = match_name(_NAME, file, self.card, f"{_FORM}, in {UNKNOWN} {{word}}_{_FORM}.wav")
            word = found["word"] if folder == UNKNOWN else folder
            yield _row(
                prefix + name, root / name, self._label(folder), found["speaker"], split, word, int(found["take"])
            )

    def _label(self, folder: str) -> str:
        return folder if self.task == "words" or folder in self.keywords else UNKNOWN

    def _check_keywords(self, folders: set[str]) -> None:
        if self.task == "keywords":
            for word in self.keywords:
                if word not in folders:
                    raise DataError(
                        f"{self.card.title}: there is no folder for the keyword {word!r}; {nearest(word, folders)}"
                    )


def _is_test_archive(root: Path) -> bool:
    return (root / UNKNOWN).is_dir() or (root / SILENCE).is_dir()


def _silence_rows(root: Path) -> Iterator[dict[str, Any]]:
    for name in list_audio(root / _NOISE):
        path = root / _NOISE / name
        split = "validation" if name == _VALIDATION_NOISE else "train"
        starts = np.arange(0.0, audio_seconds(path) - _SILENCE_SECONDS, _SILENCE_STEP)
        for take, start in enumerate(starts.tolist()):
            clip = f"{_NOISE}/{name}@{start:g}"
            yield _row(clip, path, SILENCE, None, split, None, take) | {"start": start, "seconds": _SILENCE_SECONDS}


def _row(
    clip: str, path: Path, label: str, speaker: str | None, split: str | None, word: str | None, take: int | None
) -> dict[str, Any]:
    return {
        "clip": clip,
        "path": str(path),
        "label": label,
        "group": speaker,
        "split": split,
        "seconds": None,
        "word": word,
        "take": take,
        "start": None,
    }
