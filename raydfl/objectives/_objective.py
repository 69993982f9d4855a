"""Base class of objectives."""

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
from raydfl.data import Event, Examples, Population
from raydfl.training import Step, predict

EXTENSION = "objective"
"""Attribute of a network with its objective's :meth:`Objective.extension`. Its tensors are ``model/objective...``."""


@dataclass(frozen=True, kw_only=True)
class Objective(StrictTypes):
    """Base class of objectives: a frozen dataclass without state, whose fields are its options."""

    labels: ClassVar[Labels] = "any"
    """Required labels of a clip: one label, a set (``data.label_sets``), a transcript (``data.label_sequences``), events
    (``data.events``), or any, including none."""

    needs_frames: ClassVar[bool] = False
    """Whether a network must have ``frames(x, lengths)``, which returns tokens float32 [batch, tokens, width] and their valid
    number (int64 [batch], or ``None`` for all), and ``head(tokens)``, its last layers."""

    headline: ClassVar[str] = "loss"
    """Default metric for comparing runs, by the last part of its name."""

    answers: ClassVar[Literal["class", "set", "score", "text", "intervals", "embedding", "none"]] = "none"
    """Kind of answer for a recording: the most probable class, a set of classes, an anomaly score, a transcript, events with their
    times, an embedding, or none."""

    compares_clips: ClassVar[bool] = False
    """Whether metrics compare test clips with each other. The server then evaluates each test set at once."""

    @property
    def needs(self) -> Needs:
        """Requirements on other settings. By default the :attr:`labels`."""
        return Needs(labels=self.labels, own_outputs=self.labels in ("sets", "sequences", "events"))

    def check(self, classes: Sequence[str], length: int | None) -> None:
        """Check the options against the data before the first round.

        Args:
            classes: names of the classes.
            length: frames of each example of a view. ``None``: lengths differ, or the view has images.

        Raises:
            ConfigError: an option does not fit the data.
        """

    def check_network(self, where: str, network: nn.Module, population: Population) -> None:
        """Check an untrained network against the data before the first round.

        Args:
            where: the place in the configuration, for error messages.
            network: the network.
            population: all clients, of one part if the data have parts. Without examples if they are stored at sites.

        Raises:
            ConfigError: the network has no frames, but the objective needs them.
            DataError: the examples do not fit the network.
        """
        missing = [name for name in ("frames", "head") if not callable(getattr(network, name, None))]
        if self.needs_frames and missing:
            raise ConfigError(
                f"{where}: objective {type(self).__name__.lower()!r} needs the network's output over time, but "
                f"{type(network).__name__} has no {missing[0]}(). Choose crnn_lite, pretrained or ssast_tiny, or define "
                f"{' and '.join(missing)} in your network."
            )

    def remarks(self, population: Population) -> Sequence[str]:
        """Return warnings about the clients' data before the first round.

        Args:
            population: all clients, of one part if the data have parts. Without examples if they are stored at sites.

        Raises:
            DataError: the objective cannot learn from the data.
        """
        return ()

    def outputs(self, classes: int) -> int:
        """Return the number of outputs of a network. By default one for each class."""
        return classes

    def extension(self, spec: ModelSpec) -> nn.Module | None:
        """Build the module that a network additionally needs for this objective. By default ``None``.

        The module becomes ``network.objective``. Its tensors are sent and stored like the network's tensors.

        Args:
            spec: specification of the network: ``inputs`` features of a frame, ``classes`` of the data, ``width`` outputs.
        """
        return None

    def extend(self, network: nn.Module, spec: ModelSpec) -> None:
        """Add the :meth:`extension` to a freshly built network.

        Raises:
            ConfigError: the network already has an attribute with this name.
        """
        extension = self.extension(spec)
        if extension is None:
            return
        if hasattr(network, EXTENSION):
            raise ConfigError(
                f"models.{spec.name}: {type(network).__name__} has an attribute {EXTENSION!r}, but {type(self).__name__} needs "
                f"this name for its tensors. Rename the attribute."
            )
        network.add_module(EXTENSION, extension)

    def loss(self, step: Step, name: str, batch: Batch) -> Tensor:
        """Compute the loss of a batch.

        Args:
            step: training step of the client.
            name: the trained model.
            batch: training examples.

        Returns:
            A scalar, computed with ``batch.mean(...)``.
        """
        raise NotImplementedError

    def predictor(self, network: nn.Module) -> nn.Module:
        """Return the module that predicts recordings. By default the network itself.

        Returns:
            A module: x float32 [batch, frames, inputs], lengths int64 [batch] or ``None`` -> float32 [batch, answers], or
            [batch, tokens, answers] for transcripts and intervals.
        """
        return network

    def answer(self, outputs: Tensor) -> Tensor:
        """Convert the predictor's outputs to probabilities or scores. By default unchanged.

        Args:
            outputs: float64 [rows, answers], outputs of the :meth:`predictor`.

        Returns:
            float64 [rows, answers].
        """
        return outputs

    def averages_logits(self) -> bool:
        """Return true to average the outputs of a clip's segments before :meth:`answer`, false to average their answers."""
        return False

    def answer_of_clip(self, outputs: Tensor) -> Tensor:
        """Combine the outputs of a clip's segments, float64 [segments, answers], into its answer, float64 [answers]."""
        if self.averages_logits():
            return self.answer(outputs.mean(dim=0, keepdim=True))[0]
        return self.answer(outputs).mean(dim=0)

    def chosen(self, answer: np.ndarray) -> np.ndarray:
        """Choose the classes of a clip if :attr:`answers` is "set".

        Args:
            answer: float64 [classes].

        Returns:
            bool [classes].
        """
        return answer >= 0.5

    def transcript(self, answer: np.ndarray, classes: Sequence[str], joint: str) -> str:
        """Return the text of a clip if :attr:`answers` is "text".

        Args:
            answer: float [tokens, answers], from :meth:`answer_of_clip`.
            classes: names of the classes, the units of transcripts.
            joint: text between two units.
        """
        raise NotImplementedError

    def answer_of_examples(self, outputs: Tensor, examples: Examples, predictor: nn.Module) -> Tensor:
        """Combine the outputs of a clip's examples, in the order of time. By default with :meth:`answer_of_clip`.

        Args:
            outputs: float64 [examples, ...], outputs of the predictor.
            examples: all examples of a single clip.
            predictor: the module from :meth:`predictor`.
        """
        return self.answer_of_clip(outputs)

    def intervals(
        self, answer: np.ndarray, classes: Sequence[str], predictor: nn.Module, frame_seconds: float
    ) -> list[Event]:
        """Return the events in a clip if :attr:`answers` is "intervals": onset and offset in seconds, and class.

        Args:
            answer: float64 [tokens, classes], from :meth:`answer_of_examples`.
            classes: names of the classes.
            predictor: the module from :meth:`predictor`.
            frame_seconds: time between two frames of the features.
        """
        raise NotImplementedError

    def names(self, classes: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the predictor's outputs. By default the classes."""
        return tuple(classes)

    def metrics(self, outputs: Tensor, examples: Examples) -> Metrics:
        """Compute the metrics of a prediction: ``loss`` and scores.

        Args:
            outputs: float32 [examples, answers], outputs of the :meth:`predictor`.
            examples: the examples, with labels and the clip of each segment.
        """
        raise NotImplementedError

    def evaluate(self, step: Step, name: str, examples: Examples, batch_size: int) -> Metrics:
        """Evaluate a model on examples. By default with :meth:`metrics`."""
        return self.metrics(self.answers_to(step, name, examples, batch_size), examples)

    def answers_to(self, step: Step, name: str, examples: Examples, batch_size: int) -> Tensor:
        """Compute the predictor's outputs for examples: float32 [examples, answers], on the CPU."""
        network = step.models[name]
        predictor = self.predictor(network)
        if predictor is not network:  # the predictor must read the network's view
            step = dataclasses.replace(step, models={**step.models, name: same_view(predictor, network)})
        return predict(step, name, examples, batch_size)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the predictor's outputs for batches of examples."""
        return torch.cat([*parts])


def mean_over_clips(values: Tensor, examples: Examples) -> tuple[np.ndarray, np.ndarray]:
    """Average values over the segments of each clip.

    Args:
        values: [examples, ...].
        examples: the examples, with the clip of each segment in ``clips``.

    Returns:
        float64 [clips, ...], in ascending order of ``clips``, and int64 [clips], the position of each clip's first segment.
    """
    rows = values.detach().to("cpu", torch.float64).numpy()
    _, first, clip = np.unique(examples.clips, return_index=True, return_inverse=True)
    sums = np.zeros((len(first), *rows.shape[1:]))
    np.add.at(sums, clip, rows)
    return sums / np.bincount(clip).reshape(-1, *[1] * (rows.ndim - 1)), first
