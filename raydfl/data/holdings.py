"""Holdings: who has which examples of a population, and how many clips of each label.

Every client has one range of the examples of a part. There are two ways to say which, with the same methods: each example belongs
to one client, or a table of clients says where each one's range begins and ends, and several clients may have an example. A client
is found without a look at the others, and all else is counted from arrays that stay where they are, in memory or in a mapped file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


class OwnedExamples:
    """Examples of which each belongs to one client: those of a client follow one another.

    Args:
        arrays: of the population: ``PART/offsets`` (int64 [clients + 1]) of each part that is clients' own.
        labels: how many labels there are.
    """

    trained_on_by_attackers = "attack"
    """The part that a client trains on when it attacks."""

    def __init__(self, arrays: Mapping[str, np.ndarray], labels: int) -> None:
        self._arrays, self._labels = arrays, labels

    def has(self, part: str) -> bool:
        """Return whether clients have examples of their own in a part."""
        return f"{part}/offsets" in self._arrays

    def range_of(self, part: str, client: int) -> slice:
        """Return where in a part the examples of a client lie."""
        offsets = self._arrays[f"{part}/offsets"]
        return slice(offsets[client], offsets[client + 1])

    def sizes(self) -> np.ndarray:
        """Return how many examples each client has in the part train: int64 [clients]."""
        return np.diff(self._arrays["train/offsets"])

    def label_counts(self, part: str, clients: slice | np.ndarray) -> np.ndarray:
        """Return how many clips with each label some clients have in a part: int64 [these clients, labels]."""
        offsets, labels, clips = (self._arrays[f"{part}/{column}"] for column in ("offsets", "labels", "clips"))
        number = len(offsets) - 1
        client = np.repeat(np.arange(number), np.diff(offsets))
        first = _begins_clip(clips)
        first[1:] |= client[1:] != client[:-1]
        first &= labels >= 0
        cell = client[first] * self._labels + labels[first]
        return np.bincount(cell, minlength=number * self._labels).reshape(number, self._labels)[clients]

    def labels_of_all(self) -> np.ndarray:
        """Return how many clips with each label all clients together train on: int64 [labels]."""
        summed: np.ndarray = self.label_counts("train", slice(None)).sum(axis=0)
        return summed


class SharedExamples:
    """Training examples of which several clients may have one, as a table of clients says; of other parts no client has any.

    Args:
        arrays: of the population: ``train/first`` and ``train/stop`` (int32 [clients]).
        labels: how many labels there are.
    """

    trained_on_by_attackers = "train"
    """Like :attr:`OwnedExamples.trained_on_by_attackers`: attackers leave examples alone that others have too."""

    def __init__(self, arrays: Mapping[str, np.ndarray], labels: int) -> None:
        self._arrays, self._labels = arrays, labels

    def has(self, part: str) -> bool:
        """Return whether clients have examples in a part."""
        return part == "train"

    def range_of(self, part: str, client: int) -> slice:
        """Return where in a part the examples of a client lie."""
        if not self.has(part):
            return slice(0, 0)
        return slice(int(self._arrays["train/first"][client]), int(self._arrays["train/stop"][client]))

    def sizes(self) -> np.ndarray:
        """Return how many examples each client has in the part train: int64 [clients]."""
        sizes: np.ndarray = self._arrays["train/stop"].astype(np.int64)
        sizes -= self._arrays["train/first"]  # in place: there may be millions of clients
        return sizes

    def label_counts(self, part: str, clients: slice | np.ndarray) -> np.ndarray:
        """Return how many clips with each label some clients have in a part, which is train: int64 [these clients, labels]."""
        labels, first = self._arrays[f"{part}/labels"], _begins_clip(self._arrays[f"{part}/clips"])
        begin, end = (self._arrays[f"{part}/{bound}"][clients] for bound in ("first", "stop"))
        counts = np.empty((len(begin), self._labels), np.int64)
        for label in range(self._labels):
            before = np.concatenate([[0], np.cumsum(first & (labels == label))])
            counts[:, label] = before[end] - before[begin]
        return counts

    def labels_of_all(self) -> np.ndarray:
        """Return how many clips with each label all clients together train on, a clip once for each that has it: int64 [labels]."""
        labels = self._arrays["train/labels"]
        begun, ended = (
            np.cumsum(np.bincount(self._arrays[f"train/{bound}"], minlength=len(labels) + 1))[:-1]
            for bound in ("first", "stop")
        )
        first = _begins_clip(self._arrays["train/clips"]) & (labels >= 0)
        return np.bincount(labels[first], (begun - ended)[first], self._labels).astype(np.int64)


def holdings_of(arrays: Mapping[str, np.ndarray], labels: int) -> OwnedExamples | SharedExamples:
    """Return who has which examples, in the way in which the arrays of a population say it.

    Args:
        arrays: of the population.
        labels: how many labels there are.
    """
    return (SharedExamples if "train/first" in arrays else OwnedExamples)(arrays, labels)


def block_diagonal(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Return int64 matrices one below and beside the other, with zeros elsewhere."""
    whole = np.zeros(np.sum([block.shape for block in blocks], axis=0), np.int64)
    row = column = 0
    for block in blocks:
        whole[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return whole


def _begins_clip(clips: np.ndarray) -> np.ndarray:
    """Return which examples are the first of their clip, whose segments follow one another: bool [examples]."""
    return np.concatenate([np.ones(min(len(clips), 1), bool), clips[1:] != clips[:-1]])
