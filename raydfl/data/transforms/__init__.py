"""Transforms: what is done to training examples, anew in every batch; one file for each.

Begin with ``_transform.py`` (what a transform is) and ``_pipeline.py`` (in which order batches are made of stored features).
"""

from __future__ import annotations

from raydfl.data.transforms._pipeline import PLAIN, LateNormalisation, Pipeline, Pixels, find_transform, make_transforms
from raydfl.data.transforms._transform import Drawn, Transform
from raydfl.data.transforms.random_crop import RandomCrop

__all__ = [
    "PLAIN",
    "Drawn",
    "LateNormalisation",
    "Pipeline",
    "Pixels",
    "RandomCrop",
    "Transform",
    "find_transform",
    "make_transforms",
]
