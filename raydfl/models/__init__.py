"""Networks, one file for each family; a client may have any, and different clients different ones.

An architecture is an ``nn.Module`` with the constructor ``(inputs, classes, **options)`` and

- ``forward(x, lengths=None) -> logits``: x float32 [batch, frames, inputs], lengths int64 [batch] = frames that count (all,
  if ``None``), logits float32 [batch, classes].
  An architecture for images has the attribute ``images`` true; its ``inputs`` are (channels, rows, columns), its x is float32
  [batch, channels, rows, columns]. Where the attribute is ``None`` it takes both;
- ``embed(x, lengths=None)`` -> float32 [batch, width]: what the last layer, ``output``, sees. Only some methods need it;
- the option ``width`` and ``channels()``, by which it can be made narrower (raydfl/models/_width.py). Only methods that cut
  networks need them.

A file of this package lists its architectures in ``ARCHITECTURES``: name -> (class, options that the name stands for). A
user's own class is ``my_file.py:Class``.

Imports core. Begin with dense.py and crnn.py.
"""

from __future__ import annotations

import typing
from pathlib import PurePath
from typing import Any

from raydfl.models._build import _annotations, architectures, build_model, check_model, find_architecture, model_options
from raydfl.models._narrow import cuts_of, narrow
from raydfl.models.crnn import CRNN
from raydfl.models.pretrained import Pretrained
from raydfl.models.start import INIT_FROM, read_init_from, start_from_file

__all__ = [
    "CRNN",
    "INIT_FROM",
    "Pretrained",
    "architectures",
    "build_model",
    "check_model",
    "cuts_of",
    "find_architecture",
    "model_options",
    "model_paths",
    "narrow",
    "read_init_from",
    "start_from_file",
]


def model_paths(architecture: str, where: str) -> list[str]:
    """Return the options of an architecture that are files or folders: those that its constructor annotates as paths.

    Raises:
        ConfigError: there is no such architecture.
    """
    cls, _ = find_architecture(architecture, where)
    return [name for name, kind in _annotations(cls).items() if _is_path(kind)]


def _is_path(kind: Any) -> bool:
    """Return whether ``Path`` is the type, or one of those that it is made of."""
    return (isinstance(kind, type) and issubclass(kind, PurePath)) or any(map(_is_path, typing.get_args(kind)))
