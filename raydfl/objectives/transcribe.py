"""Transcribe: speech recognition with CTC.

    q_t    softmax(head(h_t)) over the units and the blank (output 0), with the network's output h_t at token t
    loss   mean over clips of -log p(transcript) / max(1, units of the transcript)
    p      sum over all token sequences that give the transcript, after merging repeats and removing blanks, of the product of q_t

A. Graves, S. Fernandez, F. Gomez, J. Schmidhuber, Connectionist Temporal Classification: Labelling Unsegmented Sequence Data with
Recurrent Neural Networks, ICML 2006. The division by the number of units gives clips of any length the same weight.

The answer is greedy: the most probable output of each token, with repeats merged and blanks removed. ``cer`` and ``wer`` divide the
edits of all clips by the characters and the words of their transcripts, so they may exceed 1. With units of words, words are
separated by a space, which counts as a character.

Training first learns that most tokens are blank, and answers nothing for many rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.errors import ClipError
from raydfl.core.metrics import count_edits
from raydfl.core.ops import ctc_loss
from raydfl.core.types import Batch, Metrics, Ratio, view_of
from raydfl.data import Examples, Population, join_units
from raydfl.objectives._tokens import TokenObjective, count_frames_per_token
from raydfl.training import Step

_IMPOSSIBLE = -1e4
"""Logarithm of a probability that counts as 0. Infinity would make gradients NaN."""
BLANK = "<blank>"
"""Name of output 0."""


@dataclass(frozen=True, kw_only=True)
class Transcribe(TokenObjective):
    """Speech recognition (data.label_sequences), trained with CTC."""

    labels: ClassVar[Literal["one", "sets", "sequences", "any"]] = "sequences"
    headline: ClassVar[str] = "cer"
    answers: ClassVar[Literal["class", "set", "score", "text", "none"]] = "text"

    def outputs(self, classes: int) -> int:
        """Return the number of units and the blank."""
        return classes + 1

    def names(self, classes: Sequence[str]) -> tuple[str, ...]:
        """Return the blank and the units."""
        return (BLANK, *classes)

    def check_network(self, where: str, network: nn.Module, population: Population) -> None:
        """Check that the network has frames, and enough tokens for the transcript of each clip."""
        TokenObjective.check_network(self, where, network, population)
        if not population.has_clips or not population.stores:
            return
        view = view_of(network)
        for role in ("train", "validation", "client_test", "test"):
            for examples in population.read_role(role):
                _check_lengths(where, cast(Any, network), examples.select_view(view))

    def remarks(self, population: Population) -> Sequence[str]:
        """Return a warning if clips may be cut off, because their transcripts stay whole."""
        if not population.has_clips or not population.stores:
            return ()
        full = number = 0
        for examples in population.read_role("train"):
            store, starts = examples.first_view.store, examples.first_view.starts
            if store.length is None:
                return ()
            lengths = store.lengths[np.searchsorted(store.offsets, starts, side="right") - 1]
            full, number = full + int((lengths == store.length).sum()), number + len(starts)
        if not full:
            return ()
        return (
            f"{full:,} of {number:,} training clips last at least data.features.seconds. Their ends may be cut off, but their "
            f"transcripts are whole. Raise data.features.seconds, or set it to null",
        )

    def loss(self, step: Step, name: str, batch: Batch) -> Tensor:
        """Compute the mean CTC loss, each clip divided by its number of units."""
        network = step.models[name]
        return batch.mean(_compute_losses(_compute_log_probabilities(network, *batch.input_of(network)), batch.y))

    def predictor(self, network: nn.Module) -> nn.Module:
        """Wrap the network to compute the logarithms of the probabilities at each token."""
        return _Transcriber(network)

    def activate(self, logits: Tensor) -> Tensor:
        """Compute the logarithms of the probabilities."""
        return logits.log_softmax(dim=-1)

    def fill(self, zeros: Tensor) -> Tensor:
        """Return the logarithms of the probabilities of certain blanks."""
        return _make_blanks(zeros)

    def answer_of_clip(self, outputs: Tensor) -> Tensor:
        """Return the outputs of a clip's only segment: float64 [tokens, units + 1]."""
        return outputs[0]

    def transcript(self, answer: np.ndarray, classes: Sequence[str], joint: str) -> str:
        """Decode a clip greedily."""
        best = answer.argmax(axis=1)
        is_new = np.r_[True, best[1:] != best[:-1]]
        return join_units(classes, best[is_new & (best > 0)] - 1, joint)

    def metrics(self, outputs: Tensor, examples: Examples) -> Metrics:
        """Compute ``loss``, ``cer`` and ``wer``."""
        y = examples.targets(examples.labels)
        truth = [join_units(examples.classes, row, examples.joint) for row in y]
        answers = [self.transcript(row, examples.classes, examples.joint) for row in outputs.numpy()]
        pairs = [*zip(truth, answers, strict=True)]
        words = [(clip.split(), answer.split()) for clip, answer in pairs]
        losses = _compute_losses(outputs.double(), torch.from_numpy(y))
        return {
            "loss": Ratio(float(losses.sum()), len(pairs)),
            "cer": Ratio(sum(count_edits(*pair) for pair in pairs), sum(len(clip) for clip, _ in pairs)),
            "wer": Ratio(sum(count_edits(*pair) for pair in words), sum(len(clip) for clip, _ in words)),
        }


def _compute_losses(log_probabilities: Tensor, y: Tensor) -> Tensor:
    """Compute the CTC loss of each clip, divided by its number of units: float [batch].

    Args:
        log_probabilities: float [batch, tokens, units + 1].
        y: int64 [batch, longest], indices of units, -1 after the end.
    """
    return ctc_loss(log_probabilities, torch.where(y < 0, y, y + 1)) / (y >= 0).sum(dim=1).clamp_min(1)


def _compute_log_probabilities(network: nn.Module, x: Tensor, lengths: Tensor | None) -> Tensor:
    """Compute the logarithms of probabilities, float32 [batch, tokens, units + 1]. Padding is blank with certainty.

    A certain blank changes neither the loss nor the answer, so all clips of a batch may count as equally long.
    """
    frames, count = cast(Any, network).frames(x, lengths)
    values: Tensor = cast(Any, network).head(frames).float().log_softmax(dim=2)
    if count is None:
        return values
    valid = torch.arange(values.shape[1], device=values.device) < count.unsqueeze(1)
    return torch.where(valid.unsqueeze(2), values, _make_blanks(torch.zeros_like(values)))


def _make_blanks(zeros: Tensor) -> Tensor:
    """Convert zeros [..., units + 1] to the logarithms of the probabilities of certain blanks."""
    outputs = torch.arange(zeros.shape[-1], device=zeros.device)
    return zeros + (outputs > 0) * _IMPOSSIBLE


class _Transcriber(nn.Module):
    """Network with the logarithms of the probabilities at each token as its output: float32 [batch, tokens, units + 1]."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.frames_per_token = network, count_frames_per_token(network)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return _compute_log_probabilities(self.network, x, lengths)


def count_needed_tokens(sequences: np.ndarray) -> np.ndarray:
    """Count the tokens that CTC needs: the units, and a blank between equal neighbours.

    Args:
        sequences: int [clips, longest], -1 after the end.

    Returns:
        int64 [clips].
    """
    units = sequences >= 0
    repeats = (sequences[:, 1:] == sequences[:, :-1]) & units[:, 1:]
    needed: np.ndarray = units.sum(axis=1) + repeats.sum(axis=1)
    return needed


def _check_lengths(where: str, network: Any, examples: Examples) -> None:
    """Reject a clip with fewer tokens than its transcript needs.

    Raises:
        ClipError: a clip is too short.
    """
    view, y = examples.first_view, examples.targets(examples.labels)
    needed, shortest = count_needed_tokens(y), np.iinfo(np.int64).max
    # A clip is checked only if it is shorter than all clips with longer transcripts.
    for index in np.lexsort((view.counts, -needed)).tolist():
        if view.counts[index] >= shortest:
            continue
        shortest = int(view.counts[index])
        batch = examples.batch(np.array([index]))
        frames, count = network.frames(*batch.input_of(network))
        tokens = frames.shape[1] if count is None else int(count[0])
        if tokens < needed[index]:
            text = join_units(examples.classes, y[index], examples.joint)
            pooled = hasattr(network, "pool")
            remedy = f"Lower {where}.pool, data.features.hop_ms or window_ms, or leave" if pooled else "Leave"
            raise ClipError(
                int(examples.clips[index]),
                f"{where}: the transcript {text!r} of clip {{clip}} needs {needed[index]} tokens: its units, and a blank "
                f"between equal units. The network has {tokens} for its {shortest} frames. "
                f"{remedy} the clip out. Wrong transcripts of data.corrupt.labels may need more tokens than yours.",
            )
