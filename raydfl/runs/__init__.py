"""One run, from its folder to its report: starting, resuming, progress, tracking, reports and inference.

The room imports cluster and every room below it. It alone uses matplotlib, jinja2, MLflow and ONNX. Read _run.py, then folder.py.
report/ writes reports, and inference/ uses trained models. Names of this room are imported on first use, so a report needs no Ray.

A run's *metrics table* is the Parquet files in ``rows/``. The *report* is the HTML page ``report.html``.
"""

from raydfl.core.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
