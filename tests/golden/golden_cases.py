"""The federations with bits recorded in ``golden.json``: each method, rule, attack, objective, transform and data option.

A case is the name of a method and overrides of the tiny federation of ``conftest.py``. All cases train for two rounds.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from raydfl.core import registry

TESTS = Path(__file__).parent.parent
MACHINES = f"data.name={TESTS}/objectives/machines.py:Machines"
CHORDS = f"data.name={TESTS}/objectives/machines.py:Chords"
SEEN = f"data.name={TESTS}/objectives/seen.py:Seen"
SECOND = "{column: second, features: {sample_rate: 8000, bands: 12, window_ms: 25, hop_ms: 10, seconds: 0.3}}"
IMAGES = (SEEN, "data.features={kind: image, size: 8}", "models.model={name: cnn_small, hidden: 8}")
VIEWS = (SEEN, f"data.views={{second: {SECOND}}}")
UNNORMALISED = "data.features.normalise=none"
ROBUST = "train.cohort=1.0"


class Case(NamedTuple):
    """Method and overrides of a federation."""

    method: str = "fedavg"
    overrides: tuple[str, ...] = ()


def _make_method_cases() -> dict[str, Case]:
    networks = (f"models.audio={_NETWORK}", f"models.video={_NETWORK[:-1]}, view: second}}")
    two_views = dict.fromkeys(("harmony", "modality_mirror", "multifl", "unifl"), (*VIEWS, *networks))
    return {
        f"method {name}": Case(name, (*two_views.get(name, ()), *_METHOD_OPTIONS.get(name, ())))
        for name in registry.names("raydfl.methods")
    }


_NETWORK = "{name: crnn_tiny, hidden: 4, filters: [4]}"
_METHOD_OPTIONS = {
    "feddrop": ("method.share=0.5",),
    "fedapta": ("method.ratio=0.5", "method.tasks={name: known, by: group}"),
    "fedlps": ("method.ratio=0.5",),
    "fedmp": ("method.ratios=[0.5]",),
    "fedrolex": ("method.share=0.5",),
    "fedstar": ("method.threshold=[0.3, 0.3]",),
    "hermes": ("method.threshold=0.0",),
    "profila_as_run": (
        "data.pools={normal: {column: label, values: [tone0]}, anomalous: {column: label, values: [tone1, tone2]}}",
        "method.anomalous_share=0.25",
    ),
    "heterofl": ("method.share=0.5",),
}

_PRIVATE = ("evaluate.clients=none", "privacy.key=seed", "train.cohort=1.0")
_RULES = {
    "gaussian": "{name: gaussian, clip: 1.0, noise: 0.5}",
    "foolsgold": "foolsgold",
    "lpa": "{name: lpa, vh: 0.4}",
    "norm_clipping": "{name: norm_clipping, norm: 0.1}",
    "trimmed_mean": "{name: trimmed_mean, trim: 0.2}",
}

_ATTACKS = {
    "backdoor": "{name: backdoor, target: tone0, clients: 0.4}",
}

_OBJECTIVES = {
    "compact": (MACHINES, "objective={name: compact, size: 4, normal: [normal]}"),
    "contrast": ("objective={name: contrast, frames: 12, size: 8}",),
    "identify": (
        MACHINES,
        "data.columns=[group]",
        "objective={name: identify, size: 4, machines: 4, normal: [normal]}",
    ),
    "multi_label": (CHORDS, "data.label_sets={}", "objective=multi_label"),
    "reconstruct": (MACHINES, "objective={name: reconstruct, size: 4, bins: 4, hidden: 16, normal: [normal]}"),
}

_TRANSFORMS = {
    "cutout": (*IMAGES, "data.transforms=[{name: cutout, size: 3}]"),
    "flip": (*IMAGES, "data.transforms=[flip]"),
    "gain": (UNNORMALISED, "data.transforms=[gain]"),
    "noise": ("data.transforms=[{name: noise, snr_db: [0, 10]}]",),
    "random_crop": ("data.transforms=[{name: random_crop, size: 12}]",),
    "reverberation": ("data.transforms=[{name: reverberation, seconds: [0.05, 0.2]}]",),
    "shift": ("data.transforms=[{name: shift, frames: 3}]",),
    "spec_augment": ("data.transforms=[spec_augment]",),
}

_DATA: dict[str, tuple[str, ...]] = {
    "plain": (),
    "dirichlet": ("data.partition={by: dirichlet, clients: 5, alpha: 0.5}",),
    "quantity": ("data.partition={by: quantity, clients: 5, alpha: 1.0}",),
    "classes": ("data.partition={by: classes, clients: 3, classes: 2}",),
    "iid": ("data.partition={by: iid, clients: 5}",),
    "shards of groups": ("data.partition={by: group, shards: 2}",),
    "minimum": ("data.partition={by: dirichlet, clients: 4, alpha: 0.5, minimum: 3}",),
    "segments": ("data.features.seconds=null", "data.segment={frames: 8, stride: 4, test_stride: 8}"),
    "statistics by group": ("data.features.normalise=group",),
    "statistics by client": ("data.features.normalise=client",),
    "statistics of the part": ("data.features.normalise=part",),
    "statistics by group with segments and columns": (
        "data.features={seconds: null, normalise: group}",
        "data.segment={frames: 8, stride: 4}",
        "data.columns=[group]",
    ),
    "noise": ("data.corrupt.noise={snr_db: 5, clients: 0.5}",),
    "wrong labels": ("data.corrupt.labels={rate: 0.5, clients: 0.5}",),
    "noise and wrong labels": ("data.corrupt={noise: {snr_db: 5, clients: 0.5}, labels: {rate: 0.5, clients: 2}}",),
    "canary clips": ("data.corrupt.canaries={clips: 12, clients: 0.5}", ROBUST),
    "unlabelled": ("data.unlabelled={keep: 0.4}",),
    "unlabelled by another partition": (
        "data.unlabelled={keep: 0.5, use: 0.5, partition: {by: dirichlet, clients: 6, alpha: 1.0}}",
    ),
    "pools": ("data.pools={low: {column: label, values: [tone0, tone1]}, high: {column: label, values: [tone2]}}",),
    "left out": ("data.leave_out=[tone2]",),
    "test of whole groups": ("data.split.test={by: group, values: [s0]}",),
    "test by fraction": ("data.split.test={by: clip, fraction: 0.3}",),
    "client tests": ("data.split.client_test={fraction: 0.3}",),
    "server validation": ("data.split.server_validation={fraction: 0.2}",),
    "client tests and validation by value": (
        "data.split={client_test: {by: label, values: [tone2]}, validation: {by: label, values: [tone1], others: 0.2}}",
        "data.partition={by: dirichlet, clients: 3, alpha: 1.0, minimum: 3}",
    ),
    "tests on what is trained on": ("data.split={test: null, as_published: {column: label, normal: [tone0, tone1]}}",),
    "clients that share clips": (
        f"data.partition={{by: table, file: {TESTS}/golden/clients.csv}}",
        "data.profile={room: {column: room}}",
        "data.split.validation=0",
    ),
    "profiles": ("data.profile={power: {values: [1, 2, 3]}}",),
    "sampling by profile": ("data.profile={power: {values: [1, 2, 3]}}", "train.clients={weight: power}"),
    "label sets": _OBJECTIVES["multi_label"],
    "images": IMAGES,
    "two views": (*VIEWS, "models.model.view=second"),
    "views that clients lack": (*VIEWS, "data.missing={second: 0.5}", "models.model.view=second"),
    "parts": ("data.parts={low: {speakers: 4}, high: {classes: 5, first: 10, speakers: 3}}", "train.cohort=1.0"),
    "parts with a common head": (
        "data.parts={low: {speakers: 4}, high: {classes: 5, first: 10, speakers: 3}}",
        "data.heads=common",
        "train.cohort=1.0",
    ),
    "other seed": ("run.seed=7",),
}

_FEATURES: dict[str, tuple[str, ...]] = {
    "kaldi": ("data.features={kind: kaldi, sample_rate: 8000, bands: 16, seconds: 0.25}",),
    "float16": ("data.features.dtype=float16",),
    "all of a clip": ("data.features.seconds=null", f"data.name={TESTS}/data/tiny_sets.py:Made", "data.uneven=true"),
}

_NETWORKS: dict[str, tuple[str, ...]] = {
    "crnn_lite": ("models.model=crnn_lite",),
    "cnn_small": (*IMAGES,),
    "split_cnn": ("models.model={name: split_cnn, filters: [4], groups: 2}",),
    "mlp": ("models.model=mlp",),
    "linear": ("models.model=linear",),
    "ssast": ("models.model={name: ssast_tiny, embedding: 12}",),
}

_TRAINING: dict[str, tuple[str, ...]] = {
    "batched clients": ("train.together=4", ROBUST),
    "by example": (
        "train.optimiser={private: {clip: 1.0, noise: 0.5}, momentum: 0.9}",
        "evaluate.clients=none",
        "privacy.key=seed",
    ),
    "adam": ("train.optimiser={name: adam, lr: 0.01}",),
    "two epochs": ("train.local_epochs=2",),
    "known tasks": ("method.tasks={name: known, by: group}",),
    "two tasks found": ("method.tasks={name: hdbscan}", "train.rounds=3", ROBUST),
    "groups by choice": ("train.groups={name: ifca, groups: 3}", ROBUST),
    "groups by splits": ("train.groups={name: cfl, eps_mean: 10, eps_max: 0}", ROBUST),
}


def cases() -> dict[str, Case]:
    """Return all cases by name."""
    return {
        **_make_method_cases(),
        **{
            f"rule {name}": Case(
                overrides=(f"method.rule={_RULES.get(name, name)}", *(_PRIVATE if name == "gaussian" else (ROBUST,)))
            )
            for name in registry.names("raydfl.rules")
            if name != "product_mean"  # it needs adapters
        },
        **{
            f"attack {name}": Case(
                overrides=(f"attack={_ATTACKS.get(name, f'{{name: {name}, clients: 0.4}}')}", ROBUST)
            )
            for name in registry.names("raydfl.attacks")
        },
        **{f"objective {name}": Case(overrides=overrides) for name, overrides in _OBJECTIVES.items()},
        **{f"transform {name}": Case(overrides=overrides) for name, overrides in _TRANSFORMS.items()},
        **{f"data {name}": Case(overrides=overrides) for name, overrides in _DATA.items()},
        **{f"features {name}": Case(overrides=overrides) for name, overrides in _FEATURES.items()},
        **{f"network {name}": Case(overrides=overrides) for name, overrides in _NETWORKS.items()},
        **{f"training {name}": Case(overrides=overrides) for name, overrides in _TRAINING.items()},
    }
