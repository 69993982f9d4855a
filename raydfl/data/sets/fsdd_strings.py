"""Strings of spoken digits, joined from recordings of the Free Spoken Digit Dataset. The label is the string, such as ``407``.

A string has takes of one speaker, with a pause before, between and after them. Digits, takes and pauses are drawn by ``seed``. The
takes are divided before strings are drawn: test strings and training strings have no take in common, and neither do two clients.
The digits of a string are drawn evenly. A client draws a digit from its own takes of the digit.

    data:
      name: fsdd_strings
      root: PATH/TO/fsdd
      label_sequences: {units: characters}
      features: {sample_rate: 8000, bands: 40, window_ms: 25, hop_ms: 10}
      partition: {by: group}
    objective: transcribe
    models: {model: crnn_base}

The job ``jobs/transcribe_digits.yaml`` trains on this set (docs/objectives.md#transcribe).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import ConfigError, DataError, nearest
from raydfl.core.seeds import generator
from raydfl.data.audio import read_audio
from raydfl.data.dataset import Card
from raydfl.data.manifest import make_manifest
from raydfl.data.sets.fsdd import FSDD

_PAUSE_MS = (25.0, 150.0)
# Part of the identity of each clip. Increase it when a change gives different samples for the same options.
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class FSDDStrings(FSDD):
    """Strings of spoken digits.

    Groups are clients: a speaker and a number, such as ``george-3``. Extra columns: ``speaker``, ``client`` (the group, and for
    test strings one of their speaker's clients), ``takes`` (the recordings) and ``pauses`` (ms, one more than the takes).
    """

    card: ClassVar[Card] = Card(
        title="Strings of digits of the Free Spoken Digit Dataset",
        layout=FSDD.card.layout,
        licence=FSDD.card.licence,
        url=FSDD.card.url,
    )

    digits: Annotated[
        tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]],
        Field(description="Least and largest number of digits of a string."),
    ] = (1, 5)
    clients: Annotated[
        int,
        Field(
            ge=1, description="Clients of each speaker. The speaker's takes of each digit are dealt to them in turn."
        ),
    ] = 10
    strings: Annotated[int, Field(ge=1, description="Training strings of each client.")] = 30
    test_strings: Annotated[int, Field(ge=0, description="Test strings of each speaker. 0: no split.")] = 50
    test_speakers: Annotated[
        tuple[str, ...],
        Field(
            description="Speakers of the test set. All of their takes are for tests. Empty: all speakers, with the first "
            "test_takes of each digit."
        ),
    ] = ()
    seed: Annotated[int, Field(ge=0, description="Seed of digits, takes and pauses.")] = 0

    def manifest(self) -> pa.Table:
        """Draw the strings.

        Raises:
            ConfigError: the largest number of digits is below the least, or a speaker is unknown.
            DataError: the recordings are missing, or too few for the clients or the test.
        """
        if self.digits[1] < self.digits[0]:
            raise ConfigError(
                f"data.digits: the largest number, {self.digits[1]}, is below the least, {self.digits[0]}"
            )
        files: dict[str, dict[str, list[tuple[str, str]]]] = {}
        for row in FSDD.manifest(self).sort_by("take").to_pylist():
            files.setdefault(row["group"], {}).setdefault(row["label"], []).append((row["path"], row["split"]))
        for speaker in self.test_speakers:
            if speaker not in files:
                raise ConfigError(f"data.test_speakers: unknown speaker {speaker!r}. {nearest(speaker, files)}")
        rows: list[dict[str, Any]] = []
        for speaker, takes in sorted(files.items()):
            test, train = self._divide(speaker, takes)
            if self.test_strings and test:
                rows += self._draw(speaker, f"{speaker}-test", test, self.test_strings, "test")
            for number in range(self.clients if train else 0):
                owned = {digit: names[number :: self.clients] for digit, names in train.items()}
                rows += self._draw(speaker, f"{speaker}-{number}", owned, self.strings, "train")
        if not self.test_strings:
            rows = [{**row, "split": None} for row in rows]
        return make_manifest(rows, f"{self.card.title} in {self.root}")

    def _divide(
        self, speaker: str, takes: Mapping[str, list[tuple[str, str]]]
    ) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Divide a speaker's takes into test and training, by digit. Empty: the speaker has none."""
        if self.test_speakers:
            whole = {digit: [path for path, _ in paths] for digit, paths in takes.items()}
            return (whole, {}) if speaker in self.test_speakers else ({}, whole)
        test, train = (
            {digit: [path for path, split in paths if (split == "test") is wanted] for digit, paths in takes.items()}
            for wanted in (True, False)
        )
        return test, train

    def _draw(
        self, speaker: str, group: str, takes: Mapping[str, list[str]], count: int, split: str
    ) -> list[dict[str, Any]]:
        """Draw the strings of a client, or of a speaker's test.

        Args:
            speaker: name of the speaker.
            group: name of the client.
            takes: the recordings by digit.
            count: number of strings.
            split: split of the strings.
        """
        for digit, paths in takes.items():
            if not paths:
                remedy = (
                    "Raise data.test_takes, or set data.test_strings to 0" if split == "test" else "Lower data.clients"
                )
                raise DataError(f"{self.card.title}: {group} has no take of digit {digit} in {self.root}. {remedy}")
        random, names, rows = generator(self.seed, 0, group, "digit strings"), sorted(takes), []
        for number in range(count):
            length = int(random.integers(self.digits[0], self.digits[1] + 1))
            label = [names[index] for index in random.integers(len(names), size=length)]
            chosen = [takes[digit][int(random.integers(len(takes[digit])))] for digit in label]
            pauses = random.uniform(*_PAUSE_MS, size=length + 1).round(1)
            rows.append(
                {
                    "clip": f"{group}/{number}",
                    "path": chosen[0],
                    "label": "".join(label),
                    "group": group,
                    "split": split,
                    "speaker": speaker,
                    "client": f"{speaker}-{number % self.clients}" if split == "test" else group,
                    "takes": "\n".join(chosen),
                    "pauses": " ".join(map(str, pauses.tolist())),
                }
            )
        return rows

    def read(self, row: Mapping[str, Any]) -> tuple[npt.NDArray[np.float32], int]:
        """Join the recordings of a string, with silence in the pauses."""
        sounds = [read_audio(path) for path in row["takes"].split("\n")]
        rate, channels = sounds[0][1], sounds[0][0].shape[1]
        silences = [np.zeros((round(float(ms) * rate / 1000), channels), np.float32) for ms in row["pauses"].split()]
        pieces = [silences[0]]
        for (samples, _), silence in zip(sounds, silences[1:], strict=True):
            pieces += [samples, silence]
        return np.concatenate(pieces), rate

    def identity(self, row: Mapping[str, Any]) -> str:
        """Return the pauses and a digest of the recordings of a string."""
        digest = hashlib.blake2b(digest_size=16)
        for path in row["takes"].split("\n"):
            digest.update(Path(path).read_bytes())
        return f"digit string {_VERSION}, {row['pauses']}, {digest.hexdigest()}"
