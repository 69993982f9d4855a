"""Conversion of populations of format 1 (named arrays in a safetensors file) to tables."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import safetensors
import safetensors.numpy

from raydfl.data.client_ids import ClientIds
from raydfl.data.tables import POOLED, ROLES, Tables, encode, make_empty_clips

_FILE = "population.safetensors"
_OWNED = ("train", "validation", "client_test", "attack")
_TYPES: Mapping[str, Callable[[str], bool | int | float]] = {"bool": "True".__eq__, "int": int, "float": float}


def is_in(folder: Path) -> bool:
    """Return whether a folder contains a population of format 1."""
    return (folder / _FILE).exists()


def remove(folder: Path) -> None:
    """Delete a folder's population of format 1, if any."""
    (folder / _FILE).unlink(missing_ok=True)


def convert(folder: Path, verify: bool) -> tuple[dict[str, Any], Tables]:
    """Convert a population of format 1 to the facts and tables of format 2.

    Args:
        folder: the folder of the population.
        verify: verify the digest of the arrays.

    Raises:
        Exception: the file is damaged, or has an unknown format.
    """
    with safetensors.safe_open(folder / _FILE, "np") as file:
        metadata = file.metadata()
    arrays = safetensors.numpy.load_file(folder / _FILE)
    facts = json.loads(metadata["raydfl"])
    if facts["format"] != 1:
        raise ValueError(f"the format of {_FILE} is {facts['format']}, not 1")
    if verify and _digest(arrays) != facts["digest"]:
        raise ValueError(f"the content of {_FILE} has changed")
    views = facts.get("views", {})
    new = {
        "classes": facts["classes"],
        "separator": facts.get("separator"),
        "length": facts["length"],
        "stores": facts["stores"],
        "views": views,
        "bands": facts.get("bands"),
        "skipped": facts["skipped"],
        "messages": facts["messages"],
        "sites": facts.get("sites", []),
        "parts": facts.get("parts", []),
    }
    converted = {"statistics": arrays["statistics/values"]} if "statistics/values" in arrays else {}
    for name, array in arrays.items():
        prefix, _, rest = name.partition("/")
        if prefix.partition(" ")[0] == "transforms":
            converted[f"{prefix.replace(' ', '-')}.{rest}"] = array
    return new, Tables(_convert_clips(arrays, facts), _convert_clients(arrays, facts), converted)


def _convert_clips(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> pa.RecordBatch:
    if "train/starts" not in arrays:
        return make_empty_clips()
    pools, columns, views = facts.get("pools", ["train"]), facts.get("columns") or {}, facts.get("views", {})
    last, blocks = len(facts["stores"]) - 1, []
    for role in ROLES:
        for pool in range(len(pools)) if role in POOLED else (-1,):
            base = "train" if role == "attack" else role
            mark = f"@{pools[pool]}" if pool > 0 else ""
            if f"{role}{mark}/starts" not in arrays:
                continue
            rows, offsets = len(arrays[f"{role}{mark}/starts"]), arrays.get(f"{base}{mark}/offsets")
            client = np.full(rows, -1, np.int32)
            if role in _OWNED and offsets is not None:
                client = np.repeat(np.arange(len(offsets) - 1, dtype=np.int32), np.diff(offsets))
            store = np.full(rows, last if role == "triggered" else 0, np.int8)
            if role in POOLED and "noisy" in arrays and offsets is not None:
                store = arrays["noisy"][client].astype(np.int8)
            if role == "attack":
                store = np.where(arrays["altered"][client], np.int8(last), store)
            block = {
                "role": np.full(rows, ROLES.index(role), np.int8),
                "pool": np.full(rows, pool, np.int8),
                "client": client,
                "store": store,
            }
            renamed = {"clip": "clips", "label": "labels", "start": "starts", "frames": "counts"}
            block |= {new: arrays[f"{role}{mark}/{old}"] for new, old in renamed.items()}
            block |= {f"column:{name}": arrays[f"{role}{mark}/column/{name}"] for name in columns}
            for view in views:
                block[f"view:{view}:start"] = arrays[f"{base}{mark}@{view}/starts"]
                block[f"view:{view}:frames"] = arrays[f"{base}{mark}@{view}/counts"]
            blocks.append(block)
    table = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    values = {"role": ROLES, "pool": pools, **{f"column:{name}": names for name, names in columns.items()}}
    return pa.record_batch(
        {name: encode(array, values[name]) if name in values else pa.array(array) for name, array in table.items()}
    )


def _convert_clients(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> pa.RecordBatch:
    columns: dict[str, pa.Array] = ClientIds.from_strings(_read_texts(arrays, "ids")).columns()
    number = len(columns["client"])
    if (group := arrays.get("groups_of", np.full(1, -1))).max(initial=-1) >= 0:
        columns["group"] = encode(group, _read_texts(arrays, "groups"))
    for name in ("noisy", "label_errors"):
        if name in arrays and arrays[name].any():
            columns[name] = pa.array(arrays[name])
    if "train/first" in arrays:
        columns |= {name: pa.array(arrays[f"train/{name}"]) for name in ("first", "stop")}
    if "statistics/of" in arrays:
        columns["statistics"] = pa.array(arrays["statistics/of"])
    types = facts.get("profile_types") or {}  # early versions store all columns as text
    for name in arrays:
        kind, _, rest = name.partition("/")
        if kind == "profile" and rest.endswith("/of"):
            key = rest.removesuffix("/of")
            texts = _read_texts(arrays, f"profile/{key}")
            parse = _TYPES.get(types.get(key, ""))
            columns[f"profile:{key}"] = encode(arrays[name], texts if parse is None else [*map(parse, texts)])
    if "train/starts" not in arrays:
        columns["examples"] = pa.array(np.diff(arrays["train/offsets"]))
        for view in facts.get("views", {}):
            columns[f"has:{view}"] = pa.array(arrays.get(f"presence/{view}", np.ones(number, bool)))
    return pa.record_batch(columns)


def _read_texts(arrays: Mapping[str, np.ndarray], kind: str) -> list[str]:
    text, ends = arrays[f"{kind}/text"].tobytes(), arrays[f"{kind}/ends"].tolist()
    return [text[first:stop].decode() for first, stop in zip([0, *ends], ends, strict=False)]


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, array in sorted(arrays.items()):
        if name != "statistics/values" and not name.startswith(("transforms", "presence/")):
            digest.update(f"{name} {array.dtype} {array.shape};".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
