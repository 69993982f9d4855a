"""Settings of a tiny federation that trains in a tenth of a second, for every method."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent

TINY: dict[str, Any] = {
    "method": {"name": "fedavg"},
    "models": {"model": {"name": "crnn_tiny", "hidden": 8, "filters": [4]}},
    "data": {
        "name": f"{TESTS / 'tones.py'}:Tones",
        "features": {"sample_rate": 8000, "bands": 16, "window_ms": 25, "hop_ms": 10, "seconds": 0.25},
        "partition": {"by": "group"},
        "split": {"validation": 0.2},
    },
    "train": {"rounds": 3, "cohort": 0.5, "batch_size": 8, "optimiser": {"lr": 0.1}},
    "evaluate": {"every": 1, "client_test_clips": 10},
    "ray": {"actors": 0},
    "track": {"mlflow": False},
    "run": {"seed": 1, "name": "tiny"},
}

FEDMLAC_MODELS = {
    "plugin": TINY["models"]["model"],
    "local": [TINY["models"]["model"], {"name": "crnn_tiny", "hidden": 4, "filters": [4]}],
}
OF_VIEWS = {
    "audio": TINY["models"]["model"],
    "video": {"name": "crnn_tiny", "hidden": 4, "filters": [4]},
    "fusion": {"name": "fusion", "hidden": 4},
}
TINY_METHOD = {
    "fedala": {"start_epochs": 2},
    "fedgen": {"noise": 4, "hidden": 8, "server_steps": 5, "server_batch": 8},
    "fedrep": {"head_epochs": 2},
    "pfedme": {"lam": 1.0, "personal_steps": 2},
    "profila_as_run": {"anomalous_share": 0.0},
}
COMPACT = {"name": "compact", "size": 4, "normal": ["tone0"]}
TINY_OBJECTIVE = {"profila": COMPACT, "profila_as_run": COMPACT}
TINY_DATA = {"fedstar": {"unlabelled": {"keep": 0.4}}}
TINY_MODELS = {
    "fedbn": {"model": {"name": "split_cnn", "filters": [4], "groups": 2}},
    "fedmlac": FEDMLAC_MODELS,
    f"{TESTS}/extra_methods.py:Slow": FEDMLAC_MODELS,
    **dict.fromkeys(("multifl", "unifl", "harmony", "modality_mirror"), OF_VIEWS),
}


def tiny_values(method: str = "fedavg") -> dict[str, Any]:
    """Return the values of a configuration with this method, without folders."""
    values = copy.deepcopy(TINY)
    values["method"] = {"name": method, **TINY_METHOD.get(method, {})}
    values["models"] = copy.deepcopy(TINY_MODELS.get(method, TINY["models"]))
    if method in TINY_OBJECTIVE:
        values["objective"] = copy.deepcopy(TINY_OBJECTIVE[method])
    values["data"].update(TINY_DATA.get(method, {}))
    return values
