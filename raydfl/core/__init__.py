"""Values, numbers and files that every other room uses: types, tensors, errors, seeds, metrics, options, operators.

Imports no other room. Its modules have little to do with each other, so each is a door of its own: ``from raydfl.core.errors import
ConfigError``. Begin with types.py, tensors.py and errors.py; ops/ has the fast operators.
"""

__all__ = [
    "clustering",
    "cuts",
    "deprecation",
    "errors",
    "files",
    "lazy",
    "lock",
    "memory",
    "metrics",
    "needs",
    "nested",
    "ops",
    "options",
    "part_names",
    "pretrained",
    "progress",
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
    "yaml",
]
