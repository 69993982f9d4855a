"""Unusable user methods, an unreachable tracking server, and missing resources."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import CommandResult, Raydfl, write_config

from raydfl.engine.config import Config

Tiny = Callable[..., Config]

METHOD = "from raydfl import Method, Rule\nfrom torch import nn\n\n\n"


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (
            "def f(:\n    pass\n",
            "Mine",
            r"mine.py:Mine' cannot be imported: SyntaxError: invalid syntax \(mine.py, line 1\)",
        ),
        (
            "import nowhere\n",
            "Mine",
            "mine.py:Mine' cannot be imported: ModuleNotFoundError: No module named 'nowhere'",
        ),
        ("raise RuntimeError('no')\n", "Mine", "mine.py:Mine' cannot be imported: RuntimeError: no"),
        (METHOD + "class Mine(Method):\n    pass\n", "Mime", "mine.py has no 'Mime'. Did you mean 'Mine'?"),
        (
            METHOD + "class Mine:\n    pass\n",
            "Mine",
            r"method '.*mine.py:Mine' is not a subclass of raydfl.Method",
        ),
        (METHOD + "Mine = 5\n", "Mine", r"is not a subclass of raydfl.Method"),
        (METHOD + "class Mine(Method):\n    models = {}\n", "Mine", "models: .*mine.py:Mine has no model 'model'"),
    ],
)
def test_unusable_method_files_are_rejected(
    raydfl: Raydfl, tiny: Tiny, tmp_path: Path, source: str, name: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(source)
    raydfl("run", write_config(tiny(), tmp_path), f"method={{name: '{tmp_path}/mine.py:{name}'}}").refuses(message)


def test_missing_files_and_modules_are_reported(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    file = write_config(tiny(), tmp_path)
    raydfl("run", file, f"method.name={tmp_path}/gone.py:Mine").refuses(
        f"gone.py:Mine': there is no file {tmp_path}/gone.py"
    )
    raydfl("run", file, "method.name=no_such_module:Mine").refuses(
        "'no_such_module:Mine' cannot be imported: ModuleNotFoundError"
    )
    raydfl("run", file, f"data={{name: {tmp_path}/gone.py:Set}}").refuses("there is no file .*gone.py")
    raydfl("run", file, f"models.model={tmp_path}/gone.py:Net").refuses("there is no file .*gone.py")
    raydfl("run", file, f"method.rule={tmp_path}/gone.py:Rule").refuses("there is no file .*gone.py")


def test_options_of_user_classes_are_checked(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        METHOD + "from dataclasses import dataclass\n\n\n@dataclass(frozen=True, kw_only=True)\nclass Mine(Method):\n"
        "    strength: float = 1.0\n\n\nclass Net(nn.Module):\n    def __init__(self, inputs, classes, width: int = 3):\n"
        "        super().__init__()\n"
    )
    file = write_config(tiny(), tmp_path)
    mine = f"method.name={tmp_path}/mine.py:Mine"
    raydfl("run", file, mine, "method.strenght=2").refuses(
        "method: unknown key 'strenght' for Mine. Did you mean 'strength'?"
    )
    raydfl("run", file, mine, "method.strength=strong").refuses("method.strength: Input should be a valid number")
    net = f"models.model={{name: '{tmp_path}/mine.py:Net'}}"
    raydfl("run", file, net, "models.model.widht=2").refuses("unknown option 'widht'. Did you mean 'width'?")
    raydfl("run", file, net, "models.model.width=wide").refuses("mine.py:Net.width: Input should be a valid integer")


def test_a_failing_user_network_is_reported(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self, inputs, classes):\n        super().__init__()\n"
        "        self.layer = nn.Linear(inputs, -1)\n"
    )
    output = raydfl("run", write_config(tiny(f"models.model={tmp_path}/net.py:Net"), tmp_path))
    output.refuses(
        "models.model: .*net.py:Net cannot be built: RuntimeError: Trying to create tensor with negative dimension"
    )


NETWORK = (
    "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self, inputs, classes):\n"
    "        super().__init__()\n        self.output = nn.Linear(inputs, classes)\n\n"
    "    def forward(self, x, lengths=None):\n        return self.output(x.mean(dim=1))\n"
)


@pytest.mark.parametrize(
    ("wrong", "messages"),
    [
        (
            ("(inputs, classes)\n\n", "(inputs, classes + 3)\n\n"),
            [r"a tensor of shape \[2, 6\] .*net.py:10", r"shape \[2, 3\]"],
        ),
        (("x.mean(dim=1))", "x)"), [r"a tensor of shape \[2, \d+, 3\]"]),
        (("x.mean(dim=1))", "x.mean(dim=1)), lengths"), [r"returns a tuple .*net.py:10"]),
        (("x, lengths=None", "x"), [r"TypeError: .* \(at .*net.py:10\)", r"forward\(x, lengths\)"]),
        (("x.mean(dim=1)", "x.mean(dim=1).view(-1, 5)"), [r"RuntimeError: .* \(at .*net.py:11\)"]),
        (("x.mean(dim=1))", "x.mean(dim=1) / 0)"), [r"not finite.*net.py:10"]),
        (
            ("nn.Linear(inputs, classes)", "nn.LazyLinear(classes)"),
            [r"the shape of 'output.weight' is unknown", "lazy"],
        ),
    ],
)
def test_an_unusable_network_is_rejected_before_the_first_round(
    raydfl: Raydfl, tiny: Tiny, tmp_path: Path, wrong: tuple[str, str], messages: list[str]
) -> None:
    (tmp_path / "net.py").write_text(NETWORK.replace(*wrong))
    assert wrong[0] in NETWORK
    raydfl("run", write_config(tiny(f"models.model={tmp_path}/net.py:Net"), tmp_path)).refuses(
        r"models.model: .*net.py:Net", *messages
    )
    assert not (tmp_path / "runs" / "tiny").exists()


def test_a_model_may_be_a_part_of_a_classifier(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NETWORK.replace("(inputs, classes)\n\n", "(inputs, 5)\n\n"))
    parts = (
        "import torch\nfrom raydfl import Method\n\n\nclass Parts(Method):\n"
        "    models = {'model': 'crnn_tiny', 'head': 'crnn_tiny'}\n\n"
        "    def build(self, models):\n        built = super().build(models)\n"
        "        return {'model': built['model'], 'head': torch.nn.Linear(5, models[0].classes)}\n\n"
        "    def loss(self, step, batch):\n        return step.models['head'](step.models['model'](batch.x)).square().mean()\n\n"
        "    def evaluate(self, step, examples, batch_size):\n        return {}\n"
    )
    file = write_config(tiny("train.rounds=1"), tmp_path)
    settings = [
        f"method={{name: '{tmp_path}/parts.py:Parts'}}",
        f"models={{model: '{tmp_path}/net.py:Net', head: crnn_tiny}}",
    ]
    (tmp_path / "parts.py").write_text(parts)
    raydfl("run", file, *settings).refuses(r"models.model: .* \[2, 5\]", "the method's class variable partial")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "parts.py").write_text(parts + "\n    partial = ('model', 'head')\n")
    settings[0] = f"method={{name: '{tmp_path}/more/parts.py:Parts'}}"
    done = raydfl("run", file, *settings)
    assert done.code == 0, done.err


def test_a_tensor_with_a_wrong_shape_is_never_cut(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(
        METHOD
        + "class Wide(Method):\n    def init(self, clients, models, rng):\n        state = super().init(clients, models, rng)\n"
        "        for name, tensor in state.tensors['global'].items():\n"
        "            state.tensors['global'][name] = tensor.repeat(2, *[1] * (tensor.dim() - 1))\n        return state\n"
    )
    output = raydfl("run", write_config(tiny(), tmp_path), f"method={{name: '{tmp_path}/wide.py:Wide'}}")
    output.refuses(
        r"client 's\d+', round 1",
        r"'convolutions.0.weight' of model 'model' has shape \[8, 16, 3\], but the network expects \[4, 16, 3\]",
    )


def test_an_unreachable_tracking_server_is_reported(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    file = write_config(tiny(), tmp_path)
    output = raydfl("run", file, "track={mlflow: true, uri: 'http://anna:secret@127.0.0.1:9'}")
    output.refuses(
        r"MLflow at http://\*\*\*@127.0.0.1:9 cannot be used: no server answers",
        "Start the server or correct track.uri, or set track.mlflow=false",
    )
    assert "secret" not in output.err
    assert raydfl("run", file).code == 0  # the run directory is complete


def test_json_output_stays_valid_after_errors(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    file = write_config(tiny(), tmp_path)
    for wrong in ("train.cohort=9", "data.partition={by: iid, clients: 999}", "train.rounds=0"):
        output = raydfl("run", file, wrong, "--json")
        output.refuses("train|data")
        for line in output.out.splitlines():
            json.loads(line)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_missing_resources_of_the_cluster_are_reported(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    """The message has required and available numbers. The session's Ray has 4 CPUs and 1 GPU."""
    file = write_config(tiny(), tmp_path)
    raydfl("run", file, "ray.actors=8").refuses(
        "8 client actors with 1 CPU each need 8 CPU, but the cluster has 4. Lower ray.actors or ray.cpus"
    )
    gpus = raydfl("run", file, "ray.actors=3", "ray.gpus=0.5")
    gpus.refuses("3 client actors with 0.5 GPU each need 1.5 GPU, but the cluster has 1. Lower ray.actors or ray.gpus")
    own = raydfl("run", file, "ray.actors=per_client")
    own.refuses("6 client actors with 1 CPU each need 6 CPU, but the cluster has 4")
    assert raydfl("run", file, "ray.actors=2").code == 0


@pytest.mark.slow
def test_a_missing_cluster_is_reported(tiny: Tiny, tmp_path: Path) -> None:
    """Use a separate process, because this process may be connected to Ray."""
    command = [
        sys.executable,
        "-m",
        "raydfl",
        "run",
        write_config(tiny(), tmp_path),
        "ray.actors=1",
        "ray.address=127.0.0.1:1",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    output = CommandResult(ended.returncode, ended.stdout, ended.stderr)
    output.refuses(
        "cannot reach the Ray cluster at 127.0.0.1:1: Connection refused", "Check the address", "or set ray.actors=0"
    )
