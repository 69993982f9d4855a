"""Events: sound event detection, the classes in a clip with their onsets and offsets.

    p(t, c)   sigmoid(head(h_t)) with the network's output h_t at token t
    loss      of a clip with times: binary cross-entropy of p(t, c), averaged over its tokens and classes
              of a clip without: binary cross-entropy of y(c), averaged over the classes
    y(c)      sum over t of p(t, c)^2 / sum over t of p(t, c)

Token k lasts from k s to (k + 1) s, where s is the time between two frames times the network's frames per token. An event is active
at a token if the centre of the token is between its onset and offset. The loss of a batch is the mean over clips, so clips of any
length have the same weight. y is linear softmax pooling:

Y. Wang, J. Li, F. Metze, A Comparison of Five Multiple Instance Learning Pooling Functions for Sound Event Detection with Weak
Labeling, ICASSP 2019.

Predicted events are the intervals with a probability of at least ``threshold``. Segments of a clip are joined first: probabilities
of the same time are averaged. ``psds1`` and ``psds2`` are scores over all thresholds (:mod:`raydfl.core.psds`). ``segment_f1`` is
F1 over all classes and segments of 1 s, which are active if any part is. Test clips without times count in the ``loss`` only.
Events in a part of a clip without features (``seconds``, ``random_crop``) count as missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from scipy.ndimage import median_filter
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.psds import COUNTS, count_detections, find_detections
from raydfl.core.settings import FIRST_VIEW
from raydfl.core.types import Batch, Metrics, Ratio, view_of
from raydfl.data import Event, Examples, Population
from raydfl.objectives._tokens import TokenObjective, count_frames_per_token
from raydfl.training import Step

_NO_TOKEN = -1.0
"""Probability of a token after the end of an example."""
_SMALLEST = 1e-6
"""Lower bound of pooled probabilities in the loss."""
_SEGMENT = 1.0
"""Length of a segment in s."""
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Events(TokenObjective):
    """Sound event detection (data.events), trained with binary cross-entropy at each token."""

    labels: ClassVar[Literal["one", "sets", "sequences", "events", "any"]] = "events"
    headline: ClassVar[str] = "psds1"
    answers: ClassVar[Literal["class", "set", "score", "text", "intervals", "none"]] = "intervals"

    times: Annotated[
        bool,
        Field(
            description="Train with the times of events. false: with the classes of each clip alone, as without times."
        ),
    ] = True
    threshold: Annotated[
        float, Field(gt=0, lt=1, description="Minimum probability of a predicted event, for segment_f1 and predict.")
    ] = 0.5
    median_filter: Annotated[
        float,
        Field(
            ge=0,
            le=60,
            description="Length in seconds of a median filter over the probabilities of each class, for all scores and predict. 0: "
            "no filter.",
        ),
    ] = 0.0

    def check_network(self, where: str, network: nn.Module, population: Population) -> None:
        """Check that the network has frames of the first view, and tokens for all of them."""
        TokenObjective.check_network(self, where, network, population)
        if view_of(network) != FIRST_VIEW:
            raise ConfigError(
                f"{where}: the network reads the view {view_of(network)!r}, but events have the times of data.features. Remove "
                f"{where}.view"
            )
        examples = population.first_examples(1)
        if examples is None:
            return
        x, lengths = examples.batch(np.zeros(1, np.int64)).input_of(network)
        step = count_frames_per_token(network)
        expected, tokens = x.shape[1] // step, cast(Any, network).frames(x, lengths)[0].shape[1]
        if tokens < expected - 3:
            raise ConfigError(
                f"{where}: {type(network).__name__} has {tokens} tokens for {x.shape[1]} frames, but frames_per_token {step} means "
                f"{expected}. Raise its number of frames, use shorter clips or data.segment, or correct frames_per_token in your "
                f"network"
            )

    def remarks(self, population: Population) -> Sequence[str]:
        """Return a warning if no test clip has the times of an event."""
        roles: Sequence[Literal["validation", "client_test", "test"]] = ("validation", "client_test", "test")
        if not population.has_clips or not population.stores:
            return ()
        tests = [_list_events(examples) for role in roles for examples in population.read_role(role) if len(examples)]
        if not tests or any((np.isfinite(y[:, :, 0]) & (y[:, :, 2] >= 0)).any() for y in tests):
            return ()
        return ("no test clip has the times of an event, so psds1, psds2 and segment_f1 have no value",)

    def loss(self, step: Step, name: str, batch: Batch) -> Tensor:
        """Compute the mean loss of the clips."""
        network = step.models[name]
        logits, valid = _compute_logits(network, *batch.input_of(network))
        return batch.mean(_compute_losses(logits, valid, batch.y, count_frames_per_token(network), self.times))

    def predictor(self, network: nn.Module) -> nn.Module:
        """Wrap the network to compute the probabilities at each token, -1 after the end of an example."""
        return _Detector(network)

    def activate(self, logits: Tensor) -> Tensor:
        """Compute the probability of each class."""
        return logits.sigmoid()

    def fill(self, zeros: Tensor) -> Tensor:
        """Return the value -1."""
        return torch.full_like(zeros, _NO_TOKEN)

    def answer_of_clip(self, outputs: Tensor) -> Tensor:
        """Return the outputs of a clip's only example, without padding: float64 [tokens, classes]."""
        return outputs[0, outputs[0, :, 0] != _NO_TOKEN]

    def answer_of_examples(self, outputs: Tensor, examples: Examples, predictor: nn.Module) -> Tensor:
        """Join the outputs of a clip's segments, and filter them: float64 [tokens, classes].

        Tokens between the start of the clip and its first example have probability 0.
        """
        view, rows = examples.first_view, np.arange(len(examples))
        starts = np.rint(view.find_starts(view.window(rows)[0]) / count_frames_per_token(predictor)).astype(np.int64)
        parts = [self.answer_of_clip(outputs[row : row + 1]).numpy() for row in rows]
        sums = np.zeros(
            (max(start + len(part) for start, part in zip(starts.tolist(), parts, strict=True)), outputs.shape[2])
        )
        number = np.zeros((len(sums), 1))
        for start, part in zip(starts.tolist(), parts, strict=True):
            sums[start : start + len(part)] += part
            number[start : start + len(part)] += 1
        joined = sums / np.maximum(number, 1)
        size = self.count_filter_tokens(examples.frame_seconds * count_frames_per_token(predictor))
        return torch.from_numpy(median_filter(joined, (size, 1), mode="nearest") if size > 1 else joined)

    def count_filter_tokens(self, token_seconds: float) -> int:
        """Return the length of the median filter in tokens, an odd number. 1: no filter."""
        ratio = self.median_filter / token_seconds if token_seconds else 0.0
        return 1 + 2 * round((ratio - 1) / 2) if ratio > 1 else 1

    def intervals(
        self, answer: np.ndarray, classes: Sequence[str], predictor: nn.Module, frame_seconds: float
    ) -> list[Event]:
        """Return the intervals with a probability of at least the threshold, in the order of time."""
        found = self._find_intervals(answer, frame_seconds * count_frames_per_token(predictor))
        return sorted((onset, offset, classes[int(label)]) for onset, offset, label in found.tolist())

    def _find_intervals(self, answer: np.ndarray, token_seconds: float) -> np.ndarray:
        """Return the predicted events, float64 [events, 3]: onset and offset in seconds, and class."""
        label, first, end = find_detections(self.threshold <= answer.T)
        return np.stack([first * token_seconds, end * token_seconds, label], axis=1)

    def evaluate(self, step: Step, name: str, examples: Examples, batch_size: int) -> Metrics:
        """Compute the metrics of a model."""
        return self.compare(self.answers_to(step, name, examples, batch_size), examples, step.models[name])

    def compare(self, outputs: Tensor, examples: Examples, network: nn.Module) -> Metrics:
        """Compute ``loss``, ``segment_f1`` and the counts for ``psds1`` and ``psds2``.

        Args:
            outputs: float [examples, tokens, classes], probabilities at each token, -1 after the end of an example.
            examples: the examples, with all segments of a clip.
            network: the network whose tokens these are, for its frames per token.
        """
        outputs = outputs.double()
        valid, y = outputs[:, :, 0] != _NO_TOKEN, torch.from_numpy(_list_events(examples))
        losses = _compute_losses(outputs.logit(_SMALLEST), valid, y, count_frames_per_token(network), True)
        seconds = examples.frame_seconds * count_frames_per_token(network)
        counts: np.ndarray | None = None
        right, wrong = 0, 0
        for clip in np.unique(examples.clips):
            rows = np.flatnonzero(examples.clips == clip)
            events = cast(np.ndarray, examples.events)[examples.labels[rows[0]]]
            events = events[events[:, 2] >= 0]
            if np.isinf(events).any():
                continue
            answer = self.answer_of_examples(outputs[torch.from_numpy(rows)], examples.take(rows), network).numpy()
            own = count_detections(answer, seconds, events)
            counts = own if counts is None else counts + own
            answered = self._find_intervals(answer, seconds)
            both, either = count_segments(events, answered, answer.shape[1])
            right, wrong = right + both, wrong + either - both
        metrics: dict[str, Any] = {"loss": Ratio(float(losses.sum()), len(losses))}
        if counts is not None:
            metrics |= {"segment_f1": Ratio(2 * right, 2 * right + wrong), COUNTS: counts}
        return metrics


def count_segments(truth: np.ndarray, answer: np.ndarray, classes: int) -> tuple[int, int]:
    """Count the active segments of a clip: in both of truth and answer, and in at least one of them.

    Args:
        truth: float64 [events, 3]: onset and offset in seconds, and class.
        answer: the predicted events, likewise.
        classes: number of classes.
    """
    size = int(np.ceil(max(events[:, 1].max(initial=0.0) for events in (truth, answer)) / _SEGMENT)) + 1
    active = np.zeros((2, size, classes), bool)
    for segments, events in zip(active, (truth, answer), strict=True):
        for onset, offset, label in events.tolist():
            first, end = int(onset / _SEGMENT + _ROUNDING), int(np.ceil(offset / _SEGMENT - _ROUNDING))
            segments[first:end, int(label)] = True
    return int(active.all(axis=0).sum()), int(active.any(axis=0).sum())


def mark_active_frames(examples: Examples) -> list[np.ndarray]:
    """Mark the events at each frame of each example: float32 [frames, classes], 0 or 1.

    An example of a clip without times has no rows.
    """
    events = torch.from_numpy(_list_events(examples))
    _, counts = examples.first_view.window(np.arange(len(examples)))
    marked = []
    for y, count in zip(events, counts.tolist(), strict=True):
        frames = 0 if y[:1, 0].isinf().any() else count
        marked.append(_mark_active(y[None], torch.zeros(1, frames, len(examples.classes)), 1)[0][0].numpy())
    return marked


def _list_events(examples: Examples) -> np.ndarray:
    """Return the events of each example, float32 [examples, most events, 3], with times in frames."""
    view = examples.first_view
    events: np.ndarray = examples.targets(examples.labels, view.find_starts(view.window(np.arange(len(examples)))[0]))
    return events


def _compute_logits(network: nn.Module, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute logits float32 [batch, tokens, classes], and a mask of the valid tokens, bool [batch, tokens]."""
    frames, count = cast(Any, network).frames(x, lengths)
    logits: Tensor = cast(Any, network).head(frames).float()
    token = torch.arange(logits.shape[1], device=x.device)
    if count is None:  # encoders of clips of a fixed length also have tokens of the padding
        step = count_frames_per_token(network)
        count = torch.full_like(x[:, 0, 0], x.shape[1], dtype=torch.int64) if lengths is None else lengths
        count = (count + step - 1) // step
    return logits, token < count.unsqueeze(1)


def _compute_losses(logits: Tensor, valid: Tensor, y: Tensor, frames_per_token: int, times: bool) -> Tensor:
    """Compute the loss of each clip: float [batch].

    Args:
        logits: float [batch, tokens, classes].
        valid: bool [batch, tokens], mask of the tokens without padding.
        y: float32 [batch, most events, 3]: onset and offset in frames, and class, -1 after the last event.
        frames_per_token: frames from a token to the next.
        times: whether to use the times of events.
    """
    active, present = _mark_active(y, logits, frames_per_token)
    valid = valid.unsqueeze(2)
    tokens = valid.sum(dim=1)
    timed = torch.where(valid, F.softplus(logits) - logits * active, 0.0).sum(dim=1) / tokens
    p = torch.where(valid, logits.sigmoid(), 0.0)
    pooled = p.square().sum(dim=1) / p.sum(dim=1).clamp_min(_SMALLEST)
    likelihood = torch.where(present > 0, pooled, 1 - pooled)
    untimed = -likelihood.clamp_min(_SMALLEST).log()
    if not times:
        return untimed.mean(dim=1)
    return torch.where(torch.isinf(y[:, :1, 0]), untimed, timed).mean(dim=1)


def _mark_active(y: Tensor, logits: Tensor, frames_per_token: int) -> tuple[Tensor, Tensor]:
    """Mark the events at each token, as 0 or 1 in the dtype of the logits.

    Returns:
        The active classes [batch, tokens, classes], and the classes of each clip [batch, classes].
    """
    centre = (torch.arange(logits.shape[1], device=y.device) + 0.5) * frames_per_token
    onset, offset, label = (y[:, :, column].unsqueeze(2) for column in range(3))
    classes = (label == torch.arange(logits.shape[2], device=y.device)).to(logits.dtype)
    inside = ((onset <= centre) & (centre < offset)).to(logits.dtype)
    return (inside.transpose(1, 2) @ classes).clamp_max(1.0), classes.amax(dim=1)


class _Detector(nn.Module):
    """Network with the probabilities at each token as its output: float32 [batch, tokens, classes], -1 after an example's end."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.frames_per_token = network, count_frames_per_token(network)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        logits, valid = _compute_logits(self.network, x, lengths)
        return torch.where(valid.unsqueeze(2), logits.sigmoid(), _NO_TOKEN)
