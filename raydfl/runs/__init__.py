"""One run from its folder to its page: starting, resuming, progress, tracking, reports, inference.

Imports cluster and all below it; alone uses matplotlib, jinja2, MLflow and ONNX. Begin with run.py.
"""
