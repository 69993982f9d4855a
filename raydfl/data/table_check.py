"""Check of the tables in a run's folder in a helper process, because a damaged table can end the process that reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from raydfl.core.errors import DataError, RunDirectoryError
from raydfl.core.files import check_regular
from raydfl.core.isolation import call_isolated, reading

_checked: dict[Path, tuple[int, int]] = {}
"""Size and modification time of each file after its check."""


def check_tables(run_dir: Path) -> None:
    """Read all tables of a run in a helper process: its population (Arrow) and metrics (Parquet). Unchanged files are read once.

    Raises:
        RunDirectoryError: a table has invalid values, or its reader crashes or exceeds a limit.
    """
    files = [*(run_dir / "population").rglob("*.arrow"), *(run_dir / "rows").glob("*.parquet")]
    stamps = {path: (status.st_size, status.st_mtime_ns) for path in sorted(files) if (status := path.stat())}
    changed = [path for path, stamp in stamps.items() if _checked.get(path) != stamp]
    if not changed:
        return
    try:
        call_isolated(_read_tables, changed, where=str(run_dir))
    except DataError as error:
        raise RunDirectoryError(str(error)) from error
    _checked.update((path, stamps[path]) for path in changed)


def _read_tables(paths: Sequence[Path]) -> None:
    for path in paths:
        with reading(path, "is missing or damaged", "Restore it from a copy, or restart the run in a new folder"):
            check_regular(path.stat())
            for batch in _decode(path):
                batch.validate(full=True)  # Other code trusts offsets and indices.


def _decode(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a table. The command's own reader reports a file that cannot be decoded."""
    try:
        if path.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as table:
                yield from table.iter_batches()
        else:
            with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
                yield from map(reader.get_batch, range(reader.num_record_batches))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  (A decoder may raise anything.)
        return
