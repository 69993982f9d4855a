"""Arguments and options that several commands have."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from raydfl.core.errors import ConfigError, InputError

if TYPE_CHECKING:
    from raydfl.runs import Progress

File = Annotated[Path, typer.Argument(metavar="FILE", help="the configuration, a YAML file", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="settings to change, e.g. train.rounds=50", show_default=False),
]


class TakesSettings(TyperCommand):
    """A command with KEY=VALUE arguments, which says so to users who write a setting as an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words behind the command."""
        options = [name for parameter in self.params for name in parameter.opts] + ["--help"]
        for word in args:
            name, equals, value = word.partition("=")
            written = name.startswith("--") and name not in options and (equals or "." in name)
            if written and not difflib.get_close_matches(name, options):
                setting = f"{name.removeprefix('--')}={value or 'VALUE'}"
                raise ConfigError(
                    f"there is no option {name}; settings are given without dashes, as key=value: {setting}"
                )
        return super().parse_args(ctx, args)


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print errors only")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object a line, for machines")]


@contextlib.contextmanager
def progress_of(quiet: bool, as_json: bool) -> Iterator[Progress]:
    """Show how a command gets on, as the options --quiet and --json say."""
    from raydfl.runs import Progress

    if not as_json:
        with Progress("quiet" if quiet else "auto") as progress:
            yield progress
        return
    # Standard output is for our events alone: what libraries and Ray's processes print goes to standard error.
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(output), "w") as events, Progress("json", events) as progress:
            yield progress
    finally:
        sys.stdout.flush()
        os.dup2(output, 1)
        os.close(output)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a file that cannot be written into an error that names it."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}; name another file") from error
