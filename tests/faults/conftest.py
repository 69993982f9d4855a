"""The programs that make the tables of docs/faults.md are tested here: their folder has to be on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
