"""Call the command line in this process."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

from raydfl.cli.main import main
from raydfl.core.yaml import to_yaml
from raydfl.engine.config import Config

# Typer makes all commands anew in each call, which takes longer than most of what tests call.
typer.main.get_command = functools.cache(typer.main.get_command)


@dataclass(frozen=True)
class CommandResult:
    """The output and the exit code of a command."""

    code: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """Parse every line of standard output as JSON."""
        return [json.loads(line) for line in self.out.splitlines()]

    def refuses(self, *patterns: str) -> None:
        """Assert exit code 2, no traceback, and one message with all of these words."""
        assert self.code == 2, (self.out, self.err)
        assert self.err.startswith("error: "), self.err
        assert "Traceback" not in self.err
        for pattern in patterns:
            assert re.search(pattern, self.err, re.DOTALL), f"{pattern!r} is not in {self.err!r}"
        jargon = re.search(r"pydantic|value error|NoneType|dict\[|tuple\[|Errno", self.err, re.IGNORECASE)
        assert jargon is None, f"{jargon} in {self.err!r}"


class Raydfl:
    """``raydfl("run", file, "key=value")`` runs the command ``raydfl run file key=value``."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *arguments: object) -> CommandResult:
        self._capture.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out, err = self._capture.readouterr()
        return CommandResult(int(end.value.code or 0), out, err)


def write_config(config: Config, folder: Path) -> Path:
    """Write a configuration to a file."""
    path = folder / "experiment.yaml"
    path.write_text(to_yaml(config.model_dump(mode="json"), flow=False))
    return path
