"""Studies of papers whose data are not available: dry runs on small trees in the layouts of the data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import paper_trees as trees
import pytest

from raydfl.experiments.load import check_data_sets, load_study, prepare
from raydfl.runs import Progress

JOBS = Path(__file__).resolve().parents[2] / "jobs"
FEW = ("data.partition.clients=4", "data.partition.minimum=1", "train.cohort=2")


class Case(NamedTuple):
    """A study, its cells, their data, and overrides for the small tree."""

    study: str
    only: tuple[str, ...]
    write: Callable[[Path], None]
    overrides: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    """Files of pretrained weights."""


COLA = "runs/cola/model.safetensors"
IMAGENET, SSAST = "data/resnet18-5c106cde.pth", "data/SSAST-Tiny-Patch-400.pth"
SPEECH, AMBIENT, VOXFORGE = trees.write_speech_commands, trees.write_ambient_contexts, trees.write_voxforge
CASES = [
    Case("fedstar/table3", ("data=Speech Commands", "clients=centralised"), SPEECH),
    Case("fedstar/table3", ("data=Ambient Context", "clients=5"), AMBIENT),
    Case("fedstar/table3", ("data=VoxForge", "clients=30"), VOXFORGE),
    Case("fedstar/table5", ("classes=50 %", "labels=20 %", "method=FedSTAR"), SPEECH),
    Case("fedstar/table5", ("classes=0 %", "labels=50 %", "method=no pseudo-labels"), SPEECH),
    Case("fedstar/table6_pretrained", ("labels=20 %", "unlabelled=20 %", "start=COLA"), SPEECH, (), (COLA,)),
    Case("fedstar/figure2", ("participation=20 %", "labels=20 %", "method=FedSTAR"), SPEECH),
    Case("fedstar/figure3", ("train.local_epochs=2", "labels=20 %", "method=no pseudo-labels"), SPEECH),
    Case("fedstar/figure5", ("data=Ambient Context", "labels=100 %", "start=COLA"), AMBIENT, (), (COLA,)),
    Case("fedstar/figure5", ("data=VoxForge", "labels=50 %", "start=random"), VOXFORGE),
    Case("fedmlac/trimming", ("data=GSC", "silence=trimmed", "method=FedMLAC"), SPEECH),
    Case("fedmlac/trimming", ("data=IEMOCAP", "silence=trimmed", "method=FedAvg"), trees.write_iemocap),
    Case("fedmlac/trimming", ("data=CREMA-D", "silence=trimmed", "method=FedOPT"), trees.write_crema_d),
    Case(
        *("fedmlac/trimming", ("data=UrbanSound8K a=0.5", "silence=trimmed", "method=FedKAD")),
        *(trees.write_urbansound8k, FEW),
    ),
    *(
        Case(
            "modality_mirror/table1",
            (f"data={data}", "missing=50 %", f"method={method}"),
            write,
            FEW,
            (IMAGENET, SSAST),
        )
        for data, write, method in (
            ("UCF101", trees.write_ucf101, "ModalityMirror"),
            ("UCF101", trees.write_ucf101, "Harmony"),
            ("ActivityNet", trees.write_activitynet, "MultiFL"),
            ("ActivityNet", trees.write_activitynet, "UniFL"),
        )
    ),
    Case(
        *("modality_mirror/figure2", ("data=ActivityNet", "method=without a teacher")),
        *(trees.write_activitynet, FEW, (IMAGENET, SSAST)),
    ),
    Case(
        *("modality_mirror/figure3", ("missing=70 %", "method=ModalityMirror")),
        *(trees.write_ucf101, FEW, (IMAGENET, SSAST)),
    ),
]


FAST = (CASES[0], CASES[10], CASES[14])
"""One case of each paper."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in FAST else [pytest.mark.slow]) for case in CASES],
    ids=lambda case: f"{case.study}-{'-'.join(case.only)}",
)
def test_the_data_of_a_study_are_prepared_from_a_small_tree(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYDFL_DATA", str(tmp_path / "data"))
    for file in case.weights:
        trees.write_text(tmp_path / file, "weights")  # loading checks that the file exists
    case.write(tmp_path / "data")
    overrides = (f"data.cache={tmp_path / 'cache'}", *case.overrides)
    trials = load_study(JOBS / f"{case.study}.yaml", overrides, case.only).trials[:1]
    check_data_sets(trials)
    prepare(trials, Progress("quiet"))
