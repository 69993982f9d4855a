"""Generate the reference parts of the pages from the code: tables of options, and sections of methods, rules and data sets.

A page has a directive where the site shows the generated part:

- ``<!-- options -->``: table of the options of its heading. ``<!-- options: tasks=#groups-of-clients -->`` links an option.
- ``<!-- table: methods -->``: a row for each method, with the first line of its docstring.
- ``<!-- sections: ## methods -->``: a section for each method, with docstring and options, under headings of level 2.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence, Set
from types import MappingProxyType

from raydfl import Attack, Config, Method, Objective, Transform, find_dataset
from raydfl.cli.explain import explain_class
from raydfl.core import registry
from raydfl.core.options import Option, options_of, plain
from raydfl.core.settings import Settings
from raydfl.core.yaml import to_yaml
from raydfl.data.dataset import Card, Dataset, dataset_names
from raydfl.data.features.file import FileFeatures
from raydfl.data.features.image import ImageFeatures
from raydfl.data.features.kaldi import KaldiFeatures
from raydfl.data.features.model import ModelFeatures
from raydfl.data.features.pretrained import PretrainedFeatures
from raydfl.data.features.speech_embedding import SpeechEmbeddingFeatures
from raydfl.engine.groups import GroupRule
from raydfl.experiments.settings import MetricSettings, PaperSettings, StudySettings
from raydfl.models._lora import Lora
from raydfl.rules import RULES
from raydfl.runs.report import PlateauSettings

_CELLS = re.compile(r"(?<!\\)\|")
_OPTIONS = re.compile(r"<!-- options(?:: (?P<links>.+))? -->")
_SECTIONS = re.compile(r"<!-- (?:sections: (?P<level>#+)|table:) (?P<kind>[\w ]+) -->")
_PAGE = re.compile(r"docs/([\w-]+)\.md(?:#[\w-]+(?:\.[\w-]+)*)?")
_INDENT = "    "


def list_settings_groups(model: type[Settings], place: str = "") -> dict[str, type[Settings]]:
    """Map the place of every group of settings to its class. A class with several places has the first one."""
    groups: dict[str, type[Settings]] = {place: model} if place else {}
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, Settings):
                inner = list_settings_groups(kind, f"{place}.{name}" if place else name)
                groups |= {key: cls for key, cls in inner.items() if cls not in groups.values()}
    return groups


def find_kind(kind: str) -> dict[str, type]:
    """Map the names of a kind to their classes: methods, groups, rules, attacks, objectives, transforms or data sets."""
    if kind == "rules":
        return dict(RULES)
    if kind == "data sets":
        return {name: find_dataset(name) for name in dataset_names()}
    room, base = _ROOMS[kind]
    return {name: registry.find(room, name, base, kind) for name in registry.names(room)}


def find_classes(page: str) -> dict[str, tuple[type, set[str]]]:
    """Map the headings of a page's option tables to the class of the options and to the options omitted by the table."""
    classes: dict[str, tuple[type, set[str]]] = {
        name: (cls, {"rule"} if issubclass(cls, Method) else set())
        for kind in _KINDS_OF_PAGES.get(page, ())
        for name, cls in find_kind(kind).items()
    }
    if page == "attacks.md":
        common = {option.name for option in options_of(Attack)}
        classes = {name: (cls, common) for name, (cls, _) in classes.items()} | {
            "Attackers and rounds": (Attack, set())
        }
    elif page == "data.md":
        classes |= {heading: (cls, set()) for heading, cls in FEATURES.items()}
    elif page == "studies.md":
        studies = {
            "The file": StudySettings,
            "metric": MetricSettings,
            "paper": PaperSettings,
            "plateau": PlateauSettings,
        }
        classes = {heading: (cls, set()) for heading, cls in studies.items()}
    elif page == "pretrained.md":
        classes = {
            "A small encoder of speech": (SpeechEmbeddingFeatures, set()),
            "data.features of the kind pretrained": (PretrainedFeatures, set()),
            "Adapters": (Lora, set()),
        }
    if page in ("configuration.md", "data.md"):
        places = list_settings_groups(Config)
        for place, cls in places.items():
            inner = {name.rpartition(".")[2] for name in places if name.rpartition(".")[0] == place}
            if PAGE_OF_SETTINGS.get(place, PAGE_OF_SETTINGS.get(place.partition(".")[0])) == page:
                classes[place] = (cls, inner)
    return {
        heading: (cls, omitted)
        for heading, (cls, omitted) in classes.items()
        if _list_options(cls, omitted)
    }


def expand(page: str, text: str) -> str:
    """Return a page with the generated parts in place of its directives.

    Args:
        page: the file's name. It decides which classes its headings mean.
        text: the page as stored.

    Raises:
        ValueError: a heading with a directive has no options, or a link is for an unknown option.
    """
    lines: list[str] = []
    for line in text.splitlines():
        match = _SECTIONS.fullmatch(line)
        if match is None:
            lines.append(line)
        elif match["level"]:
            lines += _format_sections(match["level"], find_kind(match["kind"]))
        else:
            lines += _format_summary(find_kind(match["kind"]))
    return "\n".join(_fill_tables(page, lines)) + "\n"


def _fill_tables(page: str, lines: Sequence[str]) -> Iterator[str]:
    classes, heading, in_block = find_classes(page), "", False
    for line in lines:
        in_block ^= line.startswith("```")
        if line.startswith("#") and not in_block:
            heading = line.lstrip("#").strip().replace("`", "")
        match = _OPTIONS.fullmatch(line)
        if match is None or in_block:
            yield line
            continue
        if heading not in classes:
            raise ValueError(f"docs/{page}: nothing with the name {heading!r} has options")
        links = dict(pair.split("=", 1) for pair in (match["links"] or "").split())
        yield from format_table(*classes[heading], links)


def format_table(
    cls: type, omitted: Set[str] = frozenset(), links: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Return the lines of the table of a class's options.

    Args:
        cls: a dataclass or group of settings.
        omitted: options without a row.
        links: link target of an option's name.

    Raises:
        ValueError: a link is for an unknown option.
    """
    options = [option for option in options_of(cls) if option.name not in omitted]
    if unknown := links.keys() - {option.name for option in options}:
        raise ValueError(f"{cls.__name__} has no option {', '.join(sorted(unknown))}")
    with_source = any(option.source for option in options)
    header = ["option", "default", *(["source"] if with_source else []), "meaning"]
    rows = [header, ["---"] * len(header)]
    for option in options:
        name = (
            f"[`{option.name}`]({links[option.name]})"
            if option.name in links
            else f"`{option.name}`"
        )
        source = [option.source] if with_source else []
        rows.append([name, _format_default(cls, option), *source, _escape(option.meaning)])
    return [f"| {' | '.join(cells)} |" for cells in rows]


def _format_summary(classes: Mapping[str, type]) -> Iterator[str]:
    """Yield the rows of a table: the name of each class, and the first line of its explanation."""
    yield from ("| name | |", "|---|---|")
    for name, cls in sorted(classes.items()):
        yield f"| [`{name}`](#{name}) | {_escape(explain_class(cls).partition(chr(10))[0])} |"


def _format_sections(level: str, classes: Mapping[str, type]) -> Iterator[str]:
    """Yield the lines of a section for each class, in alphabetical order."""
    for name, cls in sorted(classes.items()):
        yield from (f"{level} {name}", "", *format_docstrings(cls))
        if issubclass(cls, Method):
            yield from (_describe_models(cls), "")
        elif issubclass(cls, Dataset):
            yield from _describe_card(cls.card)
        if _list_options(cls, {"rule"} if issubclass(cls, Method) else set()):
            yield from ("<!-- options -->", "")


def format_docstrings(cls: type) -> list[str]:
    """Format the docstrings of a class as Markdown. Indented lines become a block: commands, a configuration, or text."""
    lines: list[str] = []
    is_block = False
    for line in explain_class(cls).splitlines():
        is_command_after_text = line.startswith(f"{_INDENT}raydfl ") and lines[-1:] == [""]
        if is_block and line and (not line.startswith(_INDENT) or is_command_after_text):
            is_block = False
            lines[_end_of_text(lines) :] = ["```", ""]
        if not is_block and line.startswith(_INDENT):
            is_block = True
            lines.append(f"```{_find_language(line)}")
        lines.append(line.removeprefix(_INDENT) if is_block else _format_text(line))
    end = _end_of_text(lines)
    return [*lines[:end], *(["```"] if is_block else []), ""]


def _end_of_text(lines: Sequence[str]) -> int:
    """Return the number of lines without the empty ones at the end."""
    return next((n for n in range(len(lines), 0, -1) if lines[n - 1]), 0)


def _find_language(line: str) -> str:
    word = line.split(maxsplit=1)[0]
    if word == "raydfl":
        return "bash"
    return (
        "yaml" if word.removesuffix(":") in Config.model_fields and word.endswith(":") else "text"
    )


def _format_text(line: str) -> str:
    """Format a line of a docstring: names of pages become links."""
    return _PAGE.sub(lambda match: f"[{match[1]}]({match[0].removeprefix('docs/')})", line)


def _describe_card(card: Card) -> Iterator[str]:
    facts = {"layout": card.layout, "licence": card.licence, "source": card.url}
    lines = (
        line
        for name, text in facts.items()
        if text
        for line in textwrap.wrap(
            f"{name:<9}{text}", 100, subsequent_indent=" " * 9, break_long_words=False
        )
    )
    yield from ("```text", *lines, "```", "")


def _describe_models(cls: type[Method]) -> str:
    models = ", ".join(f"`{name}` (`{architecture}`)" for name, architecture in cls.models.items())
    return f"{'Models' if len(cls.models) > 1 else 'Model'}: {models}."


_ROOMS: dict[str, tuple[str, type]] = {
    "methods": ("raydfl.methods", Method),
    "groups": ("raydfl.engine.groups", GroupRule),
    "attacks": ("raydfl.attacks", Attack),
    "objectives": ("raydfl.objectives", Objective),
    "transforms": ("raydfl.data.transforms", Transform),
}
_KINDS_OF_PAGES = {
    "methods.md": ("methods", "groups", "rules"),
    "datasets.md": ("data sets",),
    "attacks.md": ("attacks",),
    "objectives.md": ("objectives",),
    "data.md": ("transforms",),
}
FEATURES = {
    "Images": ImageFeatures,
    "Kaldi's filter bank": KaldiFeatures,
    "Features from a file": FileFeatures,
    "Features by a network of your own": ModelFeatures,
}
PAGE_OF_SETTINGS = {"data": "data.md"} | {
    group: "configuration.md" for group in Config.model_fields if group != "data"
}


def _list_options(cls: type, omitted: set[str]) -> set[str]:
    return {option.name for option in options_of(cls)} - omitted


def _format_default(cls: type, option: Option) -> str:
    """Return the cell of the default."""
    if option.required:
        return "required"
    default = option.default
    if issubclass(cls, Settings):  # a JSON schema lacks the results of factories
        value = cls.model_fields[option.name].get_default(call_default_factory=True)
        default = (
            value.model_dump(mode="json", exclude_none=True)
            if isinstance(value, Settings)
            else plain(value)
        )
    return f"`{_escape(to_yaml(default, flow=True).strip())}`"


def _escape(text: str) -> str:
    return _CELLS.sub(r"\|", text)
