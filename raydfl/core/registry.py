"""Lookup of methods, data sets and rules by name, and their construction from a configuration.

A built-in class has a file of its own, and the file name is its name in a configuration. A user's class is ``my_file.py:Class`` or
``my_module:Class``. The file may import its neighbours. The fields of the class (a pydantic dataclass) are its options. An unknown
key or a wrong value is an error that names the place and the nearest valid key.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.options import explain, unknown_key
from raydfl.core.users_code import FAILURES

T = TypeVar("T")
_PREFIX = "raydfl_user_"
"""Prefix of the module names of users' files."""


def names(package: str) -> list[str]:
    """Return the names of the built-in classes in a package (``"raydfl.methods"``), sorted."""
    return list(_names(package))


@functools.cache
def _names(package: str) -> tuple[str, ...]:
    module = importlib.import_module(package)
    return tuple(sorted(m.name for m in pkgutil.iter_modules(module.__path__) if not m.name.startswith("_")))


class _SourceLoader(SourceFileLoader):
    """Loader that ignores cached bytecode, because it could differ from the source that the user has approved."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source file."""
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


@functools.cache
def load_file(path: Path) -> ModuleType:
    """Load a module from a file. Its name depends on the path alone, so its classes pickle between processes."""
    name = f"{_PREFIX}{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_SourceLoader(name, str(path)))
    if path.suffix != ".py" or spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file. Name your class as my_file.py:Class.")
    _NEIGHBOURS.admit(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # so that the corrected file can be loaded later
        raise
    return module


def list_loaded_files() -> list[Path]:
    """Return the paths of all users' files in this process, without deleted files."""
    modules = [module for name, module in [*sys.modules.items()] if name.startswith(_PREFIX)]
    return [path for module in modules if (path := Path(str(module.__file__))).exists()]


class _Neighbours(MetaPathFinder):
    """Finds modules next to users' files, after all of Python's own finders.

    Module names are global to a process: it can import ``helpers.py`` from a single folder only.
    """

    def __init__(self) -> None:
        self._folders: list[Path] = []
        self._sources: dict[str, Path] = {}

    def admit(self, folder: Path) -> None:
        """Add a folder to the search.

        Raises:
            ConfigError: a module of the same name was imported from another folder.
        """
        if self not in sys.meta_path:
            sys.meta_path.append(self)
        if folder in self._folders:
            return
        for name, source in self._sources.items():
            if name in sys.modules and self._find_in(folder, name) is not None:
                raise _duplicate_error(name, source, folder)
        self._folders.append(folder)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a top-level module in the users' folders."""
        if path is not None:
            return None  # submodules are found through their package
        specs = {folder: spec for folder in self._folders if (spec := self._find_in(folder, fullname)) is not None}
        if len(specs) > 1:
            raise _duplicate_error(fullname, *list(specs)[:2])
        for folder, spec in specs.items():
            self._sources[fullname] = folder
            return spec
        return None

    @staticmethod
    def _find_in(folder: Path, name: str) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, [str(folder)])
        # Sources only, because a user cannot read compiled code before approving it. A folder without __init__.py has no loader.
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        spec.loader = _SourceLoader(name, spec.loader.path)
        return spec


_NEIGHBOURS = _Neighbours()


def _duplicate_error(name: str, first: Path, second: Path) -> ConfigError:
    return ConfigError(
        f"{first} and {second} both have a module {name!r}, but a process can import a single module of this name. Rename either."
    )


def load_object(reference: str) -> Any:
    """Import an object by its reference, ``file.py:Name`` or ``module:Name``.

    Raises:
        ConfigError: the file, the module or the name does not exist, or the import fails. Names of ``__main__`` exist only in the
            process of the script.
    """
    place, _, name = reference.rpartition(":")
    try:
        if place.endswith(".py"):
            path = Path(place).expanduser().resolve()
            if not path.is_file():
                raise ConfigError(f"{reference!r}: there is no file {path}")
            module = load_file(path)
        else:
            module = importlib.import_module(place)
    except ConfigError:
        raise
    except FAILURES as error:  # a user's module can raise anything at import
        raise ConfigError(f"{reference!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        if place == "__main__":
            raise ConfigError(
                f"{reference!r}: server and clients run in separate processes, and cannot import {name} from a script. Move {name} "
                f"to another file and name it FILE.py:{name}, or set ray.actors=0 in the script."
            )
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(f"{reference!r}: {place} has no {name!r}. {nearest(name, public)}")
    return getattr(module, name)


def find(package: str, name: str, base: type[T], what: str) -> type[T]:
    """Find a subclass of ``base`` by its name in a configuration.

    Args:
        package: the package of the built-in classes, ``"raydfl.methods"``.
        name: ``name`` for the class in ``package/name.py``, or a user's ``file.py:Class`` or ``module:Class``.
        base: the required base class.
        what: kind of the class, ``"method"``, for messages.

    Raises:
        ConfigError: the name is unknown, or the class is not a subclass of ``base``.
    """
    if ":" in name:
        cls = load_object(name)
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise ConfigError(f"{what} {name!r} is not a subclass of raydfl.{base.__name__}")
        return cls
    known = names(package)
    if name not in known:
        raise ConfigError(f"unknown {what} {name!r}. {nearest(name, known)} Your own class: my_file.py:Class")
    module = importlib.import_module(f"{package}.{name}")
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
    ]
    if not classes:
        raise ConfigError(f"{what} file {module.__name__} defines no subclass of {base.__name__}")
    return classes[-1]  # helper classes come first in a file


def build(cls: type[T], options: Mapping[str, Any], where: str) -> T:
    """Build ``cls(**options)`` after validating all options.

    Args:
        cls: the class, a dataclass.
        options: its options.
        where: place in the configuration, ``"method"``, for messages.

    Raises:
        ConfigError: an option is unknown, has a wrong type, or is out of range.
    """
    known = [f.name for f in dataclasses.fields(cls) if f.init] if dataclasses.is_dataclass(cls) else []
    for key in options:
        if key not in known:
            raise unknown_key(key, known, where, f" for {cls.__name__}")
    try:
        # TypeAdapter validates a user's plain dataclass as strictly as a built-in class.
        return TypeAdapter(cls).validate_python(dict(options))
    except ValidationError as error:
        raise ConfigError(explain(error, where, dict(options), cls)) from error
