"""Parts combined with objectives, transforms, views, profiles, initial weights and planned evaluation; pools with views."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from raydfl import Config, final_state, load_model, read_rows
from raydfl.core.errors import ConfigError
from raydfl.core.settings import FIRST_VIEW
from raydfl.data.build import build_population
from raydfl.data.population import Population
from raydfl.engine.clients import Clients
from raydfl.runs._run import resume, run
from raydfl.testing import start_server

Tiny = Callable[..., Config]
TESTS = Path(__file__).parents[1]
MACHINES = f"{TESTS / 'objectives' / 'machines.py'}:Machines"
CHORDS = f"{TESTS / 'objectives' / 'machines.py'}:Chords"
PLANNED = f"{Path(__file__).with_name('test_planned_evaluation.py')}:Planned"
PARTS = "data.parts={low: {speakers: 4}, high: {classes: 5, first: 10, speakers: 3}}"


def list_metrics(run_dir: Path, split: str, ending: str) -> set[str]:
    rows = read_rows(run_dir).to_pylist()
    return {row["metric"] for row in rows if row["split"] == split and row["metric"].endswith(ending)}


def test_an_anomaly_detector_shares_one_network_and_scores_each_part(tiny: Tiny) -> None:
    objective = "objective={name: compact, size: 4, normal: [normal]}"
    parts = f"data.parts={{few: {{name: '{MACHINES}', machines: 2}}, many: {{name: '{MACHINES}', machines: 3}}}}"
    config = tiny(parts, objective, "train.rounds=1", "train.cohort=1.0")
    folder = run(config).run_dir
    assert not [name for name in final_state(folder).tensors["global"] if "@" in name], "no tensor depends on classes"
    assert list_metrics(folder, "test", "model/auc") == {"few:model/auc", "many:model/auc"}


def test_parts_may_have_sets_of_labels(tiny: Tiny) -> None:
    parts = f"data.parts={{a: {{name: '{CHORDS}'}}, b: {{name: '{CHORDS}'}}}}"
    config = tiny(parts, "data.label_sets={}", "objective=multi_label", "train.rounds=1")
    folder = run(config).run_dir
    assert list_metrics(folder, "test", "model/map") == {"a:model/map", "b:model/map"}
    population = Population.load(folder / "population")
    assert all(part.sets is not None and "|" not in "".join(part.classes) for part in population.parts.values())
    assert population.label_counts().shape[1] == len(population.classes)
    with pytest.raises(ConfigError, match="'multi_label' needs a set of classes"):
        tiny(f"data.parts={{a: {{name: '{CHORDS}', label_sets: {{}}}}, b: {{}}}}", "objective=multi_label")
    with pytest.raises(ConfigError, match="'classify' needs one label for each clip"):
        tiny(f"data.parts={{a: {{name: '{CHORDS}', label_sets: {{}}}}, b: {{}}}}")


def test_a_parts_transform_changes_only_its_batches(tiny: Tiny) -> None:
    """The saved population is used, as in a run. The explicit form of the transform has the same digest."""
    config = tiny("data.parts={plain: {}, masked: {transforms: [spec_augment]}}", "train.rounds=1")
    folder = run(config).run_dir
    population = Population.load(folder / "population").use(config.data)
    plain = {name: part.views[FIRST_VIEW].pipeline.plain for name, part in population.parts.items()}
    assert plain == {"plain": True, "masked": False}
    for name, part in population.parts.items():
        train, index = part.data(0).train, np.arange(4)
        drawn = train.draw(index, 1, 0)
        same = bool((train.batch(index, drawn=drawn).x == train.batch(index).x).all())
        assert same is (name == "plain")
    explicit = "data.parts={plain: {}, masked: {transforms: [{name: spec_augment}]}}"
    assert tiny(explicit, "train.rounds=1").digest() == config.digest()


def test_an_architecture_may_depend_on_the_part_or_its_profiles(tiny: Tiny) -> None:
    small, large = (f"{{name: crnn_tiny, hidden: {hidden}, filters: [4]}}" for hidden in (4, 8))
    by_part = f"models.local={{by: part, choices: {{low: {small}, high: {large}}}}}"
    plugin = "models.plugin={name: crnn_tiny, hidden: 4, filters: [4]}"
    config = tiny(PARTS, by_part, plugin, method="fedmlac")
    clients = Clients(build_population(config.data, 1), config)
    hidden = [dict(spec.options)["hidden"] for client in clients for spec in client.models if spec.name == "local"]
    assert hidden == [4] * 4 + [8] * 3
    with pytest.raises(ConfigError, match="no architecture for part 'high'"):
        tiny(PARTS, by_part.replace("high", "higher"), plugin, method="fedmlac")
    parts = PARTS.replace("speakers: 3", "speakers: 3, profile: {room: {values: [hall]}}")
    config = tiny(parts, "data.profile={room: {values: [yard, attic]}}")
    rooms = [client.profile["room"] for client in Clients(build_population(config.data, 1), config)]
    assert rooms == ["yard", "attic", "yard", "attic", "hall", "hall", "hall"]
    config = tiny(PARTS, "data.profile={ratio: {values: [0, 0.4, 0.8]}}")  # dealt in turn within each part
    ratios = [client.profile["ratio"] for client in Clients(build_population(config.data, 1), config)]
    assert ratios == [0, 0.4, 0.8, 0, 0, 0.4, 0.8]


def test_parts_start_from_the_weights_of_a_file(tiny: Tiny) -> None:
    """Tensors that depend on classes are recognised although the parts have as many classes as the file."""
    first = run(tiny("train.rounds=1", "run.name=first")).run_dir
    start_from = f"models.model={{name: crnn_tiny, hidden: 8, filters: [4], init_from: {first / 'model.safetensors'}}}"
    server = start_server(tiny("data.parts={a: {}, b: {first: 20}}", start_from, "run.name=second"))
    initial, expected = server._federation.state.tensors["global"], final_state(first).tensors["global"]
    server.close()
    assert {name for name in initial if "@" in name} == {
        f"model/output.{k}@{p}" for k in ("weight", "bias") for p in "ab"
    }
    for name, tensor in initial.items():
        assert tensor.equal(expected[name.partition("@")[0]])


def test_a_planned_entry_is_measured_on_each_part(tiny: Tiny) -> None:
    config = tiny(PARTS, "train.rounds=1", "method.receive=[[trunk, head]]", method=PLANNED)
    folder = run(config).run_dir
    assert list_metrics(folder, "test", "model/accuracy") == {"low:trunk:model/accuracy", "high:trunk:model/accuracy"}


METHOD = '''
import torch.nn.functional as F
from raydfl import Method, Plan, fit


class Eyes(Method):
    """An audio and an image network, trained on the sum of their logits, from two pools."""

    models = {"ear": "crnn_tiny", "eye": "cnn_small"}

    def loss(self, step, batch):
        seen = step.forward("eye", batch) * batch.present["picture"].unsqueeze(1)
        return batch.mean(F.cross_entropy(step.forward("ear", batch) + seen, batch.y, reduction="none"))

    def local(self, step):
        plan = None
        if len(step.data.pools) > 1:
            plan = Plan({name: 2 for name in step.data.pools}, leads=next(iter(step.data.pools)))
        return step.update(fit(step, self.loss, batches=plan))
'''
FEATURES = "features: {sample_rate: 8000, bands: 16, seconds: 0.25}"
VIEWS = "views: {picture: {column: frame, features: {kind: image, size: [8, 9]}}}"
MODELS = "models={ear: {name: crnn_tiny, hidden: 8, filters: [4]}, eye: {name: cnn_small, view: picture}}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write tones of two pitches in two rooms. Three of four have an image with the clip's number as its first pixel."""
    rng = np.random.default_rng(0)
    rows = ["path,label,group,split,room,frame"]
    for number in range(48):
        label, time = number % 2, np.arange(2000) / 8000
        wave = 0.3 * np.sin(2 * np.pi * 400 * (1 + label) * time) + 0.01 * rng.standard_normal(2000)
        soundfile.write(tmp_path / f"{number}.wav", wave, 8000)
        picture = f"{number}.png" if number % 4 != 3 else ""
        if picture:
            pixels = rng.integers(0, 255, (8, 9)).astype(np.uint8)
            pixels[0, 0] = number
            Image.fromarray(pixels).save(tmp_path / picture)
        split, room = ("test" if number < 12 else "train"), ("hall", "yard")[number // 24]
        rows.append(f"{number}.wav,{'ab'[label]},g{number % 6},{split},{room},{picture}")
    (tmp_path / "list.csv").write_text("\n".join(rows))
    (tmp_path / "eyes.py").write_text(METHOD)
    return tmp_path


def make_config(tiny: Tiny, folder: Path, data: str, *overrides: str) -> Config:
    data = f"data={{name: manifest, file: {folder / 'list.csv'}, {FEATURES}, partition: {{by: group}}, {data}}}"
    return tiny(data, f"method.name={folder / 'eyes.py'}:Eyes", MODELS, *overrides)


def check_images(population: Population) -> set[int]:
    """Check that every training example has its clip's image, in all pools, and return the clips."""
    seen = set[int]()
    for index in range(len(population)):
        for examples in population.data(index).pools.values():
            if not len(examples):
                continue
            batch = examples.batch(np.arange(len(examples)))
            numbers = (batch.views["picture"][:, 0, 0, 0] * 255).round().int().tolist()
            for clip, number, present in zip(examples.clips, numbers, batch.present["picture"].tolist(), strict=True):
                assert present is bool(clip % 4 != 3)
                assert number == (clip if present else 0)
                seen.add(int(clip))
    return seen


POOLS = "pools: {hall: {column: room, values: [hall]}, yard: {column: room, values: [yard]}}"


def test_examples_of_every_pool_have_their_views(tiny: Tiny, folder: Path) -> None:
    config = make_config(tiny, folder, f"{VIEWS}, {POOLS}", "train.rounds=1")
    run_dir = run(config).run_dir
    assert check_images(Population.load(run_dir / "population", verify=True).use(config.data)) == set(range(12, 48))


def test_views_and_pools_need_different_names(tiny: Tiny, folder: Path) -> None:
    with pytest.raises(ConfigError, match="data.views: a pool has the name 'picture' already"):
        make_config(tiny, folder, f"{VIEWS}, pools: {{picture: {{column: room, values: [hall]}}}}")
    view = VIEWS.replace("picture", "unlabelled")
    with pytest.raises(ConfigError, match="data.views: a pool has the name 'unlabelled' already"):
        make_config(tiny, folder, f"{view}, unlabelled: {{keep: 0.5}}", "models.eye.view=unlabelled")
    with pytest.raises(ConfigError, match="data.pools: the name 'a@b' is invalid"):
        make_config(tiny, folder, f"{VIEWS}, pools: {{a@b: {{column: room, values: [hall]}}}}")


def test_sets_of_classes_cannot_be_hidden(tiny: Tiny) -> None:
    chords = (f"data.name={CHORDS}", "data.label_sets={}", "objective=multi_label")
    with pytest.raises(ConfigError, match="data.unlabelled hides the class of a clip"):
        tiny(*chords, "data.unlabelled={keep: 0.5}")


@pytest.mark.slow
def test_parts_may_have_views_and_a_resumed_run_has_the_same_bits(tiny: Tiny, folder: Path) -> None:
    parts = f"{VIEWS}, parts: {{one: {{}}, two: {{leave_out: []}}}}"
    config = make_config(tiny, folder, parts, "train.rounds=2", "train.cohort=1.0")
    run_dir = run(config).run_dir
    assert load_model(run_dir, "two:ear").classes == ("a", "b")
    population = Population.load(run_dir / "population").use(config.data)
    for part in population.parts.values():
        assert check_images(part) == set(range(12, 48))
    resumed = run(make_config(tiny, folder, parts, "train.rounds=1", "train.cohort=1.0", "run.name=short")).run_dir
    resume(resumed, ["train.rounds=2"])
    whole_state, resumed_state = final_state(run_dir).tensors["global"], final_state(resumed).tensors["global"]
    assert all(whole_state[name].equal(resumed_state[name]) for name in whole_state)
