"""Controls of a run: measured once, stored in ``controls.json`` in the run's folder, and shown with the results."""

from __future__ import annotations

from pathlib import Path

from raydfl.controls import Control, from_json, measure_controls, to_json
from raydfl.core.errors import RunDirectoryError, translate_failures
from raydfl.core.files import read_regular, write_durably
from raydfl.data import Population
from raydfl.engine import Config
from raydfl.engine.storage import read_config

_FILE = "controls.json"


def measure_once(folder: Path, config: Config | None = None) -> str:
    """Measure the controls of a run and store them, unless a file exists.

    Args:
        folder: The run's folder.
        config: The run's configuration. ``None``: read it from the folder.

    Returns:
        The reason of a failure. Empty after a success.
    """
    path = folder / _FILE
    if path.exists():
        return ""
    try:
        config = config or read_config(folder)
        population = Population.load(folder / "population").use(config.data)
        measured = measure_controls(population, config.components.method.objective, config.run.seed)
        write_durably(path, to_json(*measured).encode())
    except Exception as error:  # noqa: BLE001  (no failure of the controls may end a run or a report)
        return f"The controls were not measured: {error}"
    return ""


def read_controls(folder: Path) -> tuple[list[Control], str]:
    """Read the controls of a run, and the reason for missing controls."""
    path = folder / _FILE
    if not path.exists():
        return [], ""
    try:
        with translate_failures(RunDirectoryError):
            return from_json(read_regular(path).decode())
    except RunDirectoryError as error:
        return [], f"{_FILE} is damaged ({error}). Remove it to measure the controls again."
