"""Objective: what is learnt of the examples: the base of every objective."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.needs import Labels, Needs
from raydfl.core.settings import StrictTypes
from raydfl.core.types import Batch, Metrics, ModelSpec, same_view
from raydfl.data import Examples, Population
from raydfl.training import Step, predict

EXTENSION = "objective"
"""The name under which a network holds what its objective adds to it: its tensors are ``model/objective...``."""


@dataclass(frozen=True, kw_only=True)
class Objective(StrictTypes):
    """Base of every objective. A frozen dataclass: its fields are its options. It holds no state."""

    labels: ClassVar[Labels] = "any"
    """The labels that it needs of a clip: one, a set of labels (``data.label_sets``), or nothing, whatever labels there are."""

    headline: ClassVar[str] = "loss"
    """The score by which runs are compared where nobody says another, by the last part of its name."""

    answers: ClassVar[Literal["class", "set", "score", "none"]] = "none"
    """The answer of a network about a recording: the most probable class, a set of classes, how strange it is, or nothing."""

    @property
    def needs(self) -> Needs:
        """The needs of other settings; by default the :attr:`labels`."""
        return Needs(labels=self.labels, own_outputs=self.labels == "sets")

    def check(self, classes: Sequence[str], length: int | None) -> None:
        """Refuse options that do not fit the data, with a ConfigError, before the first round.

        Args:
            classes: names of the classes.
            length: frames of every example of a view that a network reads; ``None``: they differ, or it is one of images.
        """

    def remarks(self, population: Population) -> Sequence[str]:
        """Return what is to be said of the clients' data before the first round, or refuse them with a DataError.

        Args:
            population: all clients, of one part where there are parts; it holds no examples where these are at sites.
        """
        return ()

    def outputs(self, classes: int) -> int:
        """Return how many numbers a network gives for an example; by default one for each class."""
        return classes

    def extension(self, spec: ModelSpec) -> nn.Module | None:
        """Return what a network needs besides for this objective, freshly initialised; by default nothing.

        It becomes a part of the network, ``network.objective``; its tensors travel and are kept as the network's own.

        Args:
            spec: of the network: ``inputs`` features of a frame, ``classes`` of the data, ``width`` outputs.
        """
        return None

    def extend(self, network: nn.Module, spec: ModelSpec) -> None:
        """Add the :meth:`extension` to a freshly built network.

        Raises:
            ConfigError: the network has something of that name.
        """
        extension = self.extension(spec)
        if extension is None:
            return
        if hasattr(network, EXTENSION):
            raise ConfigError(
                f"models.{spec.name}: {type(network).__name__} has an attribute {EXTENSION!r}, under which "
                f"{type(self).__name__} adds tensors of its own; rename it"
            )
        network.add_module(EXTENSION, extension)

    def loss(self, step: Step, name: str, batch: Batch) -> Tensor:
        """Return the loss of a batch, a scalar that ends in ``batch.mean(...)``.

        Args:
            step: of the client.
            name: of the model that learns.
            batch: some training examples.
        """
        raise NotImplementedError

    def predictor(self, network: nn.Module) -> nn.Module:
        """Return what is asked about recordings: by default the network itself.

        Returns:
            A module: x float32 [batch, frames, inputs], lengths int64 [batch] or ``None`` -> float32 [batch, answers].
        """
        return network

    def answer(self, outputs: Tensor) -> Tensor:
        """Return what the predictor's outputs say, in the form that is averaged over the segments of a clip by default.

        Args:
            outputs: float64 [rows, answers], of the :meth:`predictor`.

        Returns:
            float64 [rows, answers]: probabilities or scores; by default the outputs as they are.
        """
        return outputs

    def averages_logits(self) -> bool:
        """Return whether a clip's answer is that of the mean of its segments' outputs, and not the mean of their answers."""
        return False

    def answer_of_clip(self, outputs: Tensor) -> Tensor:
        """Return what is said of a clip: float64 [answers], of its segments' outputs float64 [segments, answers]."""
        if self.averages_logits():
            return self.answer(outputs.mean(dim=0, keepdim=True))[0]
        return self.answer(outputs).mean(dim=0)

    def chosen(self, answer: np.ndarray) -> np.ndarray:
        """Return which classes a clip has: bool [classes], of its answer float64 [classes]; asked where ``answers`` is "set"."""
        return answer >= 0.5

    def names(self, classes: Sequence[str]) -> tuple[str, ...]:
        """Return what the predictor's outputs are called: by default the classes' names."""
        return tuple(classes)

    def metrics(self, outputs: Tensor, examples: Examples) -> Metrics:
        """Return what is measured on some examples: ``loss`` and scores.

        Args:
            outputs: float32 [examples, answers], of the :meth:`predictor`.
            examples: with labels, and the numbers of the clips that segments are of.
        """
        raise NotImplementedError

    def evaluate(self, step: Step, name: str, examples: Examples, batch_size: int) -> Metrics:
        """Measure a model of a step on some examples; by default :meth:`metrics` of the predictor's outputs."""
        return self.metrics(self.answers_to(step, name, examples, batch_size), examples)

    def answers_to(self, step: Step, name: str, examples: Examples, batch_size: int) -> Tensor:
        """Return the predictor's outputs for some examples, float32 [examples, answers], on the CPU."""
        network = step.models[name]
        predictor = self.predictor(network)
        if predictor is not network:
            step = dataclasses.replace(step, models={**step.models, name: same_view(predictor, network)})
        return predict(step, name, examples, batch_size)


def mean_over_clips(values: Tensor, examples: Examples) -> tuple[np.ndarray, np.ndarray]:
    """Return one row for each clip: the mean over its segments, in the order of the clips' numbers.

    Args:
        values: [examples, ...].
        examples: whose ``clips`` say which segments are of one clip.

    Returns:
        float64 [clips, ...], and int64 [clips]: the position of each clip's first segment.
    """
    rows = values.detach().to("cpu", torch.float64).numpy()
    _, first, clip = np.unique(examples.clips, return_index=True, return_inverse=True)
    sums = np.zeros((len(first), *rows.shape[1:]))
    np.add.at(sums, clip, rows)
    return sums / np.bincount(clip).reshape(-1, *[1] * (rows.ndim - 1)), first
