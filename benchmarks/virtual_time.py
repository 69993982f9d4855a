"""Measure synchronous and asynchronous training in virtual time: seconds and bytes to a target, and the place of slow clients.

The Free Spoken Digit Dataset, each speaker's training clips dealt to ten clients: 60 clients, CRNN-Lite. Each contestant
trains equally many clients, so all have the same computation. The target was chosen before the first run. Settings of the
optimiser are equal, not tuned for each contestant, so the tables are exploratory.

    python benchmarks/virtual_time.py --root PATH/TO/fsdd            # train what has no JSON file, then write the tables
    python benchmarks/virtual_time.py --tables                       # write the tables from the JSON files
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from raydfl import load_result, make_config, run
from raydfl.core import seeds
from raydfl.core.version import describe_source
from raydfl.core.yaml import read_yaml
from raydfl.engine import apply_values
from raydfl.engine.storage.record import read_rows

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "virtual_time"
PAGE = HERE / "results" / "virtual_time.md"
DOCS = HERE.parent / "docs" / "fleet.md"
COHORT, CLIENTS, EVALUATIONS = 12, 2400, 20
"""Clients at the same time, trained clients of a run, and its evaluations."""
TARGET = 0.7
"""Test accuracy, chosen before the first run."""
SEEDS = (1, 2, 3)
SECONDS = {"start": 5, "example": 0.25}
"""Virtual duration of a client's work before the factor of its pace."""
Settings = Mapping[str, Any]
MEAN = {"method.rule": "uniform_mean"}
"""FedBuff divides the sum of the contributions by the buffer."""


def _fleet(buffer: int = COHORT, spread: float = 1.0, **more: Any) -> Settings:
    return {"train.fleet": {"buffer": buffer, "seconds": {**SECONDS, "spread": spread}, **more}}


_HOURS = {"data.profile": {"hours": {"values": ["0-1200", "1200-2400", "2400-3600"]}}}
_SHIFTS = {"column": "hours", "period": 3600}
CONTESTANTS: Mapping[str, Settings] = {
    "synchronous": _fleet(),
    "synchronous, over 1.3": _fleet(over=1.3),
    "synchronous, deadline": {**_fleet(), "train.deadline": 15, "train.late": "partial"},
    "FedBuff": {**_fleet(4, concurrency=COHORT), **MEAN},
    "FedAsync": {
        **_fleet(1, concurrency=COHORT, mix="model"),
        "method": {"name": "fedavgm", "momentum": 0, "server_lr": 0.6},
    },
}
SHIFTS: Mapping[str, Settings] = {
    "synchronous, shifts": {**_fleet(hours=_SHIFTS), **_HOURS},
    "FedBuff, shifts": {**_fleet(4, concurrency=COHORT, hours=_SHIFTS), **MEAN, **_HOURS},
}
SPREADS, BUFFERS = (0.0, 0.5, 1.0, 1.5), (1, 2, 4, 12)
GRID: Mapping[str, Settings] = {
    f"buffer {buffer}, spread {spread}": {**_fleet(buffer, spread, concurrency=COHORT), **MEAN}
    for spread in SPREADS
    for buffer in BUFFERS
}


def main() -> None:
    """Train the missing runs, and write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", help="the Free Spoken Digit Dataset")
    parser.add_argument("--cache", help="data.cache of the runs")
    parser.add_argument("--clients", type=int, default=CLIENTS, help="trained clients of a run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--page", type=Path, default=PAGE, help="file of the tables")
    parser.add_argument("--only", nargs="*", help="contestants, by default all")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--tables", action="store_true", help="train nothing")
    given = parser.parse_args()
    if not given.tables and not given.root:
        parser.error("--root is missing: the folder of the Free Spoken Digit Dataset")
    given.out.mkdir(parents=True, exist_ok=True)
    for seed in () if given.tables else given.seeds:
        for name, settings in {**CONTESTANTS, **SHIFTS, **GRID}.items():
            file = given.out / f"{name.replace(', ', '-').replace(' ', '_')}-{seed}.json"
            if not file.exists() and (not given.only or name in given.only):
                result = {
                    "contestant": name,
                    "seed": seed,
                    **train(given.root, given.cache, settings, seed, given.clients),
                }
                file.write_text(json.dumps(result, indent=1) + "\n")
                print(f"{name}, seed {seed}: {result['curve'][-1]}", flush=True)
    results = load_results(given.out)
    given.page.write_text(format_page(results))
    if given.page == PAGE:
        DOCS.write_text(replace_table(DOCS.read_text(), results))


def load_results(folder: Path) -> list[dict[str, Any]]:
    """Load the results of all runs."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def replace_table(text: str, results: Sequence[Mapping[str, Any]]) -> str:
    """Replace the short table between the two comments of a page."""
    columns = (
        "training",
        f"virtual s to {100 * TARGET:.0f} %",
        "clients to it",
        "accuracy (%)",
        "updates of the slowest quarter (%)",
    )
    lines = [_format_row(*columns), "|---|" + "---|" * (len(columns) - 1)]
    for name in (*CONTESTANTS, *SHIFTS):
        found = [result for result in results if result["contestant"] == name]
        lines.append(
            _format_row(
                name,
                _format_targets(found, "seconds"),
                _format_targets(found, "clients"),
                _format_cell([score(result) for result in found], 1),
                _format_cell([100 * result["slow_updates"] for result in found]),
            )
        )
    before, begin, rest = text.partition("<!-- virtual time -->\n")
    _, end, after = rest.partition("<!-- end of table -->\n")
    return "".join([before, begin, "\n".join(lines), "\n", end, after])


def train(root: str, cache: str | None, settings: Settings, seed: int, clients: int) -> dict[str, Any]:
    """Train a contestant, and return its results as JSON values."""
    buffer = settings["train.fleet"]["buffer"]
    rounds = max(1, clients // buffer)
    with tempfile.TemporaryDirectory(prefix="raydfl-fleet-") as folder:
        config = make_config(
            apply_values(
                dict(read_yaml(HERE / "studies" / "fsdd_base.yaml")),
                {
                    "models.model": "crnn_lite",
                    "data.root": root,
                    "data.cache": cache,
                    "data.split.validation": 0.2,
                    "evaluate.every": max(1, rounds // EVALUATIONS),
                    "evaluate.clients": "all",
                    "train.rounds": rounds,
                    "run.seed": seed,
                    "run.dir": folder,
                    "run.name": "run",
                    "run.keep": 1,
                    **settings,
                },
            )
        )
        run(config)
        history = load_result(Path(folder) / "run").history
        rows = read_rows(Path(folder) / "run", where=pc.field("client") != "").to_pandas()
    trained = rows[(rows.split == "train") & (rows.metric == "loss")].client.value_counts()
    scores = rows[(rows.split == "validation") & (rows.metric == "model/accuracy") & (rows["round"] == rounds)]
    accuracy = dict(zip(scores.client, scores.value, strict=True))
    spread = settings["train.fleet"]["seconds"]["spread"]
    paces = {
        client: np.exp(spread * seeds.generator(seed, 0, client, "fleet/pace").standard_normal()) for client in accuracy
    }
    slow = sorted(paces, key=paces.__getitem__)[-len(paces) // 4 :]
    used = (history["server bytes_down"] + history["server bytes_up"]).cumsum()
    measured = history["test model/accuracy"].dropna()
    return {
        "source": describe_source(),
        "config": config.digest(),
        "curve": [
            {
                "round": int(number),
                "seconds": float(history["server virtual_seconds"][number]),
                "clients": int(history["server clients"][:number].sum()),
                "bytes": float(used[number]),
                "accuracy": float(value),
            }
            for number, value in measured.items()
        ],
        "dropped": int(history["server dropped"].sum()),
        "staleness": float(
            (history["server staleness"] * history["server clients"]).sum() / history["server clients"].sum()
        ),
        "slow_updates": float(trained.reindex(slow).fillna(0).sum() / trained.sum()),
        "slow_accuracy": statistics.mean(accuracy[client] for client in slow),
        "other_accuracy": statistics.mean(accuracy[client] for client in accuracy if client not in slow),
    }


def find_target(result: Mapping[str, Any], what: str) -> float | None:
    """Return the seconds, bytes or clients of the first evaluation that reaches the target; ``None``: none does."""
    return next((point[what] for point in result["curve"] if point["accuracy"] >= TARGET), None)


def score(result: Mapping[str, Any]) -> float:
    """Return the mean accuracy of the last five evaluations, in per cent."""
    return 100 * float(statistics.mean(point["accuracy"] for point in result["curve"][-5:]))


def format_page(results: Sequence[Mapping[str, Any]]) -> str:
    """Format the page of results."""
    return "\n".join(_format_lines(results)) + "\n"


def _format_lines(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        runs.setdefault(result["contestant"], []).append(result)
    yield "# Training in virtual time"
    yield ""
    sources = sorted({result["source"] for result in results})
    yield f"Exploratory: the optimiser is not tuned for each contestant. {len(results)} runs; source {', '.join(sources)}."
    yield "Accuracy is the mean of the last five evaluations. Cells have the mean over seeds (lowest to highest)."
    yield f"The target is an accuracy of {TARGET:.0%}."
    yield ""
    yield (
        "| contestant | virtual s to the target | clients to the target | MB to the target | virtual s in all | accuracy (%) | "
        "staleness | slow quarter's updates (%) | its accuracy (%) | accuracy of the rest (%) |"
    )
    yield "|---|" + "---|" * 9
    for name in (*CONTESTANTS, *SHIFTS):
        found = runs.get(name, [])
        yield _format_row(
            name,
            _format_targets(found, "seconds"),
            _format_targets(found, "clients"),
            _format_targets(found, "bytes", 1e-6),
            _format_cell([result["curve"][-1]["seconds"] for result in found]),
            _format_cell([score(result) for result in found], 1),
            _format_cell([result["staleness"] for result in found], 2),
            *(
                _format_cell([100 * result[key] for result in found], 1)
                for key in ("slow_updates", "slow_accuracy", "other_accuracy")
            ),
        )
    tables: Sequence[tuple[str, Callable[[Sequence[Mapping[str, Any]]], str]]] = (
        ("accuracy (%)", lambda found: _format_cell([score(result) for result in found], 1)),
        ("virtual s to the target", lambda found: _format_targets(found, "seconds")),
        ("slow quarter's updates (%)", lambda found: _format_cell([100 * r["slow_updates"] for r in found], 1)),
    )
    for title, cell in tables:
        yield ""
        yield f"| spread of the pace: {title} | " + " | ".join(f"buffer {buffer}" for buffer in BUFFERS) + " |"
        yield "|---|" + "---|" * len(BUFFERS)
        for spread in SPREADS:
            yield _format_row(str(spread), *(cell(runs.get(f"buffer {b}, spread {spread}", [])) for b in BUFFERS))


def _format_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _format_cell(values: Sequence[float], digits: int = 0) -> str:
    if not values:
        return "not run"
    mean, low, high = (f"{value:,.{digits}f}" for value in (statistics.mean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def _format_targets(results: Sequence[Mapping[str, Any]], what: str, factor: float = 1.0) -> str:
    reached = [value * factor for result in results if (value := find_target(result, what)) is not None]
    if len(reached) == len(results):
        return _format_cell(reached)
    return f"{_format_cell(reached)}; {len(reached)} of {len(results)} runs" if reached else "not reached"


if __name__ == "__main__":
    main()
