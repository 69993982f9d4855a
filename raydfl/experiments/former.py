"""Former names of the functions for studies, which warn until the next release."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from raydfl.experiments.experiment import RunConfig
from raydfl.experiments.load import load_study
from raydfl.experiments.results import StudyResults
from raydfl.experiments.run import run_study
from raydfl.experiments.study import Study
from raydfl.runs import Progress

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")


def _rename(former: str, function: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    @functools.wraps(function)
    def call(*given: _Given.args, **named: _Given.kwargs) -> _Returned:
        warnings.warn(f"raydfl.{former} is now raydfl.{former[: former.index('_')]}_study", FutureWarning, stacklevel=2)
        return function(*given, **named)

    return call


def _run_sweep(
    sweep: Study, parallel: int | None = None, progress: Progress | None = None, run_config: RunConfig | None = None
) -> StudyResults:
    if parallel is not None:
        sweep = dataclasses.replace(sweep, settings=sweep.settings.model_copy(update={"parallel": parallel}))
    return run_study(sweep, progress, run_config)


load_sweep = _rename("load_sweep", load_study)
load_search = _rename("load_search", load_study)
run_sweep = _rename("run_sweep", _run_sweep)
run_search = _rename("run_search", run_study)
