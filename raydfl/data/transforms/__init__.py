"""Transforms: random augmentations of training examples, redrawn for every batch. Each transform has its own file.

Begin with ``_transform.py`` (the base class) and ``_pipeline.py`` (the order of steps from stored features to batches).
"""

from __future__ import annotations

from raydfl.data.transforms._pipeline import PLAIN, Pipeline, find_transform, make_transforms
from raydfl.data.transforms._transform import Drawn, Transform
from raydfl.data.transforms.random_crop import RandomCrop

__all__ = [
    "PLAIN",
    "Drawn",
    "Pipeline",
    "RandomCrop",
    "Transform",
    "find_transform",
    "make_transforms",
]
