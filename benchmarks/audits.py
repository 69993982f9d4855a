"""Attack each run of a study, and write a table: the membership attack and, with canary clips, the promise and its lower bound.

    python benchmarks/audits.py benchmarks/studies/privacy_silos.yaml
    python benchmarks/audits.py benchmarks/studies/privacy_clients.yaml

An attack needs the model and the clips of a run. Runs without a folder, and with private models alone, are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raydfl.core.errors import InputError
from raydfl.core.yaml import read_yaml
from raydfl.runs.inference import measure_membership


def main() -> None:
    """Audit the runs, and write the table beside the study's results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("--runs", type=Path, help="folder of the runs; default: dir of the study")
    parser.add_argument("--out", type=Path, help="file of the table; default: NAME_audit.md beside the results")
    given = parser.parse_args()
    study = read_yaml(given.study)
    results, runs = given.study.parent / study["results"], given.runs or Path(study["dir"])
    audits: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for file in sorted(results.glob("*.json")):
        result = json.loads(file.read_text())
        audit = run_audit(runs / result["run"], "canaries" in given.study.read_text())
        if audit is not None:
            audits[", ".join(result["labels"].values())].append(audit)
    if not audits:
        parser.error(f"{runs} has no run of {given.study} to attack. Train the study, or give --runs.")
    page = given.out or results.with_name(f"{results.name}_audit.md")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(format_page(study["title"], audits)) + "\n")
    print(page.read_text())


def run_audit(run_dir: Path, has_canary_clips: bool) -> Mapping[str, Any] | None:
    """Return the attacks on a run; ``None``: the run has no folder, or no model of its own on the server."""
    if not run_dir.is_dir():  # before a process starts for it
        print(f"{run_dir.name}: no folder of this run", file=sys.stderr)
        return None
    if not has_canary_clips:
        try:
            return {"membership": dataclasses.asdict(measure_membership(run_dir, trust=False))}
        except InputError as error:
            print(f"{run_dir.name}: {error}", file=sys.stderr)
            return None
    command = [sys.executable, "-m", "raydfl", "audit", str(run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        print(f"{run_dir.name}: {done.stderr.strip()}", file=sys.stderr)
        return None
    audit: Mapping[str, Any] = json.loads(done.stdout)
    return audit


def format_page(title: str, audits: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Format the audits of each cell as Markdown: means over the runs, and the largest lower bound."""
    canary_clips = all("canary_clips" in audit for found in audits.values() for audit in found)
    yield f"# Audit: {title}"
    yield ""
    if not canary_clips:
        yield "Membership: area under the ROC curve of the losses of training and held-out clips, mean (range) over"
        yield "seeds. 0.5: no leak."
        yield ""
        yield "| cell | runs | membership |"
        yield "|---|---|---|"
        for name, found in audits.items():
            yield f"| {name} | {len(found)} | {format_membership(found)} |"
        return
    yield "Promise: epsilon of the largest client. Bounds: 95 % lower bounds of epsilon from canary clips."
    yield "The control has fresh coins. Membership: area under the ROC curve of the losses of training and"
    yield "held-out clips, mean (range) over seeds. 0.5: no leak."
    yield ""
    yield "| cell | runs | promise | largest bound | largest possible bound | largest bound of the control | membership |"
    yield "|---|---|---|---|---|---|---|"
    for name, found in audits.items():
        promises = {audit["promised"] for audit in found}
        promise = "none" if None in promises else f"{max(promises):.2f}"
        clips = [audit["canary_clips"] for audit in found]
        bound, control = (max(clip[kind]["lower_bound"] for clip in clips) for kind in ("found", "control"))
        largest = max(clip["largest"] for clip in clips)
        yield f"| {name} | {len(found)} | {promise} | {bound:.2f} | {largest:.2f} | {control:.2f} | {format_membership(found)} |"


def format_membership(audits: Sequence[Mapping[str, Any]]) -> str:
    """Format the mean and the range of the membership attack."""
    areas = [audit["membership"]["auc"] for audit in audits]
    return f"{statistics.mean(areas):.3f} ({min(areas):.3f} to {max(areas):.3f})"


if __name__ == "__main__":
    main()
