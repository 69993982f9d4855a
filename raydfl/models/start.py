"""Initial weights of a network from a file, for any architecture.

The file is safetensors, for example the export of a run, or a PyTorch checkpoint, which is read without executing code. A name
that only the network or only the file has is an error, unless an option lists it.
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
from torch import Tensor, nn

from raydfl.core.errors import ConfigError, first_line, nearest, translate_failures
from raydfl.core.files import open_regular
from raydfl.core.options import explain
from raydfl.core.settings import Settings
from raydfl.core.types import ModelSpec

INIT_FROM = "init_from"
"""Key of the file among an architecture's options."""

_KINDS = {".safetensors": "safetensors", ".pt": "checkpoint", ".pth": "checkpoint", ".bin": "checkpoint"}
_LISTED = 5


class InitFrom(Settings):
    """Initial weights of a network from a file."""

    file: Path = Field(description="File of initial weights: safetensors or a PyTorch checkpoint.")
    model: str | None = Field(
        None,
        description="Group of tensors in the file: the prefix of names before /, or an entry of a checkpoint. null: the only "
        "group, or the group with the network's name.",
    )
    rename: dict[str, str] = Field(
        default_factory=dict, description="Prefixes of names in the file, and their replacements in the network."
    )
    keep: tuple[str, ...] = Field(
        (), description="Patterns of the network's tensors that keep their initial values, e.g. [output.*]."
    )
    ignore: tuple[str, ...] = Field((), description="Patterns of the file's tensors to ignore.")


def read_init_from(value: Any, where: str) -> InitFrom:
    """Validate the setting ``init_from``.

    Args:
        value: the configured value.
        where: the place in the configuration, for error messages.

    Raises:
        ConfigError: the setting is invalid, or the file does not exist.
    """
    try:
        init_from = InitFrom.model_validate({"file": value} if isinstance(value, str | Path) else value)
    except ValidationError as error:
        raise ConfigError(explain(error, where, value, InitFrom)) from error
    if not init_from.file.is_file():
        raise ConfigError(
            f"{where}.file: there is no file {init_from.file}. Choose a safetensors file or a PyTorch checkpoint."
        )
    return init_from


def start_from_file(network: nn.Module, spec: ModelSpec) -> None:
    """Load the weights of ``spec.init_from`` into a freshly built network.

    Raises:
        ConfigError: the file cannot be read, or a name or shape does not fit. The network is then unchanged.
    """
    where = f"models.{spec.name}.{INIT_FROM}"
    init_from = read_init_from({name: _to_mapping(value) for name, value in spec.init_from}, where)
    state = network.state_dict(keep_vars=True)
    tensors = _rename(_choose_group(_read(init_from.file, where), init_from, spec.name, where), init_from, where)
    tensors, absent = _translate_published(network, tensors, f"{where}: {init_from.file}")
    kept = _match_names(state, init_from.keep, f"{where}.keep", "the network") | absent
    ignored = _match_names(tensors, init_from.ignore, f"{where}.ignore", "the file") | kept
    # A tied tensor has several names, and a file needs only one of them.
    loaded = {id(state[name]) for name in tensors if name in state and name not in ignored}
    # Integer counters are neither sent nor stored, so exports do not contain them.
    needed = [name for name, tensor in state.items() if tensor.is_floating_point() and id(tensor) not in loaded]
    missing = [name for name in needed if name not in tensors and name not in kept]
    unexpected = [name for name in tensors if name not in state and name not in ignored]
    if missing or unexpected:
        raise ConfigError(_describe_mismatch(where, init_from.file, missing, unexpected, state, tensors))
    used = {name: value for name, value in tensors.items() if name in state and name not in ignored}
    for name, value in used.items():
        _check_tensor(name, value, state[name], f"{where}: {init_from.file}")
    with torch.no_grad():
        for name, value in used.items():
            state[name].copy_(value)


def _translate_published(
    network: nn.Module, tensors: dict[str, Tensor], where: str
) -> tuple[dict[str, Tensor], set[str]]:
    """Translate a released file by the network's ``read_published``, and return the names that it never contains."""
    translate = getattr(network, "read_published", None)
    if translate is None:
        return tensors, set()
    try:
        named, absent = translate(tensors)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return named, {name for pattern in absent for name in fnmatch.filter(network.state_dict(), pattern)}


def _to_mapping(value: Any) -> Any:
    """Convert a tuple of pairs, the hashable form of a mapping in a specification, to a mapping."""
    pairs = isinstance(value, tuple) and value and all(isinstance(item, tuple) and len(item) == 2 for item in value)
    return dict(value) if pairs else value


def _check_tensor(name: str, value: Tensor, own: Tensor, where: str) -> None:
    if value.shape != own.shape:
        raise ConfigError(
            f"{where}: {name!r} has the shape {list(value.shape)}, but {list(own.shape)} in the network. Use the options of the "
            f"file's network, or add {name!r} to keep."
        )
    if value.is_complex() != own.is_complex() or value.is_floating_point() != own.is_floating_point():
        raise ConfigError(
            f"{where}: {name!r} is {value.dtype}, but {own.dtype} in the network. Add it to keep, or convert the file."
        )
    if not bool(torch.isfinite(value).all()):
        raise ConfigError(f"{where}: {name!r} has values that are not finite. Choose another file.")


def _describe_mismatch(
    where: str, file: Path, missing: list[str], unexpected: list[str], state: Iterable[str], tensors: Iterable[str]
) -> str:
    texts = []
    if missing:
        texts.append(f"lacks {_list_names(missing)} of the network{_suggest(missing[0], tensors)}")
    if unexpected:
        texts.append(f"has {_list_names(unexpected)}, unknown to the network{_suggest(unexpected[0], state)}")
    return (
        f"{where}: {file} {' and '.join(texts)}. Map prefixes of names with rename, list tensors with initial values in keep, and "
        f"list unused tensors in ignore."
    )


def _suggest(name: str, candidates: Iterable[str]) -> str:
    """Format the nearest candidate to a name, or return an empty string if none is near."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return f" (nearest: {close[0]!r})" if close else ""


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(repr, names[:_LISTED])) + more


def _match_names(names: Iterable[str], patterns: Iterable[str], where: str, whose: str) -> set[str]:
    """Collect the names that match any pattern. A pattern without a match is an error."""
    names, matches = list(names), set[str]()
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise ConfigError(f"{where}: {pattern!r} matches no tensor of {whose}{_suggest(pattern, names)}")
        matches.update(matching)
    return matches


def _choose_group(tensors: Mapping[str, Tensor], init_from: InitFrom, model: str, where: str) -> dict[str, Tensor]:
    """Choose a group of the file's tensors, and remove the group from their names."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group, _, rest = name.rpartition("/")
        groups.setdefault(group, {})[rest] = tensor
    if init_from.model is not None:
        if init_from.model not in groups:
            raise ConfigError(
                f"{where}.model: {init_from.file} has no {init_from.model!r}. {nearest(init_from.model, groups)}"
            )
        return groups[init_from.model]
    if len(groups) == 1:
        return next(iter(groups.values()))
    if model in groups:
        return groups[model]
    named = ", ".join(repr(group) for group in groups)
    raise ConfigError(
        f"{where}: {init_from.file} contains several groups of tensors ({named}). Choose a group with model."
    )


def _rename(tensors: Mapping[str, Tensor], init_from: InitFrom, where: str) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, tensor in tensors.items():
        # The longest matching prefix decides.
        prefix = max((prefix for prefix in init_from.rename if name.startswith(prefix)), key=len, default=None)
        if prefix is not None:
            used.add(prefix)
        new = name if prefix is None else init_from.rename[prefix] + name[len(prefix) :]
        if new in renamed:
            raise ConfigError(f"{where}.rename: two tensors would have the name {new!r}. Correct the replacements.")
        renamed[new] = tensor
    for prefix in init_from.rename:
        if prefix not in used:
            raise ConfigError(
                f"{where}.rename: no name in {init_from.file} starts with {prefix!r}{_suggest(prefix, tensors)}"
            )
    return renamed


def _read(file: Path, where: str) -> dict[str, Tensor]:
    """Read all tensors of a file by name. Tensors in groups of a checkpoint are named ``group/name``."""
    with (
        translate_failures(lambda reason: ConfigError(f"{where}: {file} cannot be read: {reason}")),
        open_regular(file) as opened,
    ):
        head = opened.read(16)
    if not head:
        raise ConfigError(f"{where}: {file} is empty. Download it again.")
    kind = "checkpoint" if head[:2] in (b"PK", b"\x80\x02") else "safetensors" if head[8:9] == b"{" else ""
    if not kind:
        raise ConfigError(
            f"{where}: {file} is neither safetensors nor a PyTorch checkpoint: it starts with {head[:8]!r}. Choose another file."
        )
    if _KINDS.get(file.suffix, kind) != kind:
        suffixes = " or ".join(suffix for suffix, suffix_kind in _KINDS.items() if suffix_kind == kind)
        raise ConfigError(f"{where}: {file} is a {kind} file with a wrong suffix. Rename it to {suffixes}.")
    tensors = _read_safetensors(file, where) if kind == "safetensors" else _read_checkpoint(file, where)
    if not tensors:
        raise ConfigError(f"{where}: {file} contains no tensors. Choose another file.")
    return tensors


def _read_safetensors(file: Path, where: str) -> dict[str, Tensor]:
    with translate_failures(
        lambda reason: ConfigError(f"{where}: {file} is a damaged safetensors file: {reason}. Download it again.")
    ):
        return safetensors.torch.load_file(file)


def _read_checkpoint(file: Path, where: str) -> dict[str, Tensor]:
    def make_error(reason: str) -> ConfigError:
        unsafe = re.search(r"GLOBAL (\S+)", reason)
        if unsafe is None:
            return ConfigError(f"{where}: {file} is a damaged checkpoint ({first_line(reason)}). Download it again.")
        return ConfigError(
            f"{where}: {file} contains more than tensors: reading it would load {unsafe[1]} and could execute code. Save only the "
            f"tensors, with torch.save(network.state_dict(), FILE)."
        )

    with translate_failures(make_error):
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise make_error(str(error)) from error  # the name of the code is beyond the length of a usual reason
    tensors: dict[str, Tensor] = {}

    def collect(value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            tensors[path] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                collect(item, f"{path}/{key}" if path else str(key))

    collect(content, "")
    return tensors
