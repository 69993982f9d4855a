"""The resolved configuration as commented YAML: every field with its meaning, unit and range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from raydfl.config import Config, describe_field, describe_options
from raydfl.data.dataset import find_dataset
from raydfl.settings import Settings


def explain_config(config: Config) -> str:
    """YAML that ``raydfl run`` accepts, each field followed by a comment.

    >>> "# communication rounds" in explain_config(...)  # doctest: +SKIP
    True
    """
    lines: list[str] = []
    values = config.model_dump(mode="json")
    for name, field in Config.model_fields.items():
        value = values[name]
        annotation = field.annotation
        if name == "method":
            options = {key: about for key, _, about in describe_options(type(config.build_method()))}
            defaults = {key: default for key, default, _ in describe_options(type(config.build_method()))}
            _group(lines, name, {"name": value["name"], **defaults, **value}, {"name": "which method", **options}, 0)
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            _settings(lines, name, annotation, value, 0)
        else:
            shown = value
            if name == "models":
                shown = {model: _plain(choices) for model, choices in config.model_choices().items()}
            lines.append(f"# {field.description}")
            lines += yaml.safe_dump({name: shown}, sort_keys=False).rstrip().splitlines()
    return "\n".join(lines)


def _plain(choices: list[tuple[str, dict[str, Any]]]) -> Any:
    items = [{"name": name, **options} if options else name for name, options in choices]
    return items[0] if len(items) == 1 else items


def _settings(
    lines: list[str], name: str, model: type[BaseModel], values: Mapping[str, Any] | None, depth: int
) -> None:
    if values is None:
        lines.append(f"{'  ' * depth}{name}: null")
        return
    lines.append(f"{'  ' * depth}{name}:")
    properties = model.model_json_schema().get("properties", {})
    options: dict[str, str] = {}
    if name == "data":
        options = {key: about for key, _, about in describe_options(find_dataset(str(values["name"])))}
    for key, value in values.items():
        field = model.model_fields.get(key)
        inner = _settings_class(field.annotation) if field is not None else None
        if inner is not None and isinstance(value, Mapping):
            _settings(lines, key, inner, value, depth + 1)
        else:
            about = describe_field(properties[key]) if key in properties else options.get(key, "")
            _line(lines, key, value, about, depth + 1)


def _settings_class(annotation: Any) -> type[BaseModel] | None:
    """The group of settings that a field holds, also where it may be null."""
    for part in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(part, type) and issubclass(part, Settings):
            return part
    return None


def _group(lines: list[str], name: str, values: Mapping[str, Any], about: Mapping[str, str], depth: int) -> None:
    lines.append(f"{'  ' * depth}{name}:")
    for key, value in values.items():
        _line(lines, key, value, about.get(key, ""), depth + 1)


def _line(lines: list[str], key: str, value: Any, about: str, depth: int) -> None:
    text = yaml.safe_dump({key: value}, sort_keys=False, default_flow_style=None, width=1000).rstrip().splitlines()
    for number, line in enumerate(text):
        comment = f"  # {about}" if about and number == 0 else ""
        lines.append(f"{'  ' * depth}{line}{comment}")
