"""Generate the tables of options in docs/*.md. Their defaults and meanings come from the code.

``python tests/docs/option_tables.py`` writes these cells into the pages. The pages determine the rows and their order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from pages import PAGES

from raydfl import Attack, Config, Method, Objective, Transform, find_dataset
from raydfl.core import registry
from raydfl.core.options import Option, options_of, plain
from raydfl.core.settings import Settings
from raydfl.core.yaml import parse_yaml, to_yaml
from raydfl.data.dataset import dataset_names
from raydfl.data.features.file import FileFeatures
from raydfl.data.features.image import ImageFeatures
from raydfl.data.features.kaldi import KaldiFeatures
from raydfl.data.features.model import ModelFeatures
from raydfl.data.features.pretrained import PretrainedFeatures
from raydfl.engine.groups import GroupRule
from raydfl.experiments.settings import MetricSettings, PaperSettings, StudySettings
from raydfl.models._lora import Lora
from raydfl.rules import RULES
from raydfl.runs.report import PlateauSettings

_CELLS = re.compile(r"(?<!\\)\|")
_HEADERS = (["option", "default", "meaning"], ["option", "default", "source", "meaning"])
_OPTION = re.compile(r"\[?`([^`]+)`")
"""An option in the first cell, possibly a link."""


def list_settings_groups(model: type[Settings], place: str = "") -> dict[str, type[Settings]]:
    """Map the place of every group of settings to its class. A class with several places has the first one."""
    groups: dict[str, type[Settings]] = {place: model} if place else {}
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, Settings):
                inner = list_settings_groups(kind, f"{place}.{name}" if place else name)
                groups |= {key: cls for key, cls in inner.items() if cls not in groups.values()}
    return groups


def find_classes(page: str) -> dict[str, tuple[type, set[str]]]:
    """Map the headings of a page's option tables to the class of the options and to the options omitted by the table."""
    rooms: Mapping[str, dict[str, type]] = {
        "attacks.md": _find_all("raydfl.attacks", Attack, "attack"),
        "methods.md": _find_all("raydfl.methods", Method, "method")
        | _find_all("raydfl.engine.groups", GroupRule, "rule"),
        "objectives.md": _find_all("raydfl.objectives", Objective, "objective"),
        "transforms.md": _find_all("raydfl.data.transforms", Transform, "transform"),
    }
    classes: dict[str, tuple[type, set[str]]] = {name: (cls, set()) for name, cls in rooms.get(page, {}).items()}
    if page == "methods.md":
        classes = {name: (cls, {"rule"} if issubclass(cls, Method) else set()) for name, (cls, _) in classes.items()}
        classes |= {name: (rule, set()) for name, rule in RULES.items()}
    elif page == "attacks.md":
        common = {option.name for option in options_of(Attack)}
        classes = {name: (cls, common) for name, (cls, _) in classes.items()} | {
            "Attackers and rounds": (Attack, set())
        }
    elif page == "data.md":
        classes = {name: (find_dataset(name), set()) for name in dataset_names()}
        classes |= {heading: (cls, set()) for heading, cls in FEATURES.items()}
    elif page == "views.md":
        classes = {"Images": (ImageFeatures, set())}
    elif page == "sweeps.md":
        studies = {
            "The file": StudySettings,
            "metric": MetricSettings,
            "paper": PaperSettings,
            "plateau": PlateauSettings,
        }
        classes = {heading: (cls, set()) for heading, cls in studies.items()}
    elif page == "pretrained.md":
        classes = {"data.features of the kind pretrained": (PretrainedFeatures, set()), "Adapters": (Lora, set())}
    if page in ("configuration.md", "data.md", "views.md"):
        places = list_settings_groups(Config)
        for place, cls in places.items():
            inner = {name.rpartition(".")[2] for name in places if name.rpartition(".")[0] == place}
            if PAGE_OF_SETTINGS.get(place, PAGE_OF_SETTINGS.get(place.partition(".")[0])) == page:
                classes[place] = (cls, inner)
    return {heading: (cls, omitted) for heading, (cls, omitted) in classes.items() if _list_options(cls, omitted)}


def read_tables(text: str) -> dict[str, list[str]]:
    """Map each heading to the options in its tables, in order."""
    tables: dict[str, list[str]] = {}
    for heading, cells in _iterate_cells(text):
        if cells:
            tables.setdefault(heading, []).append(_find_option(cells))
    return tables


def fill_tables(page: Path) -> str:
    """Return the text of a page with the defaults and meanings of the code in its tables."""
    classes, lines = find_classes(page.name), []
    text = page.read_text(encoding="utf-8")
    for line, (heading, cells) in zip(text.splitlines(), _iterate_cells(text), strict=True):
        cls = classes.get(heading, (None, set()))[0]
        options = {} if cls is None or not cells else {option.name: option for option in options_of(cls)}
        if cls is not None and cells and (option := options.get(_find_option(cells))) is not None:
            source = f" {option.source} |" if option.source else ""
            line = f"| {cells[0]} | {_format_default(cls, option, cells[1])} |{source} {_escape(option.meaning)} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


FEATURES = {
    "Kaldi's filter bank": KaldiFeatures,
    "Features from a file": FileFeatures,
    "Features by a network of your own": ModelFeatures,
}
PAGE_OF_SETTINGS = {"data": "data.md", "data.views": "views.md"} | {
    group: "configuration.md" for group in Config.model_fields if group != "data"
}


def _find_all(room: str, base: type, kind: str) -> dict[str, type]:
    return {name: registry.find(room, name, base, kind) for name in registry.names(room)}


def _list_options(cls: type, omitted: set[str]) -> set[str]:
    return {option.name for option in options_of(cls)} - omitted


def _iterate_cells(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield for each line its heading and, for a row of a table of options, the row's cells."""
    heading, in_block, columns = "", False, 0
    for line in text.splitlines():
        in_block ^= line.startswith("```")
        if line.startswith("#") and not in_block:
            heading = line.lstrip("#").strip().replace("`", "")
        cells = [cell.strip() for cell in _CELLS.split(line)[1:-1]] if line.startswith("|") else []
        is_row = len(cells) == columns > 0 and _OPTION.match(cells[0]) is not None
        columns = len(cells) if cells in _HEADERS else columns if cells else 0
        yield heading, cells if is_row else []


def _find_option(cells: list[str]) -> str:
    match = _OPTION.match(cells[0])
    assert match is not None
    return match[1]


def _format_default(cls: type, option: Option, cell: str) -> str:
    """Return the cell of the default. A cell with an equal value keeps its spelling."""
    if option.required:
        return "required"
    default = option.default
    if issubclass(cls, Settings):  # a JSON schema lacks the results of factories
        value = cls.model_fields[option.name].get_default(call_default_factory=True)
        default = value.model_dump(mode="json", exclude_none=True) if isinstance(value, Settings) else plain(value)
    text = cell.strip("`").replace(r"\|", "|")
    if text != "required" and parse_yaml(text, option.name) == default:
        return cell
    return f"`{_escape(to_yaml(default, flow=True).strip())}`"


def _escape(text: str) -> str:
    return _CELLS.sub(r"\|", text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill_tables(page), encoding="utf-8")
