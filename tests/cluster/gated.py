"""FedMLAC with clients that a test can pause in the middle of a round."""

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
    """FedMLAC whose clients wait while ``gate/hold-ROUND`` exists. Rounds are counted from 1.

    A waiting client writes its GPU to ``gate/at-ROUND-PID``."""

    gate: str = ""

    def local(self, step: Step) -> Update:
        number = step.round_index + 1
        hold = Path(self.gate) / f"hold-{number}"
        while self.gate and hold.exists():
            (Path(self.gate) / f"at-{number}-{os.getpid()}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
            time.sleep(0.02)
        if self.gate:
            time.sleep(0.25)  # the target length of a call to an actor: otherwise one actor would get the whole round
        return super().local(step)
