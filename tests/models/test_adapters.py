"""LoRA adapters: oracles are peft's own model, the bytes of a round, and the encoder without adapters."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from encoders import LAYERS, WIDTH, needs_transformers, reference, write_encoder
from helpers import finish_in
from safetensors.torch import load_file
from torch import Tensor

import raydfl
from raydfl import load_model, read_rows
from raydfl.core.errors import ConfigError, InputError
from raydfl.core.pretrained import Encoder, read_encoder_folder
from raydfl.core.registry import names
from raydfl.core.types import Batch, ModelSpec, Update
from raydfl.engine.config import Config, load_config
from raydfl.engine.storage.folder import final_state
from raydfl.engine.worker import Worker
from raydfl.methods import Method
from raydfl.models import build_model, fit_width, make_cuts, narrow
from raydfl.rules import Aggregate, WeightedMean
from raydfl.runs.folder import create
from raydfl.runs.inference import export_encoder, export_model
from raydfl.runs.progress import Progress
from raydfl.testing import start_server
from raydfl.training import Step

pytestmark = needs_transformers
pytest.importorskip("peft")
Tiny = Callable[..., Config]
JOBS = Path(__file__).parents[2] / "jobs"
RANK, AFTER, CLASSES, CLIENTS = 4, 1, 3, 3
ADAPTED = (LAYERS - AFTER) * 2
"""Number of adapters: q_proj and v_proj of the layers after the features."""
HEAD = WIDTH * CLASSES + CLASSES
ADAPTERS = ADAPTED * RANK * 2 * WIDTH
"""Weights of all adapters, A and B."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("encoders")
    return lambda kind: base / kind if (base / kind).exists() else write_encoder(base / kind, kind)


def configure(tiny: Tiny, folder: Path, *overrides: str, lora: str = f"rank: {RANK}", method: str = "fedavg") -> Config:
    """Configure a tiny run with adapters on the layers after the cached tokens."""
    seconds = "" if "masked" in folder.name else ", seconds: 0.2"
    options = f"folder: {folder}, after: {AFTER}"
    return tiny(
        f"data.features={{kind: pretrained, {options}{seconds}}}",
        f"models.model={{name: pretrained, {options}{', lora: {' + lora + '}' if lora else ''}}}",
        "train.rounds=1",
        f"data.speakers={CLIENTS}",
        "train.cohort=1.0",
        "evaluate.every=9",
        *overrides,
        method=method,
    )


def make_spec(folder: Path, after: int | None = AFTER, **lora: Any) -> ModelSpec:
    inputs = 1 if after is None else WIDTH
    options = {"folder": str(folder), "after": after, "lora": tuple(sorted({"rank": RANK, **lora}.items()))}
    return ModelSpec("model", "pretrained", inputs, CLASSES, tuple(sorted(options.items())))


def train_run(config: Config, name: str = "tiny") -> tuple[Path, dict[str, Tensor]]:
    """Train a run and return its folder and the server's tensors."""
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    folder = create(config, Progress("quiet"))
    finish_in(folder, config)
    return folder, dict(final_state(folder).tensors["global"])


def read_values(run: Path, metric: str) -> list[float]:
    return [row["value"] for row in read_rows(run).to_pylist() if row["metric"] == metric and not row["client"]]


def randomise_adapters(network: torch.nn.Module) -> None:
    """Set B to random values, so that adapters have an effect."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))


def test_the_job_for_librispeech_runs_on_tiny_files_in_its_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two speakers train, and the third is the test. The sentences have eight units."""
    monkeypatch.setenv("RAYDFL_DATA", str(tmp_path))
    write_encoder(tmp_path / "wav2vec2-base", "wav2vec2")
    for subset, speaker in (("train-clean-100", 19), ("train-clean-100", 26), ("test-clean", 61)):
        folder = tmp_path / "LibriSpeech" / subset / str(speaker) / "7"
        folder.mkdir(parents=True)
        for number in range(2):
            noise = np.random.default_rng(speaker + number).normal(size=8000)
            soundfile.write(folder / f"{speaker}-7-000{number}.flac", noise / 10, 16000)
        (folder / f"{speaker}-7.trans.txt").write_text(f"{speaker}-7-0000 IT'S A CAT\n{speaker}-7-0001 A TEA\n")
    small = {"train.rounds": 1, "train.cohort": 1.0, "train.precision": "float32", "evaluate.every": 1}
    config = load_config(
        JOBS / "transcribe_adapters.yaml",
        [
            *(f"{name}={value}" for name, value in small.items()),
            *("ray.actors=0", "ray.gpus=0", "track.mlflow=false"),
            *(f"run.dir={tmp_path / 'runs'}", f"data.cache={tmp_path / 'cache'}"),
        ],
    )
    folder, state = train_run(config)
    units, adapters = len("it's ace") + 1, LAYERS * 2 * 8 * 2 * WIDTH
    assert sum(tensor.numel() for tensor in state.values()) == adapters + (WIDTH + 1) * units
    assert len(read_values(folder, "model/cer")) == 1
    pytest.importorskip("onnxruntime")
    assert export_model(folder).difference < 1e-4  # of any length, because features.seconds is null


SENT = {
    "fedavg": ADAPTERS + HEAD,
    "fedprox": ADAPTERS + HEAD,
    "fedadam": ADAPTERS + HEAD,
    "ditto": ADAPTERS + HEAD,
    "scaffold": 2 * (ADAPTERS + HEAD),  # with the control variates
    "fedper": ADAPTERS,  # the head is personal
    "fedbabu": ADAPTERS,  # the head is fixed
    "feddrop": ADAPTERS * 3 // 4 + HEAD,  # three of four ranks
}
"""Weights that a client sends, by method."""


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        pytest.param(
            kind, method, marks=() if method == "fedavg" or (kind, method) == ("ast", "feddrop") else pytest.mark.slow
        )
        for kind in ("wav2vec2", "hubert", "ast", "whisper")
        for method in SENT
    ],
)
def test_messages_and_records_hold_adapters_and_head_only(
    tiny: Tiny, folders: Any, kind: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the bytes of a round, and search messages, commits and private state for the frozen layers."""
    messages: list[bytes] = []
    carry_out = Worker.carry_out

    def watch(self: Worker, group: Any, broadcast: Any, *arguments: Any) -> Any:
        replies = list(carry_out(self, group, broadcast, *arguments))
        messages.append(pickle.dumps((group, broadcast, replies), protocol=5))
        return replies

    monkeypatch.setattr(Worker, "carry_out", watch)
    config = configure(tiny, folders(kind), method=method)
    run, tensors = train_run(config)
    assert read_values(run, "bytes_up") == [CLIENTS * 4 * SENT[method]]
    network = build_model(make_spec(folders(kind)))
    frozen = [value for value in network.parameters() if not value.requires_grad and value.numel() > WIDTH]
    assert len(frozen) > 10
    files = [file.read_bytes() for file in run.rglob("*") if file.is_file()]
    assert messages
    for content in (*messages, *files):
        assert not any(value.detach().numpy().tobytes()[:40] in content for value in frozen)
    # The search would find them: the server's tensors are stored as they are.
    trained = next(value for name, value in tensors.items() if "lora_B" in name).numpy().tobytes()[:40]
    assert any(trained in content for content in files)


def test_personal_adapters_stay_with_the_client(tiny: Tiny, folders: Any) -> None:
    run, tensors = train_run(configure(tiny, folders("hubert"), "method.personal=[lora]", method="fedper"))
    assert tensors.keys() == {"model/output.weight", "model/output.bias"}
    assert read_values(run, "bytes_up") == [CLIENTS * 4 * HEAD]
    with pytest.raises(ConfigError, match=r"method\.personal: no tensor's name begins with 'lore'"):
        start_server(configure(tiny, folders("hubert"), "method.personal=[lore]", "run.name=wrong", method="fedper"))


OPTIONS = {
    "trimmed_mean": "{name: trimmed_mean, trim: 0.2}",
    "norm_clipping": "{name: norm_clipping, norm: 0.1}",
    "gaussian": "{name: gaussian, clip: 1.0, noise: 0.5}",
    "backdoor": "{name: backdoor, target: tone0}",
}
"""Rules and attacks with required options."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        *(f"method.rule={name}" for name in names("raydfl.rules")),
        *(f"attack={name}" for name in names("raydfl.attacks")),
    ],
)
def test_every_rule_and_attack_accepts_adapters(tiny: Tiny, folders: Any, setting: str) -> None:
    """A round changes each B, and all values are finite."""
    place, _, own = setting.partition("=")
    more = {
        "gaussian": ["evaluate.clients=none", "privacy.key=seed", "data.split.validation=0"],
        "backdoor": ["data.features.after=null", "models.model.after=null"],
    }.get(own, [])
    options = OPTIONS.get(own, f"{{name: {own}}}")
    _, tensors = train_run(configure(tiny, folders("hubert"), f"{place}={options}", *more))
    assert all(value.isfinite().all() for value in tensors.values())
    assert all(value.abs().max() > 0 for key, value in tensors.items() if "lora_B" in key)


def test_fixed_a_sends_b_and_the_head(tiny: Tiny, folders: Any) -> None:
    run, tensors = train_run(configure(tiny, folders("hubert"), lora=f"rank: {RANK}, fixed_a: true"))
    assert read_values(run, "bytes_up") == [CLIENTS * 4 * (ADAPTERS // 2 + HEAD)]
    assert not any("lora_A" in name for name in tensors)
    assert all(value.abs().max() > 0 for name, value in tensors.items() if "lora_B" in name)


def test_with_fixed_a_the_mean_of_products_is_the_product_of_means(
    tiny: Tiny, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_a: dict[str, dict[str, Tensor]] = {}
    sent: list[Update] = []
    loss, aggregate = Method.loss, WeightedMean.__call__

    def watch_loss(self: Method, step: Step, batch: Batch) -> Any:
        layers = step.models["model"].named_parameters()
        own_a[step.client.id] = {f"model/{name}": value.clone() for name, value in layers if "lora_A" in name}
        return loss(self, step, batch)

    def watch_updates(self: WeightedMean, updates: Iterable[Update], *arguments: Any) -> Aggregate:
        sent.extend(updates)
        return aggregate(self, sent, *arguments)

    monkeypatch.setattr(Method, "loss", watch_loss)
    monkeypatch.setattr(WeightedMean, "__call__", watch_updates)
    run, mean_b = train_run(configure(tiny, folders("hubert"), "train.together=1", lora=f"rank: {RANK}, fixed_a: true"))
    server_a = {f"model/{n}": value for n, value in load_model(run).network.named_parameters() if "lora_A" in n}
    weights = torch.tensor([float(update.weight) for update in sent], dtype=torch.float64)
    assert len(sent) == len(own_a) == CLIENTS
    for name, a in server_a.items():
        b = name.replace("lora_A", "lora_B")
        products = [update.tensors[b].double() @ own_a[update.client_id][name].double() for update in sent]
        assert not torch.equal(products[0], products[1])
        mean = torch.tensordot(weights / weights.sum(), torch.stack(products), 1)
        torch.testing.assert_close(mean_b[b].double() @ a.double(), mean, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["wav2vec2", "hubert", "ast", "whisper"])
def test_adapters_do_not_change_the_first_loss(folders: Any, kind: str) -> None:
    """B is 0, and the head's initial values do not depend on adapters."""
    spec = make_spec(folders(kind))
    x, y = torch.randn(2, 7, WIDTH), torch.tensor([2, 0])
    losses = []
    for options in (spec.options, [option for option in spec.options if option[0] != "lora"]):
        torch.manual_seed(3)
        network = build_model(ModelSpec("model", "pretrained", WIDTH, CLASSES, tuple(options))).eval()
        losses.append(torch.nn.functional.cross_entropy(network(x), y))
    assert torch.equal(*losses)


@pytest.mark.parametrize("kind", ["wav2vec2-masked", "hubert", "ast", "whisper"])
def test_outputs_equal_peft(folders: Any, kind: str) -> None:
    """Oracle: get_peft_model on the network of transformers, with the same adapters."""
    import peft

    ours = build_model(
        make_spec(folders(kind), after=None) if kind in ("hubert", "wav2vec2-masked") else make_spec(folders(kind), 0)
    ).eval()
    randomise_adapters(ours)
    network = reference(folders(kind))
    model = peft.get_peft_model(
        network, peft.LoraConfig(r=RANK, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    ).eval()
    theirs = {name: value for name, value in model.named_parameters() if "lora_" in name}
    for name, value in ours.encoder.named_parameters():
        if "lora_" in name:
            (match,) = (
                other for other in theirs if other.endswith(name.removeprefix("layers.")) and f".{name}" in other
            )
            theirs[match].data.copy_(value)
    with torch.no_grad():
        if kind in ("hubert", "wav2vec2-masked"):
            wave = torch.randn(2, 4000)
            expected, tokens = model(wave).last_hidden_state, ours.encoder(wave.unsqueeze(2))[0]
        else:
            size = (2, 16, 100) if kind == "whisper" else (2, 40, 16)
            inputs = torch.randn(*size)
            hidden = model(inputs, output_hidden_states=True)
            expected, tokens = hidden.last_hidden_state, ours.encoder(hidden.hidden_states[0])[0]
    torch.testing.assert_close(tokens, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("together", [1, 3])
def test_unequal_ranks_train_slices_of_the_adapters(tiny: Tiny, folders: Any, together: int) -> None:
    """HeteroFL's clients have the first rows of A and columns of B, at rank ceil(share * 4). Row 4 has no client."""
    shares = [0.25, 0.5, 0.75]
    config = configure(
        tiny,
        folders("hubert"),
        f"data.profile={{share: {{values: {shares}}}}}",
        "method.share=share",
        "method.masked=false",
        f"train.together={together}",
        method="heterofl",
    )
    run, tensors = train_run(config)
    sent = sum(ADAPTERS * rank // RANK + HEAD for rank in (1, 2, 3))
    assert read_values(run, "bytes_up") == [4 * sent]
    server = start_server(config.model_copy(update={"run": config.run.model_copy(update={"name": "initial"})}))
    initial = {name: value.clone() for name, value in server._federation.state.tensors["global"].items()}
    server.close()
    assert tensors.keys() == initial.keys()
    for name, value in tensors.items():
        if "lora_" in name:
            first, rest = (slice(3), slice(3, None))
            rows, before = (value, initial[name]) if "lora_A" in name else (value.T, initial[name].T)
            assert torch.equal(rows[rest], before[rest])
            if "lora_B" in name:
                assert bool((rows[first] != 0).any(dim=1).all())


def test_products_of_unequal_ranks_are_averaged(tiny: Tiny, folders: Any) -> None:
    """The sum of ranks is 1 + 2 + 3, above the server's rank 4. A is orthonormal after the round."""
    shares = ["data.profile={share: {values: [0.25, 0.5, 0.75]}}", "method.share=share", "method.rule=product_mean"]
    run, tensors = train_run(configure(tiny, folders("ast"), *shares, method="heterofl"))
    (lost,) = read_values(run, "product_mean/lost")
    assert 0 < lost < 0.5
    for name, value in tensors.items():
        if "lora_A" in name:
            torch.testing.assert_close(value @ value.T, torch.eye(RANK))
    with pytest.raises(ConfigError, match=r"choose weighted_mean \(exact with fixed_a\)"):
        start_server(
            configure(tiny, folders("ast"), "method.rule=product_mean", "run.name=fixed", lora="rank: 4, fixed_a: true")
        )


def test_a_narrow_adapter_equals_the_whole_adapter_without_the_removed_ranks(folders: Any) -> None:
    spec = make_spec(folders("hubert"))
    small = narrow(spec, 0.5)
    cuts = make_cuts(small, lambda group, channels, kept: np.array([1, 3]))
    assert len(cuts) == 2 * ADAPTED
    whole, part = build_model(spec).eval(), build_model(small).eval()
    randomise_adapters(whole)
    state = whole.state_dict()
    part.load_state_dict(
        {n: v[cuts[f"model/{n}"].place(v.shape)] if f"model/{n}" in cuts else v for n, v in state.items()}
    )
    for name, value in state.items():
        if "lora_B" in name:
            value[:, [0, 2]] = 0
    x = torch.randn(2, 7, WIDTH)
    torch.testing.assert_close(part(x), whole(x))


def test_a_share_of_the_weights_counts_adapters_and_head_only(folders: Any) -> None:
    """The frozen layers have ten times as many weights, so any share of all weights would mean rank 1 or 4."""
    for rank in (1, 2, 3, 4):
        share = (ADAPTERS * rank // RANK + HEAD) / (ADAPTERS + HEAD)
        assert fit_width(make_spec(folders("hubert")), share) == rank / RANK


def test_batched_clients_equal_unbatched_clients(tiny: Tiny, folders: Any) -> None:
    """AST has no dropout by default. PyTorch's dropout draws different masks in a batch of clients."""
    _, unbatched = train_run(configure(tiny, folders("ast"), "train.together=1"), "alone")
    run, batched = train_run(configure(tiny, folders("ast"), "train.together=3"), "together")
    assert read_values(run, "vectorised") == [1.0]
    for name, value in batched.items():
        torch.testing.assert_close(unbatched[name], value, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("actors", [1, 2])
def test_actors_give_the_same_bits(tiny: Tiny, folders: Any, ray_session: None, actors: int) -> None:
    shares = ["data.profile={share: {values: [0.25, 0.5, 1.0]}}", "method.share=share", "method.rule=product_mean"]
    settings = [*shares, "train.rounds=2", "evaluate.every=1"]
    _, serial = train_run(configure(tiny, folders("hubert"), *settings, "ray.actors=0", method="heterofl"), "serial")
    config = configure(tiny, folders("hubert"), *settings, "run.name=actors", f"ray.actors={actors}", method="heterofl")
    parallel = final_state(raydfl.run(config).run_dir).tensors["global"]
    assert serial.keys() == parallel.keys()
    assert all(torch.equal(value, parallel[name]) for name, value in serial.items())


def test_caching_the_layers_before_the_adapters_does_not_change_the_run(tiny: Tiny, folders: Any) -> None:
    """With an adapter in the last layer only, a run on samples equals a run on its cached tokens."""
    config = configure(tiny, folders("hubert"), "train.together=1", lora="targets: [2.attention.q_proj]")
    _, cached = train_run(config, "cached")
    _, whole = train_run(
        configure(
            tiny,
            folders("hubert"),
            "data.features.after=null",
            "models.model.after=null",
            "train.together=1",
            lora="targets: [2.attention.q_proj]",
        ),
        "whole",
    )
    assert whole.keys() == cached.keys()
    for name, value in whole.items():
        torch.testing.assert_close(cached[name], value, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("lora", "overrides", "message"),
    [
        (
            "rank: 13",
            [],
            r"models\.model: lora\.rank: 13 exceeds the smaller side of 1\.attention\.\w+, 12\. Set lora\.rank",
        ),
        ("targets: [q_prj]", [], r"lora\.targets: no linear layer has the name 'q_prj'\. Did you mean 'q_proj'\?"),
        ("targets: [feature]", [], r"lora\.targets: .* 'feature'\. Choose one of "),
        ("targets: []", [], r"models\.model: pretrained\.lora"),
        ("rank: 0", [], r"models\.model: pretrained\.lora"),
        ("rnk: 2", [], r"models\.model: pretrained\.lora"),
        (
            "",
            ["models.model.lora={}", "models.model.train=1"],
            "train: 1, but with lora the layers are frozen. Remove train",
        ),
        (
            "",
            ["models.model.lora={}", "models.model.train=all", "models.model.after=null", "data.features.after=null"],
            "train: all, but with lora the layers are frozen",
        ),
        (
            "",
            ["models.model.lora={}", f"models.model.after={LAYERS}", f"data.features.after={LAYERS}"],
            "lora: no layer of the encoder in .* comes after the features",
        ),
    ],
)
def test_adapters_that_do_not_fit_the_encoder_are_rejected(
    tiny: Tiny, folders: Any, lora: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(tiny, folders("hubert"), *overrides, lora=lora)


@pytest.mark.parametrize("kind", ["wav2vec2", "hubert", "ast", "whisper"])
def test_exports_equal_the_model_with_adapters(tiny: Tiny, folders: Any, kind: str, tmp_path: Path) -> None:
    """Oracles: PeftModel on the original encoder, and the exported encoder without adapters."""
    import peft
    import transformers

    folder = folders(kind)
    run, _ = train_run(configure(tiny, folder, "train.optimiser.lr=1.0"))
    network = load_model(run).network
    x = torch.randn(2, 7, WIDTH)
    with torch.no_grad():
        expected, _ = network.encoder(x)
        assert not torch.allclose(expected, Encoder(read_encoder_folder(folder), AFTER, LAYERS).eval()(x)[0], atol=1e-4)
        merged = export_encoder(run, form="merged")
        assert merged == run / "export" / "model-merged"
        tokens, _ = Encoder(read_encoder_folder(merged), AFTER, LAYERS).eval()(x)
        torch.testing.assert_close(tokens, expected, atol=1e-5, rtol=1e-5)
        adapter = export_encoder(run, tmp_path / "adapter", form="adapter")
        assert {file.name for file in adapter.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        base = transformers.AutoModel.from_pretrained(folder)
        loaded = peft.PeftModel.from_pretrained(base, adapter).eval().base_model.model
        tokens, _ = Encoder(read_encoder_folder(folder), AFTER, LAYERS, loaded).eval()(x)
    torch.testing.assert_close(tokens, expected, atol=1e-6, rtol=1e-5)
    before, after = (load_file(path / "model.safetensors") for path in (folder, merged))
    assert {name: value.shape for name, value in before.items()} == {name: value.shape for name, value in after.items()}
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert len(changed) == ADAPTED, "heads, decoders and all layers without an adapter are copied"


def test_exports_of_models_without_adapters(tiny: Tiny, folders: Any) -> None:
    run, _ = train_run(configure(tiny, folders("hubert"), "models.model.train=1", lora=""), "layers")
    network = load_model(run).network
    with pytest.raises(InputError, match="--adapter: the model has no adapters"):
        export_encoder(run, form="adapter")
    tokens, _ = Encoder(read_encoder_folder(export_encoder(run, form="merged")), AFTER, LAYERS).eval()(
        torch.ones(1, 7, WIDTH)
    )
    torch.testing.assert_close(tokens, network.encoder(torch.ones(1, 7, WIDTH))[0])
    plain, _ = train_run(tiny("train.rounds=1"), "crnn")
    with pytest.raises(InputError, match="--merged: model 'model' has the architecture crnn_tiny, not pretrained"):
        export_encoder(plain, form="merged")
