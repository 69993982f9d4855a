"""Section of a report about wrong predictions: the worst clips with a player, and the worst speakers and classes."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import matplotlib.image
import numpy as np
import soundfile
from markupsafe import Markup, escape
from scipy.signal import spectrogram

from raydfl.runs.inference.mistakes import MISTAKES_FOLDER, PredictedClip, read_predictions
from raydfl.runs.report.data import RunRecord
from raydfl.runs.report.page import Section

_EMBEDDED = 2 << 20
"""Maximum bytes of recordings in a page. Further recordings are links to files beside it."""
_CLIPS = 12
_PIXELS = (160, 48)
"""Width and height of a spectrogram."""
_RANGE = 80.0
"""Dynamic range of a spectrogram in dB."""
_WORST = 5
"""Number of speakers and of classes."""


def show_mistakes(run: RunRecord) -> Section:
    """List the test clips or trials with the worst predictions, with players, and the worst speakers and classes."""
    clips = read_predictions(run.folder)
    wrong = [clip for clip in clips if clip.label != clip.predicted]
    left, events, trials = _EMBEDDED, run.headline == "psds1", run.headline == "eer"
    rows = []
    for clip in wrong[:_CLIPS]:
        player, size = _make_player(run.folder, clip.recording, left)
        left -= size
        rows.append(
            (
                player,
                _draw_spectrogram(run.folder, clip.recording),
                clip.clip,
                *([] if trials else [clip.group]),
                *(text.replace("|", ", ") if events else text for text in (clip.label, clip.predicted)),
                f"{clip.probability:.3f}" if trials else f"{100 * clip.probability:.0f} %",
            )
        )
    transcripts = run.headline == "cer"
    notes = [] if events else [*_list_worst("Speakers", clips, lambda clip: clip.group)]
    notes += [] if transcripts or events or trials else _list_worst("Classes", clips, lambda clip: clip.label)
    order = "the largest share of edits" if transcripts else "the most confident"
    hint = f"{len(wrong):,} of {len(clips):,} test clips have a wrong prediction (predictions.csv), {order} first."
    if events:  # times are hardly ever exact
        hint = f"The worst of {len(clips):,} test clips (predictions.csv), by the fraction of wrong segments of 1 s."
    if trials:
        verb = "has" if len(wrong) == 1 else "have"
        hint = (
            f"{len(wrong):,} of the {len(clips):,} trials in predictions.csv {verb} a wrong decision at the threshold of equal "
            f"errors, the worst first."
        )
    return Section(
        "Mistakes",
        headings=(
            "listen",
            "spectrogram",
            *(["trial"] if trials else ["clip", "speaker"]),
            "truth",
            "prediction",
            "cosine" if trials else "probability",
        ),
        rows=rows,
        hint=hint,
        notes=notes,
    )


def _make_player(folder: Path, recording: str, left: int) -> tuple[str, int]:
    """Return the player of a recording, and its embedded bytes.

    Args:
        folder: The run's folder.
        recording: File in the folder of mistakes. Empty: there is none.
        left: Maximum bytes to embed.
    """
    path = folder / MISTAKES_FOLDER / recording
    if not recording or not path.is_file():
        return "", 0
    size = path.stat().st_size
    if size > left:
        return Markup('<a href="{0}">{1}</a>').format(f"{MISTAKES_FOLDER}/{recording}", recording), 0
    content = base64.b64encode(path.read_bytes()).decode()
    return Markup('<audio controls preload="none" src="data:audio/wav;base64,{0}"></audio>').format(content), size


def _draw_spectrogram(folder: Path, recording: str) -> str:
    """Return the image of a recording's power in dB over time and frequency, or an empty string without a recording.

    Args:
        folder: The run's folder.
        recording: File in the folder of mistakes. Empty: there is none.
    """
    path = folder / MISTAKES_FOLDER / recording
    if not recording or not path.is_file():
        return ""
    try:
        samples, rate = soundfile.read(path, always_2d=True)
    except soundfile.SoundFileError:
        return ""
    width, height = _PIXELS
    if len(samples) < 2 * height:
        return ""
    _, _, power = spectrogram(samples[:, 0], rate, nperseg=2 * height, noverlap=height, window="hann")
    starts = np.linspace(0, power.shape[1], width, endpoint=False).astype(int)
    frames = np.maximum(np.diff(starts, append=power.shape[1]), 1)
    power = np.add.reduceat(power[1:], starts, axis=1) / frames  # means show speech above noise
    level = 10 * np.log10(np.maximum(power, 1e-12))
    image = io.BytesIO()
    matplotlib.image.imsave(
        image,
        level[::-1],
        vmin=max(level.max() - _RANGE, float(np.percentile(level, 20))),
        vmax=level.max(),
        cmap="magma",
        format="png",
        metadata={"Software": ""},
    )
    return Markup('<img width="{0}" height="{1}" alt="{2}" src="data:image/png;base64,{3}">').format(
        width,
        height,
        f"spectrogram, 0 to {rate / 2000:g} kHz, {len(samples) / rate:.2f} s",
        base64.b64encode(image.getvalue()).decode(),
    )


def _list_worst(name: str, clips: Sequence[PredictedClip], key: Callable[[PredictedClip], str]) -> Iterator[str]:
    """Describe the groups of clips with the lowest accuracy, if there are several groups."""
    counts: dict[str, list[int]] = {}
    for clip in clips:
        counts.setdefault(key(clip), []).append(clip.label == clip.predicted)
    counts.pop("", None)
    if len(counts) > 1:
        worst = sorted(counts.items(), key=lambda item: (sum(item[1]) / len(item[1]), item[0]))[:_WORST]
        texts = [f"{escape(group)} {100 * sum(right) / len(right):.0f} % of {len(right)}" for group, right in worst]
        yield Markup(f"{name} with the lowest accuracy: {', '.join(texts)}.")
