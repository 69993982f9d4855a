"""One run, from its folder to its page: starting, resuming, progress, tracking, reports and inference.

Imports cluster and every room below it; it alone uses matplotlib, jinja2, MLflow and ONNX. Begin with _run.py, then folder.py.
report/ writes pages, inference/ uses trained models. Names of this room are imported when they are first used: a page needs no Ray.
"""

from raydfl.core.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
