"""Foundations of all rooms: types, tensors, errors, seeds, metrics, options, files, operators.

It imports no other room. Its modules are independent; import from each directly: ``from raydfl.core.errors import ConfigError``.
Start with types.py, tensors.py and errors.py; ops/ holds the fast operators.
"""

__all__ = [
    "clustering",
    "cuts",
    "errors",
    "files",
    "isolation",
    "lazy",
    "lock",
    "memory",
    "message",
    "metrics",
    "needs",
    "nested",
    "noise_key",
    "ops",
    "options",
    "part_names",
    "pretrained",
    "progress",
    "psds",
    "registry",
    "remote",
    "seeds",
    "sequences",
    "settings",
    "spool",
    "tensor_file",
    "tensors",
    "types",
    "users_code",
    "version",
    "words",
    "yaml",
]
