"""A run that has ended or was stopped: what it came to, and what one asks of it afterwards."""

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

from raydfl.core.errors import InputError
from raydfl.core.metrics import HARMONIC_MEAN, OF_CLIENTS
from raydfl.core.types import Problem
from raydfl.engine import Leader, find_best
from raydfl.engine.storage import check_begun, local_run, read_config, record
from raydfl.runs.inference.fused import classify_arrays
from raydfl.runs.inference.recordings import Prediction

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_SHOWN = 12
"""Scores in a notebook's table."""


@runtime_checkable
class SupportsArray(Protocol):
    """An array of NumPy, a tensor, or whatever else NumPy takes for one."""

    def __array__(self, *given: Any, **named: Any) -> np.ndarray:
        """Return it as NumPy's."""


@dataclass(frozen=True, slots=True)
class Result:
    """A run that has ended or was stopped, of which the newest state is read whenever something is asked."""

    run_dir: Path
    round: int
    """Rounds completed and committed."""
    finished: bool
    """True when all configured rounds are done, or run.stop has ended the training; else it was stopped and can be resumed."""
    scores: dict[str, float] = field(default_factory=dict)
    """The last evaluation, ``"test plugin/accuracy" -> 0.81``."""
    problems: tuple[Problem, ...] = ()
    """What went wrong although rounds are done, the worst first: raydfl.runs.report.diagnosis."""
    ended: str = ""
    """Why run.stop has ended the training before its last round; empty: it has not."""
    best: Leader | None = None
    """The best round by run.best, whose models are kept; ``None``: there is none, or it is not asked for."""

    @property
    def status(self) -> Literal["finished", "stopped", "failed"]:
        """The end in a word: ``"stopped"`` by the user or a study, to be resumed; ``"failed"``: see ``problems``."""
        return "stopped" if not self.finished else "failed" if self.worthless else "finished"

    @property
    def worthless(self) -> str:
        """The reason why the run shows nothing; empty when it shows something."""
        return "; ".join(problem.text for problem in self.problems if problem.worthless)

    # What follows is imported when it is asked for: matplotlib and pandas take a second.

    @property
    def history(self) -> pd.DataFrame:
        """The record as a table: a row a round, a column a metric, named as in :attr:`scores`; NaN where it was not measured."""
        from raydfl.runs.report.data import read_run

        return read_run(self.run_dir).history

    def figures(self) -> dict[str, Figure]:
        """Return the figures of the run's page by their titles, as matplotlib's."""
        from raydfl.runs.report import figures_of, read_run

        return figures_of(read_run(self.run_dir))

    def plot(self, title: str = "") -> Figure:
        """Return one figure of the run's page.

        Args:
            title: ``"loss"``, ``"bytes sent"`` ...: one of :meth:`figures`; by default the score to look at first.

        Raises:
            InputError: there is no such figure, or no round is recorded yet.
        """
        from raydfl.core.metrics import SCORES
        from raydfl.runs.report import figures_of, read_run

        run = read_run(self.run_dir)
        (figure,) = figures_of(run, title or SCORES[run.headline].title).values()
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
        """Say of a recording in memory, or of several, what :func:`raydfl.classify` says of files.

        The model is loaded in each call: give several recordings as a list.

        Args:
            samples: float32 [samples] or [samples, channels], -1..1, or a list of those, of any lengths; where the model reads
                images, uint8 [rows, columns] or [rows, columns, 3].
            rate: of the recordings in Hz; of images none.
            views: with a model that reads several views, by the names of further ones an array, or of a list an array for each, of
                which ``None`` are absent.
            model: by default the shared one, or with ``client`` the one that the client does not share.
            client: whose model; by default the server's.
            best: whether it is the best round's, by ``run.best``; by default the last round's.
            trust: approves the code that the run's configuration names.

        Returns:
            A prediction; of a list as many, and where nothing can be said of a recording, the prediction's ``error`` says why.

        Raises:
            RunDirectoryError: no round is completed yet.
            InputError: no such model, client or view; arrays that are no recordings; no rate; or nothing can be said of the one.
        """
        one = isinstance(samples, SupportsArray)
        given = [samples] if isinstance(samples, SupportsArray) else list(samples)
        further = {name: [array] if one else array for name, array in (views or {}).items()}
        found = classify_arrays(
            self.run_dir, given, rate, views=further, model=model, client=client, best=best, trust=trust
        )
        if not one:
            return found
        if found[0].error:
            raise InputError(found[0].error)
        return found[0]

    def _repr_html_(self) -> str:
        """Return what a notebook shows of it: the end, the scores and where the page is."""
        lines = [
            f"<b>{self.status}</b> after {self.round} rounds: {_code(self.run_dir)}, page {_code('report.html')} in it"
        ]
        lines += [html.escape(line) for line in (self.ended, self.best.text if self.best else "") if line]
        lines += [html.escape(problem.text) for problem in self.problems]
        shown = {name: value for name, value in self.scores.items() if not name.endswith((*OF_CLIENTS, HARMONIC_MEAN))}
        rows = [
            f"<tr><td>{html.escape(name)}</td><td>{value:.4g}</td></tr>"
            for name, value in itertools.islice(shown.items(), _SHOWN)
        ]
        return f"{''.join(f'<div>{line}</div>' for line in lines)}<table>{''.join(rows)}</table>"


def _code(text: object) -> str:
    return f"<code>{html.escape(str(text))}</code>"


def load_result(run_dir: str | Path, trust: bool = False) -> Result:
    """Return the result of a run that was begun before, as it is now; no round is done.

    Args:
        run_dir: its folder, or its URI: then it is fetched first.
        trust: approves the code that the run's configuration names.

    Raises:
        RunDirectoryError: there is no such run, or it is damaged or not trusted.
    """
    from raydfl.runs.report import problems_of, read_run  # takes matplotlib

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
        tuple(problems_of(run)),
        run.stopped,
        None if best is None else best.leader,
    )
