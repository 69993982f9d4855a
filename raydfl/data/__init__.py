"""Recordings in, clients' batches out: data sets, features, splits, partitions and corruption.

Imports core; knows no method, no attack and no Ray. Begin with dataset.py and build.py, which takes a data set all the way to its
clients. steps/ has one file for each step on that way, sets/ one for each built-in data set; features/ makes and keeps features.
Names of this room are imported when they are first used: processes that only compute features need no PyTorch.
"""

from raydfl.core.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    __file__,
    {
        "dealt": "deal_values",
        "kept_labels": "exclude_labels",
        "share_in_range": "check_share",
        "sizes_text": "describe_sizes",
    },
)
