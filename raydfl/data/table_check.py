"""Check of the tables in a run's folder in a helper process, because a damaged table can end the process that reads it."""

from __future__ import annotations

from collections.abc import Sequence
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
        RunDirectoryError: a population has invalid values, or the reader of a file crashes or exceeds a limit.
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
            if path.suffix == ".arrow":
                _validate(path)
            else:
                _decode(path)


def _validate(path: Path) -> None:
    """Check all values of an Arrow file, because its reader trusts offsets and indices."""
    with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
        for number in range(reader.num_record_batches):
            reader.get_batch(number).validate(full=True)


def _decode(path: Path) -> None:
    """Decode a Parquet file. The reader of metrics reports its errors, and a run resumes without metrics."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for _ in file.iter_batches():
                pass
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001, S110  (See above.)
        pass
