"""Preparation of recordings for a federation: data sets, features, splits, partitions and corruption.

Start with dataset.py and build.py, which prepares the clients of a data set. steps/ has a file for each step of the preparation,
sets/ a file for each built-in data set. features/ computes and caches features. This room imports core, but not methods, attacks
or Ray. Its names are imported lazily, because processes that only compute features need no PyTorch.
"""

from raydfl.core.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
