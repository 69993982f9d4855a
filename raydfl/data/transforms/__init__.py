"""Transforms: random augmentations of training examples, redrawn for every batch. Each file defines one transform.

Start reading at ``_transform.py`` (the base class) and ``_pipeline.py`` (the order of the steps from stored features to a batch).
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
