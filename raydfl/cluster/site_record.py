"""Record of outgoing data at a site: JSON lines, each with the hash of the previous line.

The hash of the last line is the head of the chain. Each round's replies carry the head to the server, which appends it to
``site_heads.jsonl`` in the run's folder. So a site cannot shorten or rewrite its record unnoticed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from raydfl.core.errors import InputError, RunDirectoryError, translate_failures
from raydfl.core.files import make_private_folder, writing
from raydfl.core.tensors import FlatTensors
from raydfl.engine import EarlyOrders, Order, Pool, Reply, Worker

HEADS = "site_heads.jsonl"
"""File in the run's folder with the heads of the sites' records."""

_START = "0" * 64
"""Hash before the first line."""
_LONGEST = 1 << 16
"""Maximum bytes of a line."""
_TEXT = 2000
"""Maximum characters of a text in a line."""
_ADVICE = "Make room, or make the folder of `record` in the site's policy writable"
T = TypeVar("T")


class Head(NamedTuple):
    """Number and hash of a line of a record."""

    number: int
    hash: str

    @classmethod
    def from_text(cls, text: str) -> Head:
        """Parse the text of a head, ``"12 3f0c..."``."""
        number, _, digest = text.partition(" ")
        return cls(int(number), digest)

    def __str__(self) -> str:
        return f"{self.number} {self.hash}"


def _make_line(values: Mapping[str, Any], previous: str) -> tuple[bytes, str]:
    """Return the line of an entry, and its hash over the previous hash and the entry."""
    body = json.dumps({**values, "previous": previous}, separators=(",", ":"))
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{body[:-1]},"hash":"{digest}"}}\n'.encode(), digest


def _parse_line(line: bytes) -> dict[str, Any]:
    """Parse a line and check its own hash.

    Raises:
        InputError: The line is incomplete, or its content does not match its hash.
    """
    with translate_failures(InputError):
        entry = json.loads(line)
        if not isinstance(entry, dict) or not isinstance(entry.get("number"), int):
            raise InputError("it is not an entry of a record")
        values = {key: value for key, value in entry.items() if key not in ("previous", "hash")}
        if line != _make_line(values, str(entry.get("previous")))[0]:
            raise InputError("its content does not match its hash")
        return entry


class SiteRecord:
    """The record of a site. Several processes may append to it.

    Args:
        path: File of the record. It is created with its folder, for the owner only.
        site: Name of the site.
    """

    def __init__(self, path: Path, site: str) -> None:
        self.path = path
        self.site = site

    def append(self, event: str, **values: Any) -> Head:
        """Append a line durably, and return the new head.

        Args:
            event: ``"opened"``, ``"sent"``, ``"rejected"`` or ``"failed"``.
            values: Further values, as plain data. Texts are shortened to 2,000 characters.

        Raises:
            RunDirectoryError: The last line is damaged.
            ResourcesError: The record cannot be written.
        """
        short = {key: value[:_TEXT] if isinstance(value, str) else value for key, value in values.items()}
        with writing(self.path.parent, _LONGEST, "the site's record of outgoing data", _ADVICE):
            make_private_folder(self.path.parent)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self.path, flags, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                last = self._read_head(descriptor)
                entry = {
                    "number": last.number + 1,
                    "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                    "site": self.site,
                    "event": event,
                    **short,
                }
                line, digest = _make_line(entry, last.hash)
                os.write(descriptor, line)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return Head(last.number + 1, digest)

    def _read_head(self, descriptor: int) -> Head:
        """Return the head of the open record."""
        size = os.fstat(descriptor).st_size
        if not size:
            return Head(0, _START)
        tail = os.pread(descriptor, min(size, _LONGEST), max(0, size - _LONGEST))
        start = tail.rfind(b"\n", 0, -1) + 1
        try:
            entry = _parse_line(tail[start:])
        except InputError as error:
            raise RunDirectoryError(
                f"site {self.site!r}: the last line of its record {self.path} is damaged: {error}. Run `raydfl site audit` at the "
                f"site. Move the damaged record to another place to start a new record."
            ) from error
        return Head(entry["number"], entry["hash"])


def find_break(path: Path, heads: Iterable[Head] = ()) -> tuple[Head, str]:
    """Verify a record, and compare it with heads from run folders.

    Args:
        path: File of the record.
        heads: Earlier heads of the record.

    Returns:
        The head of the intact lines, and the first break of the chain with its line; "" for an intact record.

    Raises:
        InputError: The file cannot be read.
    """
    expected: dict[int, set[str]] = {}
    for head in heads:
        expected.setdefault(head.number, set()).add(head.hash)
    last = Head(0, _START)

    def make_error(reason: str) -> InputError:
        return InputError(f"{path} cannot be read: {reason}. Give the file `record` of the site's policy.")

    with translate_failures(make_error), path.open("rb") as file:
        for line in file:
            problem, entry = _check_line(line, last, expected.get(last.number + 1, set()))
            if problem:
                return last, f"line {last.number + 1}: {problem}"
            last = Head(entry["number"], entry["hash"])
    newest = max(expected, default=0)
    if newest > last.number:
        return last, (
            f"line {last.number + 1}: the record ends here, but the run's folder has the head of line {newest}. Lines were removed "
            f"from the end"
        )
    return last, ""


def _check_line(line: bytes, last: Head, expected: set[str]) -> tuple[str, dict[str, Any]]:
    """Return the problem of a line after another line, or "", and its entry."""
    try:
        entry = _parse_line(line)
    except InputError as error:
        return f"it is damaged: {error}", {}
    if entry["number"] != last.number + 1:
        return f"it has the number {entry['number']}. Lines are missing or in another order", {}
    if entry["previous"] != last.hash:
        return "it does not have the hash of the previous line", {}
    if expected - {entry["hash"]}:
        return "its hash differs from the head in the run's folder. The record was written again", {}
    return "", entry


def read_heads(run_dir: Path, site: str) -> list[Head]:
    """Read the heads of a site's record from a run's folder.

    Raises:
        InputError: The folder has no heads, or the file is damaged.
    """
    path = run_dir / HEADS
    with translate_failures(
        lambda reason: InputError(
            f"{path} cannot be read: {reason}. Give the folder of a run with a policy at its sites."
        )
    ):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [Head.from_text(row["head"]) for row in rows if row["site"] == site]


class HeadKeeper:
    """Pool with storage of the heads of the sites' records in the run's folder, before the server uses the replies."""

    def __init__(self, pool: Pool, run_dir: Path) -> None:
        self._pool = pool
        self._path = run_dir / HEADS
        self.concurrent = pool.concurrent
        self.early = 0

    def run(
        self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors], early: EarlyOrders | None = None
    ) -> Iterator[Reply]:
        """Run the orders in the pool. Runs with sites have no early orders."""
        return self._keep_heads(self._pool.run(orders, broadcast), orders)

    def _keep_heads(self, replies: Iterator[Reply], orders: Sequence[Order]) -> Iterator[Reply]:
        sites = {order.position: order.place for order in orders}
        for reply in replies:
            if reply.site_head:
                row = {"site": sites[reply.position], "round": orders[0].round_number, "head": reply.site_head}
                with self._path.open("a") as file:
                    file.write(f"{json.dumps(row)}\n")
            yield reply

    def count_workers(self) -> int:
        """Return the number of the pool's workers."""
        return self._pool.count_workers()

    def ask(self, place: str, job: Callable[[Worker], T], wait: bool = True) -> T | None:
        """Run a function on a worker of a site."""
        return self._pool.ask(place, job, wait)

    def close(self) -> None:
        """Release the pool's resources."""
        self._pool.close()
