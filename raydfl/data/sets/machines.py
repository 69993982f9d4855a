"""The built-in corpus of machines: fans, pumps and gearboxes that NumPy makes on the spot, and what they sound like when failing.

A machine is a kind (fan ...) and an id: its speed, number of blades, tone colour, hum, and the noise of its room. Each clip varies
speed, load and levels a little. Everything is drawn from the seed, the machine and the clip, so a clip has the same samples
whichever process makes it and whatever else is in the corpus.

A clip is machine + anomaly + background. The anomaly is added at ``strength_db``: its power over the machine's own, whatever the
background is. Of an anomalous clip everything but the anomaly is drawn as of a normal one, so at ``strength_db: null`` nothing
tells them apart. Kinds of anomalies, per turn of the shaft:

    imbalance   the tone of the shaft's own turning, and the machine's sound rising and falling with it
    bearing     clicks some four times a turn, a little irregular, each ringing at 2.5 to 5 kHz
    rub         a burst of noise once a turn
    clogging    a low rumble that surges once or twice a second

Training clips are normal, always. Anomalous ones are in the test set, and in the validation set where it is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from raydfl.core.seeds import generator
from raydfl.data.dataset import Card, Dataset
from raydfl.data.manifest import make_manifest
from raydfl.data.noise import draw_noise, rms
from raydfl.data.sets._machine_sets import ANOMALY, NORMAL

Kind = Literal["fan", "pump", "gearbox"]
Anomaly = Literal["imbalance", "bearing", "rub", "clogging"]
Wave = npt.NDArray[np.float64]

RATE = 16_000
"""Samples in a second."""
_LEVEL = 0.02
"""Root mean square of a machine's own sound at its average level."""
_MAINS = 100
"""Hz, at which what runs on the mains hums."""
# Goes into the identity of each clip; raised when the same options would give other samples.
_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Make:
    """Properties that all machines of a kind have; pairs are the least and the greatest."""

    turns: tuple[float, float]
    """Turns of the shaft in a second."""
    blades: tuple[int, int]
    """Blades, pistons or teeth: they pass so many times a turn."""
    tones: int
    """Multiples of the blades' tone that are heard."""
    decay: tuple[float, float]
    """Exponent with which they fall."""
    shaft: float
    """Amplitude of the shaft's own tone beside them."""
    flow: tuple[float, float]
    """Noise of what flows, in dB of the tones."""
    rumble: tuple[float, float]
    """Colour of that noise: 0 is white, towards 1 it is low."""
    beat: tuple[float, float]
    """Depth with which that noise beats with the blades."""


_MAKES: Mapping[str, _Make] = {
    "fan": _Make((20, 30), (5, 9), 12, (0.8, 1.6), 0.2, (0, 6), (0.8, 0.95), (0.0, 0.2)),
    "pump": _Make((24, 48), (3, 5), 24, (0.4, 1.0), 0.4, (-6, 3), (0.3, 0.8), (0.4, 0.8)),
    "gearbox": _Make((12, 25), (17, 31), 8, (0.3, 0.8), 0.6, (-9, -3), (0.5, 0.9), (0.1, 0.4)),
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Machine:
    """Properties of a machine, the same in all its clips."""

    turns: float
    blades: int
    tones: tuple[float, ...]
    """Amplitudes of the multiples of the blades' tone."""
    shaft: float
    """Amplitude of the shaft's own tone."""
    flow_db: float
    rumble: float
    beat: float
    hum_db: float
    """Hum of the mains, in dB of the first tone's unit amplitude."""
    snr_db: float
    room: float
    """Colour of the background."""
    ringing: float
    """Hz, at which a damaged bearing rings."""
    clicks: float
    """Clicks of a damaged bearing in a turn."""


@dataclass(frozen=True, kw_only=True)
class Machines(Dataset):
    """Machines, generated: normal to train on, failing in tests."""

    card: ClassVar[Card] = Card(
        title="Machines, made on the spot",
        layout="nothing: the clips are generated",
        licence="none needed: nothing is downloaded",
        classes=2,
    )

    kinds: Annotated[tuple[Kind, ...], Field(min_length=1, description="kinds of machines: fan, pump, gearbox")] = (
        "fan",
        "pump",
    )
    ids: Annotated[int, Field(ge=1, description="machines of each kind; each is a group")] = 2
    clips: Annotated[int, Field(ge=1, description="normal clips of each machine to train on")] = 40
    test_clips: Annotated[
        int, Field(ge=0, description="clips of each machine in the test set, of either condition")
    ] = 20
    validation_clips: Annotated[
        int, Field(ge=0, description="clips of each machine in the validation set, of either condition")
    ] = 0
    anomalies: Annotated[
        tuple[Anomaly, ...],
        Field(min_length=1, description="what fails, by turn: imbalance, bearing, rub, clogging"),
    ] = get_args(Anomaly)
    strength_db: Annotated[
        float | None,
        Field(ge=-60, le=10, description="power of an anomaly over the machine's own, dB; null: none is heard"),
    ] = -10.0
    snr_db: Annotated[
        tuple[float, float] | None,
        Field(
            description="machine to background, dB: the noisiest and the quietest of the machines' rooms; null: no background"
        ),
    ] = (0.0, 12.0)
    target_clips: Annotated[
        int,
        Field(
            ge=0,
            description="so many of the clips to train on are of the target domain, where speed and load are others; above 0, "
            "every second clip of the other sets is too",
        ),
    ] = 0
    seconds: Annotated[float, Field(ge=0.25, le=60, description="length of a clip, s")] = 2.0
    seed: Annotated[int, Field(ge=0, description="another seed is another corpus: other machines, clips and noise")] = 0

    @model_validator(mode="after")
    def _check(self) -> Machines:
        for name, values in (("kinds", self.kinds), ("anomalies", self.anomalies)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} names {next(v for v in values if values.count(v) > 1)!r} more than once")
        if self.snr_db is not None and not -30 <= self.snr_db[0] <= self.snr_db[1] <= 100:
            raise ValueError(f"snr_db must be two numbers from -30 to 100, the lower one first, not {self.snr_db}")
        if self.target_clips > self.clips:
            raise ValueError(f"target_clips is {self.target_clips} of {self.clips} clips; take at most as many")
        return self

    def manifest(self) -> pa.Table:
        """List the clips of each machine. A group is a machine.

        Extra columns: ``condition`` (the label), ``machine`` (its kind), ``id`` (of the machine among those of its kind),
        ``anomaly`` (what fails, or ``none``) and ``domain``.
        """
        rows = [row for kind in self.kinds for number in range(self.ids) for row in self._clips(kind, f"{number:02d}")]
        return make_manifest(rows, "machines")

    def read(self, row: Mapping[str, Any]) -> tuple[npt.NDArray[np.float32], int]:
        """Make one clip.

        Returns:
            ``(samples, rate)``: float32 [samples, 1] and 16000.
        """
        machine = _draw_machine(self.seed, row["machine"], row["id"], self.snr_db)
        random = generator(self.seed, 0, row["clip"], "clip")
        own, shaft = self._own(machine, row["domain"] == "target", random)
        level = _LEVEL * 10 ** (random.normal(0, 1) / 20) / rms(own)
        clip = own.copy()
        if self.snr_db is not None:
            room = draw_noise(len(own), machine.room, random)
            clip += room * (rms(own) / rms(room) * 10 ** (-machine.snr_db / 20))
        if row["anomaly"] != "none" and self.strength_db is not None:
            # With draws of its own, so that the rest of the clip is what it would be without.
            strange = _SOUNDS[row["anomaly"]](own, shaft, machine, generator(self.seed, 0, row["clip"], "anomaly"))
            clip += strange * (rms(own) / rms(strange) * 10 ** (self.strength_db / 20))
        return (level * clip).astype(np.float32)[:, None], RATE

    def identity(self, row: Mapping[str, Any]) -> str:
        """Return all that decides the samples of a clip; not how many others there are."""
        strength = self.strength_db if row["anomaly"] != "none" else None
        return f"machines {_VERSION}, {(self.seed, self.snr_db, self._samples, strength)}, {row['clip']}"

    @property
    def _samples(self) -> int:
        return round(self.seconds * RATE)

    def _clips(self, kind: str, number: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of one machine."""
        parts = [("train", NORMAL, self.clips)]
        parts += [("validation", condition, self.validation_clips) for condition in (NORMAL, ANOMALY)]
        parts += [("test", condition, self.test_clips) for condition in (NORMAL, ANOMALY)]
        for split, condition, clips in parts:
            for take in range(clips):
                target = take < self.target_clips if split == "train" else bool(self.target_clips) and take % 2 == 1
                domain = "target" if target else "source"
                # Both domains have every anomaly.
                turn = take // 2 if self.target_clips else take
                anomaly = "none" if condition == NORMAL else self.anomalies[turn % len(self.anomalies)]
                name = condition if condition == NORMAL else f"{condition}_{anomaly}"
                yield {
                    "clip": f"{kind}/id_{number}/{split}/{domain}_{name}_{take:04d}",
                    "path": None,
                    "label": condition,
                    "group": f"{kind}_{number}",
                    "split": split,
                    "seconds": self._samples / RATE,
                    "condition": condition,
                    "machine": kind,
                    "id": number,
                    "anomaly": anomaly,
                    "domain": domain,
                }

    def _own(self, machine: _Machine, target: bool, random: np.random.Generator) -> tuple[Wave, Wave]:
        """Return the machine's own sound, and the turns of its shaft until each sample: float64 [samples] each."""
        load = random.uniform(-1, 1)
        speed = machine.turns * (1 + 0.02 * load + (0.12 if target else 0.0))
        wander = np.cumsum(random.standard_normal(self._samples)) / RATE  # the shaft's speed is never quite even
        shaft = random.uniform() + speed * np.arange(self._samples) / RATE + 0.5 * wander
        first = np.exp(2j * np.pi * machine.blades * shaft)
        sound, tone = np.zeros(self._samples), np.ones_like(first)
        for amplitude in machine.tones:
            tone = tone * first
            sound += (amplitude * 10 ** (random.normal(0, 1) / 20) * np.exp(2j * np.pi * random.uniform()) * tone).real
        sound += machine.shaft * 10 ** (random.normal(0, 1) / 20) * np.cos(2 * np.pi * (shaft + random.uniform()))
        hum = np.cos(2 * np.pi * (_MAINS * np.arange(self._samples) / RATE + random.uniform()))
        sound += 10 ** (machine.hum_db / 20) * hum
        flow = draw_noise(self._samples, machine.rumble, random)
        flow *= 1 + machine.beat * np.cos(2 * np.pi * (machine.blades * shaft + random.uniform()))
        flow_db = machine.flow_db + 1.5 * load + (3.0 if target else 0.0)
        return sound + flow * (rms(sound) / rms(flow) * 10 ** (flow_db / 20)), shaft


@functools.lru_cache(maxsize=4096)
def _draw_machine(seed: int, kind: str, number: str, snr_db: tuple[float, float] | None) -> _Machine:
    make, random = _MAKES[kind], generator(seed, 0, f"{kind}_{number}", "machine")
    decay = random.uniform(*make.decay)
    multiples = np.arange(1, make.tones + 1)
    return _Machine(
        turns=random.uniform(*make.turns),
        blades=int(random.integers(make.blades[0], make.blades[1] + 1)),
        tones=tuple((multiples**-decay * 10 ** (random.normal(0, 3, make.tones) / 20)).tolist()),
        shaft=make.shaft * 10 ** (random.normal(0, 3) / 20),
        flow_db=random.uniform(*make.flow),
        rumble=random.uniform(*make.rumble),
        beat=random.uniform(*make.beat),
        hum_db=random.uniform(-20, -6),
        ringing=random.uniform(2500, 5000),
        clicks=random.uniform(3.2, 5.4),
        room=random.uniform(0.5, 0.97),
        snr_db=random.uniform(*snr_db) if snr_db is not None else 0.0,
    )


def _imbalance(own: Wave, shaft: Wave, machine: _Machine, random: np.random.Generator) -> Wave:
    turning = np.cos(2 * np.pi * (shaft + random.uniform()))
    return own * turning + rms(own) * turning


def _bearing(own: Wave, shaft: Wave, machine: _Machine, random: np.random.Generator) -> Wave:
    clicks = np.zeros(len(own))
    count = int(np.ceil((shaft[-1] - shaft[0]) * machine.clicks)) + 1
    turns = shaft[0] + (np.arange(count) + random.uniform() + random.normal(0, 0.02, count)) / machine.clicks
    places = np.searchsorted(shaft, turns)
    inside = places < len(own)
    np.add.at(clicks, places[inside], random.uniform(0.5, 1.0, count)[inside])
    time = np.arange(RATE // 100) / RATE
    return np.convolve(clicks, np.exp(-time / 0.0015) * np.sin(2 * np.pi * machine.ringing * time))[: len(own)]


def _rub(own: Wave, shaft: Wave, machine: _Machine, random: np.random.Generator) -> Wave:
    burst = (0.5 + 0.5 * np.cos(2 * np.pi * (shaft + random.uniform()))) ** 16
    return burst * draw_noise(len(own), 0.2, random)


def _clogging(own: Wave, shaft: Wave, machine: _Machine, random: np.random.Generator) -> Wave:
    surge = np.cos(2 * np.pi * (random.uniform(1, 2) * np.arange(len(own)) / RATE + random.uniform()))
    return (1 + 0.8 * surge) * draw_noise(len(own), 0.99, random)


_SOUNDS = {"imbalance": _imbalance, "bearing": _bearing, "rub": _rub, "clogging": _clogging}
