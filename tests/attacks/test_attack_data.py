"""Training data of attackers, and the triggered test clips of a backdoor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from tones import Tones

from raydfl.attacks import Attack
from raydfl.attacks.backdoor import Trigger
from raydfl.attacks.corrupt_recordings import Damage
from raydfl.core import registry
from raydfl.core.errors import ConfigError, DataError
from raydfl.data.build import build_population
from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.noise import add_noise, seed_noise
from raydfl.data.population import Population
from raydfl.engine.config import Config

Tiny = Callable[..., Config]
EXTRACTOR = FeatureExtractor(FeatureSettings(sample_rate=8000, bands=16))


def make_attack(name: str, **options: Any) -> Attack:
    return registry.build(registry.find("raydfl.attacks", name, Attack, "attack"), options, "attack")


def build_with(tiny: Tiny, attack: Attack | None, *overrides: str) -> Population:
    return build_population(tiny(*overrides).data, 1, attack=attack)


def list_clips(population: Population, index: int, attacking: bool) -> list[tuple[int, int, bytes]]:
    """List the clip, the label and the bytes of the features of each training example."""
    train = population.data(index, attacking).train
    x = train.batch(np.arange(len(train))).x.numpy()
    return [(int(c), int(y), row.tobytes()) for c, y, row in zip(train.clips, train.labels, x, strict=True)]


# -- sounds ----------------------------------------------------------------------------------------------------------


def wave(samples: int = 8000, seed: int = 0) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


@pytest.mark.parametrize("sound", ["tone", "chirp"])
@pytest.mark.parametrize(("position", "start"), [(0.0, 0), (0.25, 1800), (1.0, 7200)])
@pytest.mark.parametrize("loudness_db", [-20.0, 6.0])
def test_a_trigger_has_its_position_and_loudness(sound: Any, position: float, start: int, loudness_db: float) -> None:
    clean = wave()
    mixed = Trigger(sound, 1000.0, 0.1, loudness_db, position)(clean, EXTRACTOR, 0)
    added = mixed.astype(np.float64) - clean
    assert mixed.dtype == np.float32
    assert not added[:start].any()
    assert not added[start + 800 :].any()
    loudness = np.sqrt(np.mean(added[start : start + 800] ** 2)) / np.sqrt(np.mean(clean.astype(np.float64) ** 2))
    assert 20 * np.log10(loudness) == pytest.approx(loudness_db, abs=0.01)


def test_tone_and_chirp_have_their_frequencies() -> None:
    def loudest(part: np.ndarray) -> float:
        spectrum = np.abs(np.fft.rfft(part * np.hanning(len(part))))
        return float(np.fft.rfftfreq(len(part), 1 / 8000)[spectrum.argmax()])

    tone = Trigger("tone", 1000.0, 1.0, 0.0, 0.0).waveform(EXTRACTOR)
    chirp = Trigger("chirp", 1000.0, 1.0, 0.0, 0.0).waveform(EXTRACTOR)
    for start in (0, 3600, 7200):
        assert loudest(tone[start : start + 800]) == pytest.approx(1000, abs=10)
        middle = (start + 400) / 8000
        assert loudest(chirp[start : start + 800]) == pytest.approx(1000 * (1 + middle), abs=30)


def test_triggers_in_short_and_silent_clips_and_at_random_positions() -> None:
    trigger = Trigger("tone", 1000.0, 0.1, 0.0, None)
    short = wave(300)
    assert len(trigger(short, EXTRACTOR, 0)) == 300
    assert (trigger(short, EXTRACTOR, 0) != short).any()
    silent = trigger(np.zeros(8000, np.float32), EXTRACTOR, 0)
    assert np.sqrt(np.mean(silent[silent != 0] ** 2)) == pytest.approx(1.0, rel=0.02)
    starts = {int(np.flatnonzero(trigger(wave(), EXTRACTOR, seed) != wave())[0]) for seed in range(10)}
    assert len(starts) == 10
    np.testing.assert_array_equal(trigger(wave(), EXTRACTOR, 3), trigger(wave(), EXTRACTOR, 3))


def test_a_recorded_trigger_is_resampled_and_identified_by_its_content(tmp_path: Path) -> None:
    time = np.arange(16000) / 16000
    for name, pitch in (("a", 500.0), ("b", 500.0), ("c", 700.0)):
        soundfile.write(tmp_path / f"{name}.wav", 0.5 * np.sin(2 * np.pi * pitch * time), 16000)
    a, b, c = (Trigger.from_file(tmp_path / f"{name}.wav", 0.2, 0.0, 0.5) for name in "abc")
    assert repr(a) == repr(b) != repr(c)  # the cache's key
    sound = a.waveform(EXTRACTOR)
    assert len(sound) == 1600
    expected = np.sqrt(2) * np.sin(2 * np.pi * 500 * np.arange(1600) / 8000)
    np.testing.assert_allclose(sound[100:-100], expected[100:-100], atol=0.05)


def test_unusable_trigger_sounds_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "text.wav").write_text("no sound")
    soundfile.write(tmp_path / "silent.wav", np.zeros(800), 8000)
    classes, features = ["yes", "no"], FeatureSettings(sample_rate=8000, bands=16)
    for file, message in (
        ("absent.wav", "attack.file: the trigger sound cannot be used: .*absent.wav: there is no such file"),
        ("text.wav", "attack.file: the trigger sound cannot be used: .*text.wav"),
        ("silent.wav", "silent.wav is silent in its first 0.1 s. Choose another"),
    ):
        with pytest.raises(DataError, match=message):
            make_attack("backdoor", target="yes", file=tmp_path / file).check(classes, features)
    with pytest.raises(ConfigError, match="a chirp of 2500 Hz reaches 5000 Hz.*end at 4000 Hz. Lower attack.hz"):
        make_attack("backdoor", target="yes", sound="chirp", hz=2500).check(classes, features)
    make_attack("backdoor", target="yes", sound="tone", hz=2500).check(classes, features)


def test_damage_adds_noise_silence_or_clipping() -> None:
    clean = wave()
    np.testing.assert_array_equal(Damage("noise", 3.0, 1.0, 1.0)(clean, EXTRACTOR, 5), add_noise(clean, 3.0, 5))
    for share in (0.0, 0.3, 1.0):
        silenced = Damage("silence", 0.0, share, 1.0)(clean, EXTRACTOR, 5)
        changed = np.flatnonzero(silenced != clean)
        assert (silenced == 0).sum() == round(share * 8000) == len(changed)
        assert len(changed) == 0 or changed[-1] - changed[0] == len(changed) - 1  # one segment
    clipped = Damage("clipping", 0.0, 1.0, 0.1)(clean, EXTRACTOR, 5)
    limit = np.float32(0.1 * float(np.abs(clean).max()))
    np.testing.assert_allclose(clipped, np.clip(clean, -limit, limit), rtol=1e-6)
    np.testing.assert_array_equal(Damage("clipping", 0.0, 1.0, 1.0)(clean, EXTRACTOR, 5), clean)


# -- populations -----------------------------------------------------------------------------------------------------


def test_only_attackers_train_on_flipped_labels(tiny: Tiny) -> None:
    population = build_with(tiny, make_attack("label_flip", clients=("s1", "s4")))
    clean = build_with(tiny, None)
    assert len(population.stores) == 1
    for index in range(6):
        honest, attacking = list_clips(clean, index, False), list_clips(population, index, True)
        assert list_clips(population, index, False) == honest
        flipped = [(clip, (label + 1) % 3, x) for clip, label, x in honest] if index in (1, 4) else honest
        assert attacking == flipped
        assert len(population.data(index, True).validation) == len(clean.data(index).validation)
    assert len(population.triggered) == 0


def test_altered_clips_of_a_backdoor_have_the_trigger_and_the_target_label(tiny: Tiny) -> None:
    attack = make_attack("backdoor", clients=["s2"], target="tone1", share=0.5, hz=1200.0)
    population, clean = build_with(tiny, attack), build_with(tiny, None)
    extractor, rows = FeatureExtractor(tiny().data.features), Tones().manifest().to_pylist()
    trigger = attack.alteration()
    assert trigger is not None

    def add_trigger(clip: int) -> np.ndarray:
        wave = extractor.wave(*Tones().read(rows[clip]))
        return extractor.features(trigger(wave, extractor, 0))  # the position is fixed, so the seed has no effect

    honest, attacking = list_clips(clean, 2, False), list_clips(population, 2, True)
    altered = [position for position, (a, b) in enumerate(zip(honest, attacking, strict=True)) if a[2] != b[2]]
    assert len(altered) == int(len(honest) * 0.5 + 0.5)
    for position, (before, after) in enumerate(zip(honest, attacking, strict=True)):
        assert before[0] == after[0]
        if position in altered:
            assert after[1] == 1
            assert after[2] == add_trigger(after[0]).tobytes()
        else:
            assert before == after
    copies = population.triggered
    others = np.flatnonzero(clean.test.labels != 1)
    assert copies.clips.tolist() == clean.test.clips[others].tolist()
    assert copies.labels.tolist() == clean.test.labels[others].tolist()
    for position, clip in enumerate(copies.clips):
        np.testing.assert_array_equal(copies.batch(np.array([position])).x[0].numpy(), add_trigger(int(clip)))
    assert len(population.stores[-1]) == len(honest) + len(others)  # only the altered clips


def test_data_noise_is_added_before_the_trigger(tiny: Tiny) -> None:
    noise = "data.corrupt.noise={snr_db: 5.0, clients: [s2]}"
    attack = make_attack("backdoor", clients=["s2", "s3"], target="tone1", share=1.0, hz=1200.0)
    population = build_with(tiny, attack, noise)
    extractor, rows = FeatureExtractor(tiny().data.features), Tones().manifest().to_pylist()
    trigger = attack.alteration()
    assert trigger is not None
    for index in (2, 3):
        for clip, label, x in list_clips(population, index, True):
            wave = extractor.wave(*Tones().read(rows[clip]))
            if index == 2:
                wave = add_noise(wave, 5.0, seed_noise([rows[clip]["clip"]], 5.0, 1).seeds[0])
            assert label == 1
            assert x == extractor.features(trigger(wave, extractor, 0)).tobytes()


def test_altered_clips_have_the_segments_of_the_clean_clips(tiny: Tiny) -> None:
    cut = ("data.features.seconds=null", "data.segment={frames: 10, stride: 5}")
    attack = make_attack("corrupt_recordings", clients=2, share=0.5)
    population, clean = build_with(tiny, attack, *cut), build_with(tiny, None, *cut)
    changed = 0
    for index in range(6):
        honest, attacking = list_clips(clean, index, False), list_clips(population, index, True)
        assert [(clip, label) for clip, label, _ in honest] == [(clip, label) for clip, label, _ in attacking]
        assert len(population.data(index, True).train) == clean.num_examples(index)
        changed += honest != attacking
    assert changed == 2


def test_populations_with_an_attack_can_be_saved_and_loaded(tiny: Tiny, tmp_path: Path) -> None:
    population = build_with(tiny, make_attack("backdoor", target="tone0", draw="round", hz=1200.0))
    population.save(tmp_path)
    opened = Population.load(tmp_path, verify=True)
    for index in range(6):
        assert (
            list_clips(opened, index, True)
            == list_clips(population, index, True)
            != list_clips(population, index, False)
        )
        assert list_clips(opened, index, False) == list_clips(population, index, False)
    assert opened.triggered.clips.tolist() == population.triggered.clips.tolist()


def test_options_that_do_not_fit_the_data_are_rejected_before_feature_extraction(tiny: Tiny, tmp_path: Path) -> None:
    settings = tiny(f"data.cache={tmp_path}").data
    for attack, error, message in (
        (
            make_attack("backdoor", target="tone11"),
            ConfigError,
            "attack.target: the data have no class 'tone11'. Did you mean 'tone1'",
        ),
        (
            make_attack("label_flip", to={"tone0": "ton2"}),
            ConfigError,
            "attack.to: the data have no class 'ton2'. Did you mean 'tone2'",
        ),
        (
            make_attack("sign_flip", clients=7),
            DataError,
            "attack: 7 clients are to be attackers, but the federation has 6",
        ),
        (make_attack("sign_flip", clients=["s9"]), DataError, "attack: unknown client 's9'. Did you mean"),
    ):
        with pytest.raises(error, match=message):
            build_population(settings, 1, attack=attack)
    assert not any(tmp_path.iterdir())
    one = tiny("data.classes=1").data
    with pytest.raises(ConfigError, match="label_flip needs at least 2 classes, but the data have 1"):
        build_population(one, 1, attack=make_attack("label_flip"))
