"""Runs with a user's clip table: its rows replace the settings for splits, pools and clients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raydfl import ConfigError, load_result, run
from raydfl.data import assign_clips, list_clips
from raydfl.engine.config import Config
from raydfl.testing import assert_same_bits, train_federation

Tiny = Callable[..., Config]


def write_clips(path: Path, config: Config, **replaced: Callable[[dict[str, Any]], Any]) -> str:
    """Write the clip table of a configuration, and return the override that selects it.

    Args:
        replaced: functions that compute a column from a row instead.
    """
    tables = assign_clips(*list_clips(config.data, config.run.seed), config.data, config.run.seed)
    rows = tables.clips.select(["clip", "role", "pool", "client"]).to_pylist()
    rows = [row | {name: make(row) for name, make in replaced.items()} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return f"data.tables={{clips: {path}}}"


def test_a_method_trains_on_the_pools_of_a_table(tiny: Tiny, tmp_path: Path) -> None:
    """Oracle: a run with the settings that produced the table."""
    settings = tiny(method="fedstar")
    table = write_clips(tmp_path / "clips.parquet", settings)
    from_table = tiny(table, "data.unlabelled=null", "run.name=own", method="fedstar")
    assert_same_bits(train_federation(from_table), train_federation(settings))


@pytest.mark.parametrize("site", [False, True])
def test_a_table_without_the_methods_pools_is_rejected(tiny: Tiny, tmp_path: Path, site: bool) -> None:
    table = write_clips(tmp_path / "clips.parquet", tiny(method="fedstar"), pool=lambda row: row["pool"] and "quiet")
    if site:
        folder = f"{{folder: {tmp_path}/site, tables: {{clips: {tmp_path}/clips.parquet}}}}"
        table = f"data.sites={{north: {folder}}}"
    config = tiny(table, "data.unlabelled=null", method="fedstar")
    with pytest.raises(ConfigError, match="method 'fedstar' needs the pool 'labelled', but data has quiet"):
        run(config)


@pytest.mark.parametrize(("role", "clients"), [("server_validation", "cohort"), ("client_test", "all")])
def test_held_out_clips_of_a_table_may_select_the_best_round(
    tiny: Tiny, tmp_path: Path, role: str, clients: str
) -> None:
    def name_role(row: dict[str, Any]) -> str:
        return role if row["role"] == "validation" else str(row["role"])

    def name_client(row: dict[str, Any]) -> str | None:
        return None if name_role(row) == "server_validation" else row["client"]

    table = write_clips(tmp_path / "clips.parquet", tiny(), role=name_role, client=name_client)
    best = "{}" if role == "server_validation" else f"{{metric: {role} model/accuracy}}"
    outcome = run(tiny(table, "data.split.validation=0", f"evaluate.clients={clients}", f"run.best={best}"))
    best_round = load_result(outcome.run_dir).best
    assert best_round is not None
    assert best_round.criterion.metric == f"{role} model/accuracy"


def test_a_metric_without_held_out_clips_is_rejected(tiny: Tiny, tmp_path: Path) -> None:
    table = write_clips(tmp_path / "clips.parquet", tiny())
    with pytest.raises(
        ConfigError, match="'client_test model/accuracy' is not measured. Choose one of: test .*, validation"
    ):
        run(tiny(table, "run.best={metric: client_test model/accuracy}"))
