"""The protocol of a study: the fields that make its results evidence, its controls, and the checks before the first run.

A study is **confirmatory** if its file sets ``difference``, ``controls``, ``plateau`` or ``tuned``, or ``exploratory: false``. Only
confirmatory studies draw conclusions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

from raydfl.core.errors import ConfigError, nearest
from raydfl.engine import LOCAL, POOLED

SEEDS = 5
"""Minimum number of repeats of a confirmatory study."""
MANY_SEEDS = 10
"""Number of repeats if differences spread by more than half of the difference of interest."""
TRIALS = 8
"""Minimum number of tuning trials per contestant."""
ControlName = Literal[
    "chance",
    "majority",
    "raw",
    "untrained",
    "local",
    "centralised",
    "fedavg",
    "fedavg_fine_tuned",
    "compute_matched",
    "known_groups",
]
CONTROLS: tuple[str, ...] = get_args(ControlName)
MEASURED = ("chance", "majority", "raw")
"""Controls without training. Every run measures them (:mod:`raydfl.controls`)."""
LABELS: Mapping[str, str] = {
    "untrained": "untrained",
    "local": "local only",
    "centralised": "centralised",
    "fedavg": "FedAvg",
    "fedavg_fine_tuned": "FedAvg, fine-tuned",
    "compute_matched": "compute-matched",
    "known_groups": "known groups",
}
"""Labels of the trained controls."""
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    # With the smallest normal float32 as learning rate, no step changes a weight.
    "untrained": {"train.rounds": 1, "train.optimiser.lr": 1.2e-38},
    "local": LOCAL,
    "centralised": POOLED,
    "fedavg": {"method": {"name": "fedavg"}},
    "fedavg_fine_tuned": {"method": {"name": "fedavg"}, "evaluate.fine_tune": {"epochs": 1}},
    "compute_matched": {},
    "known_groups": {"train.groups": {"name": "known"}},
}
"""Changes of the study's control, by control."""
_METRICS: Mapping[str, Mapping[str, Any]] = {"fedavg_fine_tuned": {"model": "personal"}}


def make_control_label(name: str, changes: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Make the settings of a trained control.

    Args:
        name: One of :data:`CONTROLS`.
        changes: The user's changes of the control's settings.
        base: Settings of the label that the study's ``control`` names.
    """
    settings = {**base, **_SETTINGS[name]}
    if name in _METRICS:
        settings["metric"] = {**dict(settings.get("metric", {})), **_METRICS[name]}
    return {**settings, **changes}


def is_untrained(labels: Collection[str]) -> bool:
    """Return whether the labels of a cell name the control without training."""
    return LABELS["untrained"] in labels


def drop_replaced(values: Mapping[str, Any], name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tuned settings without the paths of a control's own settings, such as the rate of an untrained network.

    Args:
        values: Tuned settings of the study's control, by path.
        name: One of :data:`CONTROLS`.
        changes: The user's changes of the control's settings.
    """
    own = (*_SETTINGS[name], *changes)
    return {key: value for key, value in values.items() if not any(f"{key}.".startswith(f"{path}.") for path in own)}


def read_controls(value: Any) -> dict[str, dict[str, Any]]:
    """Convert a list of names, or a mapping from names to changed settings, to a mapping.

    Raises:
        ConfigError: A name is unknown, or a control misses or must not have settings.
    """
    if isinstance(value, list):
        value = {str(name): {} for name in value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"controls is {value!r}, but must be a list of names: [chance, untrained, local].")
    controls = {}
    for name, changed in value.items():
        if name not in CONTROLS:
            raise ConfigError(f"controls: there is no control {name!r}. {nearest(str(name), CONTROLS)}")
        if not isinstance(changed, Mapping | None):
            raise ConfigError(f"controls.{name} is {changed!r}, but must be a group of settings.")
        changes = dict(changed or {})
        if name in MEASURED and changes:
            raise ConfigError(f"controls.{name} trains nothing, so it has no settings. Remove them.")
        if name == "compute_matched" and not changes:
            raise ConfigError(
                "controls.compute_matched needs settings with equal client steps for the control and its rivals: "
                "{compute_matched: {train.local_epochs: 4}}. The column client steps shows the result."
            )
        controls[str(name)] = changes
    return controls
