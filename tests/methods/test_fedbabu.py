"""FedBABU: a fixed head, and temporary fine-tuning in evaluations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers import final_state, known
from several_clients import BANDS, CLASSES
from torch import nn

from raydfl import run
from raydfl.core.errors import ConfigError
from raydfl.core.types import Client
from raydfl.engine.config import Config
from raydfl.methods.fedbabu import FedBABU
from raydfl.models.dense import MeanMLP
from raydfl.testing import assert_same_bits, read_tensors

Tiny = Callable[..., Config]


def build() -> dict[str, nn.Module]:
    return {"model": MeanMLP(BANDS, CLASSES, hidden=7)}


def test_fine_tuning_leaves_models_unchanged_and_the_server_evaluates_body_and_head(tiny: Tiny) -> None:
    common = ["train.rounds=2", "train.cohort=1.0"]
    outcome = run(tiny(*common, "evaluate.fine_tune={epochs: 2}", "run.name=tuned", method="fedbabu"))
    assert {"test model/accuracy", "validation model/accuracy", "validation personal/accuracy"} <= set(outcome.scores)
    assert not any("output" in name for name in final_state(outcome.run_dir).tensors["global"])
    assert_same_bits(
        known(tiny(*common, "evaluate.fine_tune={epochs: 0}", method="fedbabu")), read_tensors(outcome.run_dir)
    )


def test_a_missing_head_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"method.head: no tensor's name begins with 'model/top'\. Choose .* model/hidden"
    ):
        FedBABU(head=("model/top",)).init([Client("a", 0, 1)], [build()], np.random.default_rng(0))
