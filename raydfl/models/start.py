"""Start: a network's first weights from a file, whatever its architecture.

The file is safetensors (what a run exports, say) or a PyTorch checkpoint, which is read without executing code. Every name is
accounted for: what the network has and the file has not, and the other way round, is an error unless it was named.
"""

from __future__ import annotations

import difflib
import fnmatch
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from torch import Tensor, nn

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.options import explain
from raydfl.core.settings import Settings
from raydfl.core.types import ModelSpec

INIT_FROM = "init_from"
"""The key beside an architecture's options."""

_KINDS = {".safetensors": "safetensors", ".pt": "checkpoint", ".pth": "checkpoint", ".bin": "checkpoint"}
_LISTED = 5


class InitFrom(Settings):
    """A file that a network begins from."""

    file: Path = Field(description="safetensors, or a PyTorch checkpoint")
    model: str | None = Field(
        None,
        description="group of tensors in the file that is meant: what stands before / in names, or an entry of a checkpoint",
    )
    rename: dict[str, str] = Field(
        default_factory=dict, description="beginnings of names in the file, and what the network has in their place"
    )
    keep: tuple[str, ...] = Field(
        (), description="patterns of the network's names that keep their initial values, e.g. [output.*]"
    )
    ignore: tuple[str, ...] = Field((), description="patterns of the file's names that are not used")


def read_init_from(value: Any, where: str) -> InitFrom:
    """Return checked settings.

    Args:
        value: as configured.
        where: the place in the configuration, for the messages.

    Raises:
        ConfigError: one is wrong, or there is no such file.
    """
    try:
        found = InitFrom.model_validate({"file": value} if isinstance(value, str | Path) else value)
    except ValidationError as error:
        raise ConfigError(explain(error, where, value, InitFrom)) from error
    if not found.file.is_file():
        raise ConfigError(f"{where}.file: there is no file {found.file}; give safetensors or a PyTorch checkpoint")
    return found


def start_from_file(network: nn.Module, spec: ModelSpec) -> None:
    """Give a freshly built network the weights that ``spec.init_from`` names.

    Raises:
        ConfigError: the file cannot be read, or a name or shape does not fit; nothing has been changed.
    """
    where = f"models.{spec.name}.{INIT_FROM}"
    init_from = read_init_from({name: _thawed(value) for name, value in spec.init_from}, where)
    own = network.state_dict(keep_vars=True)
    found = _renamed(_chosen(_read(init_from.file, where), init_from, spec.name, where), init_from, where)
    found, absent = _published(network, found, f"{where}: {init_from.file}")
    kept = _matching(own, init_from.keep, f"{where}.keep", "the network") | absent
    ignored = _matching(found, init_from.ignore, f"{where}.ignore", "the file") | kept
    # A tied tensor has several names, of which a file may have one.
    loaded = {id(own[name]) for name in found if name in own and name not in ignored}
    # Counters are not floating; they are neither sent nor kept, so a run's export has none.
    needed = [name for name, tensor in own.items() if tensor.is_floating_point() and id(tensor) not in loaded]
    missing = [name for name in needed if name not in found and name not in kept]
    unexpected = [name for name in found if name not in own and name not in ignored]
    if missing or unexpected:
        raise ConfigError(_unaccounted(where, init_from.file, missing, unexpected, own, found))
    taken = {name: value for name, value in found.items() if name in own and name not in ignored}
    for name, value in taken.items():
        _check(name, value, own[name], f"{where}: {init_from.file}")
    with torch.no_grad():
        for name, value in taken.items():
            own[name].copy_(value)


def _published(network: nn.Module, found: dict[str, Tensor], where: str) -> tuple[dict[str, Tensor], set[str]]:
    """Return a file's tensors by the network's names, where the network knows a release of its authors, and names it never has."""
    translate = getattr(network, "read_published", None)
    if translate is None:
        return found, set()
    try:
        named, absent = translate(found)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return named, {name for pattern in absent for name in fnmatch.filter(network.state_dict(), pattern)}


def _thawed(value: Any) -> Any:
    """Return a mapping for what a specification holds as pairs."""
    pairs = isinstance(value, tuple) and value and all(isinstance(item, tuple) and len(item) == 2 for item in value)
    return dict(value) if pairs else value


def _check(name: str, value: Tensor, own: Tensor, where: str) -> None:
    if value.shape != own.shape:
        raise ConfigError(
            f"{where}: {name!r} is {list(value.shape)}, the network has it as {list(own.shape)}, and no tensor is cut or repeated "
            f"to fit; take the options with which the file's network was built, or keep the initial values of {name!r} (keep)"
        )
    if value.is_complex() != own.is_complex() or value.is_floating_point() != own.is_floating_point():
        raise ConfigError(f"{where}: {name!r} is {value.dtype}, the network has it as {own.dtype}")
    if not bool(torch.isfinite(value).all()):
        raise ConfigError(f"{where}: {name!r} holds numbers that are not finite; take another file")


def _unaccounted(
    where: str, file: Path, missing: list[str], unexpected: list[str], own: Iterable[str], found: Iterable[str]
) -> str:
    texts = []
    if missing:
        texts.append(f"lacks {_listed(missing)} of the network{_near(missing[0], found)}")
    if unexpected:
        texts.append(f"has {_listed(unexpected)}, which the network has not{_near(unexpected[0], own)}")
    return (
        f"{where}: {file} {' and '.join(texts)}; map beginnings of names with rename, name what keeps its initial values with keep "
        f"and what is not to be used with ignore"
    )


def _near(name: str, others: Iterable[str]) -> str:
    """Return which of many names is the nearest to one, if any is near."""
    close = difflib.get_close_matches(name, list(others), n=1, cutoff=0.5)
    return f" (nearest: {close[0]!r})" if close else ""


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(repr, names[:_LISTED])) + more


def _matching(names: Iterable[str], patterns: Iterable[str], where: str, whose: str) -> set[str]:
    """Return the names that match one of some patterns, each of which must match one."""
    names, found = list(names), set[str]()
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise ConfigError(f"{where}: {pattern!r} matches no tensor of {whose}{_near(pattern, names)}")
        found.update(matching)
    return found


def _chosen(tensors: Mapping[str, Tensor], init_from: InitFrom, model: str, where: str) -> dict[str, Tensor]:
    """Return the tensors of one group of the file, by the rest of their names."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group, _, rest = name.rpartition("/")
        groups.setdefault(group, {})[rest] = tensor
    if init_from.model is not None:
        if init_from.model not in groups:
            raise ConfigError(
                f"{where}.model: {init_from.file} has no {init_from.model!r}; {nearest(init_from.model, groups)}"
            )
        return groups[init_from.model]
    if len(groups) == 1:
        return next(iter(groups.values()))
    if model in groups:
        return groups[model]
    named = ", ".join(repr(group) for group in groups)
    raise ConfigError(
        f"{where}: {init_from.file} holds several groups of tensors ({named}); say with model which is meant"
    )


def _renamed(tensors: Mapping[str, Tensor], init_from: InitFrom, where: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, tensor in tensors.items():
        begin = max((begin for begin in init_from.rename if name.startswith(begin)), key=len, default=None)
        if begin is not None:
            used.add(begin)
        new = name if begin is None else init_from.rename[begin] + name[len(begin) :]
        if new in found:
            raise ConfigError(f"{where}.rename: it gives two tensors the name {new!r}")
        found[new] = tensor
    for begin in init_from.rename:
        if begin not in used:
            raise ConfigError(
                f"{where}.rename: no name in {init_from.file} begins with {begin!r}{_near(begin, tensors)}"
            )
    return found


def _read(file: Path, where: str) -> dict[str, Tensor]:
    """Return all tensors of a file by name; those in groups of a checkpoint as ``group/name``."""
    try:
        with file.open("rb") as opened:
            head = opened.read(16)
    except OSError as error:
        raise ConfigError(f"{where}: {file} cannot be read: {error.strerror}") from error
    if not head:
        raise ConfigError(f"{where}: {file} is empty; fetch it again")
    kind = "checkpoint" if head[:2] in (b"PK", b"\x80\x02") else "safetensors" if head[8:9] == b"{" else ""
    if not kind:
        raise ConfigError(
            f"{where}: {file} is neither safetensors nor a PyTorch checkpoint, but begins with {head[:8]!r}"
        )
    if _KINDS.get(file.suffix, kind) != kind:
        named = " or ".join(suffix for suffix, which in _KINDS.items() if which == kind)
        raise ConfigError(f"{where}: {file} is a {kind} file under the name of another kind; name it {named}")
    found = _read_safetensors(file, where) if kind == "safetensors" else _read_checkpoint(file, where)
    if not found:
        raise ConfigError(f"{where}: {file} holds no tensors")
    return found


def _read_safetensors(file: Path, where: str) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{where}: {file} is a damaged safetensors file: {error}; fetch it again") from error


def _read_checkpoint(file: Path, where: str) -> dict[str, Tensor]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        if wanted is None:
            raise ConfigError(f"{where}: {file} is a damaged checkpoint; fetch it again") from error
        raise ConfigError(
            f"{where}: {file} holds more than tensors: reading it would load {wanted[1]} and could run code. Save the tensors "
            f"alone with torch.save(network.state_dict(), FILE) where the file was made"
        ) from error
    except Exception as error:  # a zip file or a pickle that ends too early, in the many ways in which it can
        raise ConfigError(
            f"{where}: {file} is a damaged checkpoint ({type(error).__name__}); fetch it again"
        ) from error
    found: dict[str, Tensor] = {}

    def look_into(value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            found[path] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                look_into(item, f"{path}/{key}" if path else str(key))

    look_into(content, "")
    return found
