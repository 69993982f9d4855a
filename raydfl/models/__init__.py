"""Network architectures, one file for each family. Clients may have different architectures.

An architecture is an ``nn.Module`` with the constructor ``(inputs, classes, **options)`` and these members:

- ``forward(x, lengths=None) -> logits``: x float32 [batch, frames, inputs], lengths int64 [batch] = number of valid frames
  (``None``: all), logits float32 [batch, classes].
- ``images``: true for architectures that read images, ``None`` for images or features. Images have ``inputs`` = (channels,
  rows, columns) and x float32 [batch, channels, rows, columns].
- ``embed(x, lengths=None)``: input of the last layer ``output``, float32 [batch, width]. Only some methods need it.
- the option ``width`` and ``channels()``: support for narrower networks (raydfl/models/_width.py). Only methods that cut
  networks need them.

Each file lists its architectures in ``ARCHITECTURES``: name -> (class, preset options). A configuration names a user-defined
class as ``my_file.py:Class``.

Imports core. Begin with dense.py and crnn.py.
"""

from __future__ import annotations

import typing
from pathlib import PurePath
from typing import Any

from raydfl.models._build import (
    _get_annotations,
    architectures,
    build_model,
    check_model,
    find_architecture,
    model_options,
)
from raydfl.models._lora import adapter_settings, adapter_tensors, merge_adapters
from raydfl.models._narrow import fit_width, make_cuts, narrow
from raydfl.models.crnn import CRNN
from raydfl.models.pretrained import Pretrained
from raydfl.models.start import INIT_FROM, read_init_from, start_from_file

__all__ = [
    "CRNN",
    "INIT_FROM",
    "Pretrained",
    "adapter_settings",
    "adapter_tensors",
    "architectures",
    "build_model",
    "check_model",
    "find_architecture",
    "fit_width",
    "make_cuts",
    "merge_adapters",
    "model_options",
    "model_paths",
    "narrow",
    "read_init_from",
    "start_from_file",
]


def model_paths(architecture: str, where: str) -> list[str]:
    """List the options of an architecture that its constructor annotates as paths.

    Raises:
        ConfigError: the architecture is unknown.
    """
    cls, _ = find_architecture(architecture, where)
    return [name for name, kind in _get_annotations(cls).items() if _is_path(kind)]


def _is_path(kind: Any) -> bool:
    """Return true if a type is ``Path``, or a union or a container of ``Path``."""
    return (isinstance(kind, type) and issubclass(kind, PurePath)) or any(map(_is_path, typing.get_args(kind)))
