"""FedMLAC whose clients wait in the middle of a round for as long as a test wants."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from pydantic.dataclasses import dataclass

from raydfl.core.types import Update
from raydfl.methods.fedmlac import FedMLAC
from raydfl.training.step import Step

_MODEL = {"name": "crnn_tiny", "hidden": 8, "filters": [4]}
MODELS = f"models={json.dumps({'plugin': _MODEL, 'local': [_MODEL, {**_MODEL, 'hidden': 4}]})}"
"""For it, in a configuration."""


@dataclass(frozen=True, kw_only=True)
class Gated(FedMLAC):
    """While ``gate/hold-ROUND`` exists, clients of that round (counted from 1) wait; ``gate/at-ROUND-PID`` says where one
    does, and which GPU it was given."""

    gate: str = ""

    def local(self, step: Step) -> Update:
        number = step.round_index + 1
        hold = Path(self.gate) / f"hold-{number}"
        while self.gate and hold.exists():
            (Path(self.gate) / f"at-{number}-{os.getpid()}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
            time.sleep(0.02)
        if self.gate:
            time.sleep(0.25)  # as long as a call to an actor should be: else one actor would get all of a round at once
        return super().local(step)
