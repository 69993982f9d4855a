"""Arguments and options shared by several commands."""

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

File = Annotated[Path, typer.Argument(metavar="FILE", help="configuration file (YAML)", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="settings to override, e.g. train.rounds=50", show_default=False),
]


class TakesSettings(TyperCommand):
    """A command with KEY=VALUE arguments. It explains this form to users who write a setting as an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of the command."""
        options = [name for parameter in self.params for name in parameter.opts] + ["--help"]
        for word in args:
            name, equals, value = word.partition("=")
            is_setting = name.startswith("--") and name not in options and (equals or "." in name)
            # A near miss of an option, such as --quite=1, gets the usual message about unknown options.
            if is_setting and not difflib.get_close_matches(name, options):
                setting = f"{name.removeprefix('--')}={value or 'VALUE'}"
                raise ConfigError(f"There is no option {name}. Write settings without dashes, as key=value: {setting}")
        return super().parse_args(ctx, args)


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print only errors")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object per line, for scripts")]


@contextlib.contextmanager
def show_progress(quiet: bool, as_json: bool) -> Iterator[Progress]:
    """Show the progress of a command in the form selected by --quiet and --json."""
    from raydfl.runs import Progress

    if not as_json:
        with Progress("quiet" if quiet else "auto") as progress:
            yield progress
        return
    # Standard output carries only our events, so the output of libraries and Ray processes goes to standard error.
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
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into an InputError with the file's name and a remedy."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}. Choose another file.") from error


def find_run_dir(text: str) -> Path:
    """Return the folder of a run. A run at a URI is downloaded first."""
    if "://" not in text:
        return Path(text)
    from raydfl.engine.storage import local_run

    return local_run(text)


RunDir = Annotated[
    Path, typer.Argument(metavar="DIR", help="a run directory, or its URI", show_default=False, parser=find_run_dir)
]
Trust = Annotated[bool, typer.Option("--trust", help="approve and run the user code named in the run's configuration")]
