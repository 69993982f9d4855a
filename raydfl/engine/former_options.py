"""Translation of methods' options of earlier versions, and their values in digests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from raydfl.core import registry
from raydfl.core.errors import ConfigError
from raydfl.core.options import options_of
from raydfl.engine.settings import FineTuneSettings
from raydfl.methods import Method


def take_former_options(method: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Translate a method's options of earlier versions.

    ``tasks`` is now ``train.groups``. ``fine_tune_epochs`` and ``fine_tune_part`` are now ``evaluate.fine_tune``.

    Returns:
        The current name and options of the method, and the former options for the digest.
    """
    options, former = dict(method), dict[str, Any]()
    name = options.get("name")
    if not isinstance(name, str):
        return options, former
    cls = _find(name)
    own = {field.name for field in dataclasses.fields(cls)}
    if cls.fine_tuning:
        former = {"fine_tune_epochs": cls.fine_tuning, "fine_tune_part": "all"}
    for key in {"tasks", *former} - own:
        if key in options:
            former[key] = options.pop(key)
    if name == "fedmlac":
        former |= _take_form(options)
    elif name == "profila":
        former |= _take_readings(options, own)
    return options, former


def _find(name: str) -> type[Method]:
    return registry.find("raydfl.methods", name, Method, "method")


def _take_form(options: dict[str, Any]) -> dict[str, Any]:
    """Translate FedMLAC's ``plug_ce_weight`` into ``form``, in place.

    Raises:
        ConfigError: A value was invalid in earlier versions too.
    """
    form, weight = options.get("form", "literal"), options.pop("plug_ce_weight", None)
    if weight is not None:
        if form not in ("literal", "supervised") or type(weight) not in (int, float) or not weight >= 0:
            raise ConfigError(
                f"method.plug_ce_weight: {weight!r} with method.form={form!r}. The former option takes a number of at least 0, and "
                f"needs form literal or supervised. Set method.form=NUMBER instead"
            )
        options["form"] = weight
    elif not isinstance(form, str):
        form, weight = "literal", form
    return {"form": form, "plug_ce_weight": float(weight) if type(weight) is int else weight}


def _take_readings(options: dict[str, Any], own: set[str]) -> dict[str, Any]:
    """Translate ProFiLA's ``mode``, and move options of ``profila_as_run`` to that method, in place."""
    moved = {option.name: option.default for option in options_of(_find("profila_as_run")) if option.name not in own}
    mode = options.pop("mode", "normal")
    if mode not in ("normal", "as_run"):
        raise ConfigError(
            f"method.mode: {mode!r} is neither as_run nor normal. Set method.name=profila_as_run for as_run"
        )
    if mode == "normal" and moved.keys().isdisjoint(options):
        return {"mode": mode, **moved}
    options["name"] = "profila_as_run"
    if mode == "as_run":
        return {"mode": mode}
    share = options.get("anomalous_share", moved["anomalous_share"])
    options["anomalous_share"] = 0.0
    return {"mode": mode, "anomalous_share": share}


def find_former_tuning(method: Method, former: Mapping[str, Any]) -> FineTuneSettings:
    """Return a method's default fine-tuning, or the fine-tuning of its former options.

    Raises:
        ConfigError: A former option is out of range.
    """
    epochs, part = former.get("fine_tune_epochs", 0), former.get("fine_tune_part", "all")
    if type(epochs) is not int or epochs < 0:
        raise ConfigError(f"method.fine_tune_epochs: {epochs!r} is not a whole number of at least 0")
    head = getattr(method, "head", ())
    if part not in ("all", "head") or (part == "head" and epochs and not head):
        reason = "needs names of tensors in method.head" if part == "head" else "is neither all nor head"
        raise ConfigError(
            f"method.fine_tune_part: {part!r} {reason}. Set evaluate.fine_tune.part to names of tensors instead"
        )
    return FineTuneSettings(epochs=epochs, part=list(head) if part == "head" else [])
