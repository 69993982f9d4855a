"""Helpers for tests of federations: train to the end, compare every bit, and list the ownership of examples.

They serve raydfl's own tests and authors of methods, rules and data sets. Imports runs and every room below it. Start with
_federations.py.
"""

from raydfl.testing._examples import make_batch, make_examples
from raydfl.testing._federations import (
    assert_same_bits,
    describe_kernels,
    describe_population,
    digest,
    list_ownership,
    read_tensors,
    start_server,
    to_bytes,
    train_federation,
)

__all__ = [
    "assert_same_bits",
    "describe_kernels",
    "describe_population",
    "digest",
    "list_ownership",
    "make_batch",
    "make_examples",
    "read_tensors",
    "start_server",
    "to_bytes",
    "train_federation",
]
