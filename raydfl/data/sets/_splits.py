"""The names that people give to splits."""

from __future__ import annotations

SPLIT_OF = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
}
"""Split by name in lower case."""
