"""Section of a report about wrong predictions: the worst clips with a player, and the worst speakers and classes."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from markupsafe import Markup, escape

from raydfl.runs.inference.mistakes import MISTAKES_FOLDER, PredictedClip, read_predictions
from raydfl.runs.report.data import RunRecord
from raydfl.runs.report.page import Section

_EMBEDDED = 2 << 20
"""Maximum bytes of recordings in a page. Further recordings are links to files beside it."""
_CLIPS = 12
_WORST = 5
"""Number of speakers and of classes."""


def show_mistakes(run: RunRecord) -> Section:
    """List the test clips with the most confident wrong predictions, with players, and the worst speakers and classes."""
    clips = read_predictions(run.folder)
    wrong = [clip for clip in clips if clip.label != clip.predicted]
    left = _EMBEDDED
    rows = []
    for clip in wrong[:_CLIPS]:
        player, size = _make_player(run.folder, clip.recording, left)
        left -= size
        rows.append((player, clip.clip, clip.group, clip.label, clip.predicted, f"{100 * clip.probability:.0f} %"))
    notes = [
        *_list_worst("Speakers", clips, lambda clip: clip.group),
        *_list_worst("Classes", clips, lambda clip: clip.label),
    ]
    return Section(
        "Mistakes",
        headings=("listen", "clip", "speaker", "truth", "prediction", "probability"),
        rows=rows,
        hint=f"{len(wrong):,} of {len(clips):,} test clips have a wrong prediction (predictions.csv), the most confident first.",
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
