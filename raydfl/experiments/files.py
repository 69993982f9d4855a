"""Files of studies: their keys, base configurations, and settings laid over one another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.nested import get_path
from raydfl.core.options import explain
from raydfl.core.remote import check_path, is_uri
from raydfl.core.settings import Settings
from raydfl.core.yaml import read_yaml
from raydfl.engine import Config, apply_overrides, apply_values

_LISTED = 10
"""Messages that a message about several runs repeats."""
_WHOLE_GROUPS = ("train", "evaluate", "ray", "run", "track")
"""Groups that an axis would hardly mean to replace as a whole."""


def check_known(name: str, known: Iterable[str], what: str) -> None:
    """Reject a name that is not among the known ones.

    Raises:
        ConfigError: ``what``, the name, and the nearest known one.
    """
    if name not in known:
        raise ConfigError(f"{what} {name!r}; {nearest(name, known)}")


def read_groups(file: Path, settings: type[Settings], former: Iterable[str], example: str) -> dict[str, Any]:
    """Return the contents of a file, whose keys must be fields of ``settings``.

    Args:
        former: keys of earlier versions, which are accepted too.
        example: a file of that kind, for messages.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or has an unknown key.
    """
    advice = f"; give a YAML file, such as {example} (raydfl init writes it)"
    values = _read_yaml(file, f"cannot read {file}: ", advice)
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold the groups {', '.join(settings.model_fields)}")
    for key in values:
        if key not in (*settings.model_fields, *former):
            hint = nearest(str(key), settings.model_fields)
            own = f"; settings of the runs go below settings: or into {key}=... on the command line"
            raise ConfigError(f"{file}: unknown key {key!r}; {hint}{own if key in Config.model_fields else ''}")
    return values


_Checked = TypeVar("_Checked", bound=Settings)


def check_settings(values: Any, settings: type[_Checked], file: Path | str, where: str = "") -> _Checked:
    """Return values as checked settings.

    Raises:
        ConfigError: a value is not valid.
    """
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{file}: {explain(error, where, values, settings)}") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _read_yaml(path: Path, before: str, after: str) -> Any:
    try:
        return read_yaml(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{before}{reason}{after}") from error


def read_base(path: Path) -> dict[str, Any]:
    """Return a base configuration as plain data.

    Raises:
        ConfigError: it cannot be read, or holds no groups.
    """
    values = _read_yaml(path, f"the base configuration {path} cannot be read: ", "; correct base")
    if not isinstance(values, dict):
        raise ConfigError(f"the base configuration {path} must hold groups of settings")
    return values


def find_folder(file: Path, own: Path | None, settings: Mapping[str, Any], overrides: Sequence[str]) -> Path:
    """Return the folder of a study's runs: run.dir of the command line, dir, run.dir in settings, or runs/ and the file's name.

    Raises:
        ConfigError: it is a URI.
    """
    given = [
        get_path(apply_overrides({}, overrides), "run.dir"),
        own,
        get_path(overlay({}, settings, "settings"), "run.dir"),
        Path("runs") / file.stem,
    ]
    folder = next(each for each in given if each is not None)
    check_path(str(folder))
    if is_uri(folder):
        raise ConfigError(f"dir: {folder} is a URI, but all runs of {file} are in one folder; give an absolute path")
    return Path(folder).expanduser().resolve()


def overlay(values: dict[str, Any], part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Lay settings over ``values`` by the command line's rule: a key is a path, whose value replaces the old one.

    Raises:
        ConfigError: a key's path leads through a value that is no group, or would replace a whole group.
    """
    for key in part:
        if key in _WHOLE_GROUPS and values.get(key):
            raise ConfigError(
                f"{where}: {key} would replace the whole group; write single settings, such as {key}.name: value"
            )
    try:
        return apply_values(values, part)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def describe_faults(heading: str, faults: Mapping[str, Sequence[str]], named: int) -> str:
    """Return what is wrong with several runs in a few lines.

    Args:
        faults: the names of runs by message.
        named: how many of them are named.
    """
    lines = [heading]
    for message, names in list(faults.items())[:_LISTED]:
        more = f" and {len(names) - named} more" if len(names) > named else ""
        lines.append(f"  {'; '.join(names[:named])}{more}: {message}")
    if len(faults) > _LISTED:
        lines.append(f"  and {len(faults) - _LISTED} more messages")
    return "\n".join(lines)
