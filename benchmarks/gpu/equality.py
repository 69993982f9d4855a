"""Part 1: tiny federations end on the GPU as on the CPU, clients one after another and together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gpu.federations import SHORT, Case, configuration, train
from gpu.lines import Line, Watch, run_checked

PART = "equal to the CPU"
ABSOLUTE, RELATIVE = 2e-4, 2e-3
"""Tolerance for rounding in two short rounds; sums have a different order on a GPU."""
OF_SHORT = 50
"""Factor of the tolerance for bfloat16 and float16 against float32."""
TOGETHER = 3


def difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the largest difference, as a fraction of the tolerance, and its tensor.

    Args:
        expected: tensors by name.
        found: the tensors to compare.

    Raises:
        ValueError: They have different names or shapes.
    """
    if expected.keys() != found.keys():
        raise ValueError(f"other tensors: {sorted(expected.keys() ^ found.keys())[:4]}")
    largest, where = 0.0, ""
    for name, value in expected.items():
        if value.shape != found[name].shape:
            raise ValueError(f"{name} has the shape {list(found[name].shape)}, not {list(value.shape)}")
        one, other = value.double(), found[name].double()
        share = (one - other).abs() / (ABSOLUTE + RELATIVE * one.abs())
        worst = float(torch.nan_to_num(share, nan=float("inf")).max()) if share.numel() else 0.0
        if worst > largest:
            largest, where = worst, name
    return largest, where


def compare_devices(case: Case, clips: Path, folder: Path, device: str) -> Line:
    """Train a case on the CPU and twice on the device.

    Args:
        case: the federation to train.
        clips: list of the clips.
        folder: for the runs.
        device: ``"cuda"``, or ``"cpu"`` in a dry run.
    """
    name = str(case).replace(" ", "-").replace(",", "")
    short = case.name in SHORT
    reference = Case(case.kind, case.name, {}) if short else case
    expected, _ = train(configuration(reference, clips, folder, f"{name}-cpu"), "cpu")
    figures, details, good = [], {}, True
    for together in (1, TOGETHER):
        config = configuration(case, clips, folder, f"{name}-{together}", together)
        found, width = train(config, device)
        share, where = difference(expected, found)
        share /= OF_SHORT if short else 1
        good = good and share <= 1
        figures.append(f"{share:.0e}")
        details[f"together {together}"] = {"share of what is allowed": share, "tensor": where, "width": width}
    return Line(PART, str(case), "ok" if good else "FAILED", f"{' and '.join(figures)} of what is allowed", details)


def check(cases: Sequence[Case], clips: Path, folder: Path, device: str, watch: Watch) -> list[Line]:
    """Return a line for each case. Cases without time left are marked."""
    lines: list[Line] = []
    for case in cases:
        if watch.left <= 0:
            lines.append(Line(PART, str(case), "cut short", "no time was left"))
            continue
        lines.append(run_checked(PART, str(case), lambda case=case: compare_devices(case, clips, folder, device)))
        print(f"{lines[-1].result:9} {case} ({lines[-1].details['seconds']} s) {lines[-1].figure}", flush=True)
    return lines
