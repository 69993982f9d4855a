"""The result of a run: its scores, its problems, its plots and its predictions."""

from __future__ import annotations

import html
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload, runtime_checkable

import numpy as np
import pyarrow.compute as pc
from numpy.typing import ArrayLike

from raydfl.controls import Control
from raydfl.core.errors import InputError
from raydfl.core.metrics import HARMONIC_MEAN, OF_CLIENTS
from raydfl.core.types import Problem
from raydfl.engine import Leader, find_best
from raydfl.engine.storage import check_begun, local_run, read_config, record
from raydfl.runs.inference.fused import classify_arrays
from raydfl.runs.inference.recordings import Prediction
from raydfl.runs.verdict import Verdict

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from ray.train import Checkpoint
    from ray.train import Result as RayResult

_SHOWN = 12
"""Maximum number of scores in a notebook's table."""


@runtime_checkable
class SupportsArray(Protocol):
    """A NumPy array, a tensor, or any object that NumPy converts to an array."""

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Return the object as a NumPy array."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a finished or stopped run. Its plots and tables are read from the run's folder on each use."""

    run_dir: Path
    round: int
    """Number of committed rounds."""
    finished: bool
    """True if all configured rounds are done, or ``run.stop`` ended the training. Otherwise the run can be resumed."""
    scores: dict[str, float] = field(default_factory=dict)
    """Scores of the last evaluation, such as ``"test plugin/accuracy" -> 0.81``."""
    problems: tuple[Problem, ...] = ()
    """Problems of the completed rounds, the worst first. raydfl.runs.report.diagnosis has the rules."""
    ended: str = ""
    """Why ``run.stop`` ended the training early. Empty if it did not."""
    best: Leader | None = None
    """The best round by ``run.best``; its models are kept. ``None`` without ``run.best`` or before its first measurement."""
    controls: tuple[Control, ...] = ()
    """Scores without training on the same test clips: chance, majority, raw features."""

    @property
    def status(self) -> Literal["finished", "stopped", "failed"]:
        """``"finished"``; ``"stopped"`` by the user or a study, so it can be resumed; or ``"failed"`` because of ``problems``."""
        return "stopped" if not self.finished else "failed" if self.worthless else "finished"

    @property
    def worthless(self) -> str:
        """Reason why the run's scores are meaningless. Empty if they are not."""
        return "; ".join(problem.text for problem in self.problems if problem.worthless)

    @property
    def verdict(self) -> Verdict:
        """The verdict: whether the run learnt, what limits it, and the next command. raydfl.runs.report.verdict has the rules."""
        from raydfl.runs.report import judge, read_run  # imports matplotlib

        return judge(read_run(self.run_dir))

    # The methods below import matplotlib, pandas and Ray on use, because the imports take seconds.

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The run's folder as a checkpoint of Ray Train. A copy of it is a complete run. ``None`` before the first commit."""
        from ray.train import Checkpoint

        return Checkpoint(str(self.run_dir.resolve())) if self.round else None

    def to_ray(self) -> RayResult:
        """Convert to a result of Ray Train, with the last scores, their history by round, and the checkpoint."""
        from ray.train import Result as RayResult

        return RayResult(
            metrics={"round": self.round, **self.scores},
            checkpoint=self.checkpoint,
            error=None,
            path=str(self.run_dir.resolve()),
            metrics_dataframe=self.history,
        )

    @property
    def history(self) -> pd.DataFrame:
        """The metrics by round: one row per round, one column per metric, named as in :attr:`scores`. NaN: not measured."""
        from raydfl.runs.report.data import read_run

        return read_run(self.run_dir).history

    def figures(self) -> dict[str, Figure]:
        """Return the figures of the run's report by title."""
        from raydfl.runs.report import draw_figures, read_run

        return draw_figures(read_run(self.run_dir))

    def plot(self, title: str = "") -> Figure:
        """Return one figure of the run's report.

        Args:
            title: A title in :meth:`figures`, such as ``"loss"`` or ``"bytes sent"``. Defaults to the headline score.

        Raises:
            InputError: The report has no figure with this title, or no round is recorded yet.
        """
        from raydfl.core.metrics import SCORES
        from raydfl.runs.report import draw_figures, read_run

        run = read_run(self.run_dir)
        (figure,) = draw_figures(run, title or SCORES[run.headline].title).values()
        return figure

    @overload
    def predict(
        self,
        samples: SupportsArray,
        rate: int | None = ...,
        *,
        views: Mapping[str, ArrayLike | None] | None = ...,
        model: str | None = ...,
        client: str | None = ...,
        best: bool = ...,
        trust: bool = ...,
    ) -> Prediction: ...
    @overload
    def predict(
        self,
        samples: Sequence[SupportsArray],
        rate: int | None = ...,
        *,
        views: Mapping[str, Sequence[ArrayLike | None]] | None = ...,
        model: str | None = ...,
        client: str | None = ...,
        best: bool = ...,
        trust: bool = ...,
    ) -> list[Prediction]: ...
    def predict(
        self,
        samples: SupportsArray | Sequence[SupportsArray],
        rate: int | None = None,
        *,
        views: Mapping[str, Any] | None = None,
        model: str | None = None,
        client: str | None = None,
        best: bool = False,
        trust: bool = False,
    ) -> Prediction | list[Prediction]:
        """Classify recordings in memory, like :func:`raydfl.classify` for files.

        Each call loads the model, so pass several recordings as a list.

        Args:
            samples: float32 [samples] or [samples, channels] in -1..1, or a list of arrays of any lengths. For a model of images,
                uint8 [rows, columns] or [rows, columns, 3].
            rate: Sample rate of the recordings in Hz. Not needed for images.
            views: Further views of a model of several views, by name: an array, or a list with one array or ``None`` (absent) for
                each recording.
            model: Name of the model. Defaults to the shared model, or with ``client`` to the client's private model.
            client: Id of the client whose model is used. Defaults to the server's model.
            best: Use the model of the best round by ``run.best``, not of the last round.
            trust: Approve the code named in the run's configuration.

        Returns:
            A prediction, or for a list a list of predictions. If a recording in a list cannot be classified, its prediction's
            ``error`` gives the reason.

        Raises:
            RunDirectoryError: No round is completed yet.
            InputError: The model, client or view is unknown, an array is no recording, the rate is missing, or a single recording
                cannot be classified.
        """
        single = isinstance(samples, SupportsArray)
        recordings = [samples] if isinstance(samples, SupportsArray) else list(samples)
        further = {name: [array] if single else array for name, array in (views or {}).items()}
        predictions = classify_arrays(
            self.run_dir, recordings, rate, views=further, model=model, client=client, best=best, trust=trust
        )
        if not single:
            return predictions
        if predictions[0].error:
            raise InputError(predictions[0].error)
        return predictions[0]

    def _repr_html_(self) -> str:
        """Return the status, the scores and the report's location as HTML for a notebook."""
        lines = [
            f"<b>{self.status}</b> after {self.round} rounds: {_format_code(self.run_dir)}. Report: {_format_code('report.html')}"
        ]
        lines += [html.escape(line) for line in (self.ended, self.best.text if self.best else "") if line]
        lines += [html.escape(problem.text) for problem in self.problems]
        shown = {name: value for name, value in self.scores.items() if not name.endswith((*OF_CLIENTS, HARMONIC_MEAN))}
        rows = [
            f"<tr><td>{html.escape(name)}</td><td>{value:.4g}</td></tr>"
            for name, value in itertools.islice(shown.items(), _SHOWN)
        ]
        return f"{''.join(f'<div>{line}</div>' for line in lines)}<table>{''.join(rows)}</table>"


def _format_code(text: object) -> str:
    return f"<code>{html.escape(str(text))}</code>"


def load_result(run_dir: str | Path, trust: bool = False) -> Result:
    """Return the current result of an existing run, without training.

    Args:
        run_dir: The run's folder. A URI is downloaded first.
        trust: Approve the code named in the run's configuration.

    Raises:
        RunDirectoryError: The run does not exist, is damaged, or is not trusted.
    """
    from raydfl.runs.report import find_problems, read_run  # imports matplotlib

    folder = local_run(run_dir)
    check_begun(folder)
    config, run = read_config(folder, trust), read_run(folder.resolve())
    where = (pc.field("client") == "") & (pc.field("phase") == "evaluate")
    best = find_best(folder, config)
    return Result(
        folder,
        run.done,
        run.done >= config.train.rounds or bool(run.stopped),
        record.scores(record.to_rows(record.read_rows(folder, run.done, where=where))),
        tuple(find_problems(run)),
        run.stopped,
        None if best is None else best.leader,
        tuple(run.controls),
    )
