"""Small trees in the layouts of the papers' data sets, and files in place of pretrained weights."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import soundfile
from films import write_film

RATE = 16_000
WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go", "bed")
EMOTIONS = {"NEU": "N", "HAP": "H", "SAD": "S", "ANG": "A"}


def write_sound(path: Path, seconds: float = 0.2) -> None:
    """Write noise between two halves of silence."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = sum(path.name.encode())
    noise = 0.1 * np.random.default_rng(seed).standard_normal(round(seconds * RATE))
    soundfile.write(path, np.pad(noise, round(0.04 * RATE)), RATE)


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_speech_commands(root: Path, speakers: int = 16) -> None:
    """Write 11 words of each speaker, a file of noise, the lists, and the archive of the 12-class test set."""
    words, archive = root / "speech_commands_v0.02", root / "speech_commands_test_set_v0.02"
    for word, speaker in itertools.product(WORDS, range(speakers)):
        write_sound(words / word / f"{speaker:08x}_nohash_0.wav")
    write_sound(words / "_background_noise_" / "pink_noise.wav", 9.0)
    write_text(words / "validation_list.txt", "yes/00000000_nohash_0.wav\n")
    write_text(words / "testing_list.txt", "".join(f"{word}/00000001_nohash_0.wav\n" for word in WORDS))
    for word in WORDS[:-1]:
        write_sound(archive / word / "0a1b2c3d_nohash_7.wav")
    write_sound(archive / "_unknown_" / "bird_0a1b2c3d_nohash_4.wav.wav")
    write_sound(archive / "_silence_" / "158.wav")


def write_ambient_contexts(root: Path) -> None:
    for folder, split, takes in (("Train", "train", 30), ("Test", "test", 2)):
        names = {
            f"id_{split}{label}_10_20_{take}.wav": label
            for label in ("Walk", "Crowd", "Water")
            for take in range(takes)
        }
        for name in names:
            write_sound(root / "ambient_contexts/Data" / folder / name)
        lines = "".join(f"{name}\t{label}\n" for name, label in names.items())
        write_text(root / f"ambient_contexts/{split}_split.txt", lines)


def write_voxforge(root: Path) -> None:
    names = [
        f"{lang}/Trunk/Audio/Main/16kHz_16bit/a{n}-20120715-csb/wav/x.wav"
        for lang in ("de", "en", "fr")
        for n in range(32)
    ]
    for name in names:
        write_sound(root / "voxforge" / name)
    write_text(root / "voxforge/test_split.txt", "\n".join(names[::8]))


def write_iemocap(root: Path) -> None:
    folder = root / "IEMOCAP_full_release"
    for session, sex in itertools.product(range(1, 6), "FM"):
        dialogue = f"Ses{session:02d}{sex}_impro01"
        lines = ["% [START_TIME - END_TIME] TURN_NAME EMOTION [V, A, D]\n"]
        for number, (emotion, speaker) in enumerate(itertools.product(("neu", "hap", "sad", "ang"), "FM")):
            turn = f"{dialogue}_{speaker}{number:03d}"
            lines.append(f"[{number}.0 - {number}.5]\t{turn}\t{emotion}\t[2.5, 2.5, 2.5]")
            write_sound(folder / f"Session{session}/sentences/wav/{dialogue}/{turn}.wav")
        write_text(folder / f"Session{session}/dialog/EmoEvaluation/{dialogue}.txt", "\n".join(lines) + "\n")


def write_crema_d(root: Path) -> None:
    rows = ['"","FileName","VoiceVote","VoiceLevel","FaceVote","FaceLevel","MultiModalVote","MultiModalLevel"']
    for actor, (emotion, vote) in itertools.product(range(1001, 1092, 3), EMOTIONS.items()):
        name = f"{actor}_DFA_{emotion}_XX"
        write_sound(root / f"CREMA-D/AudioWAV/{name}.wav")
        rows.append(f'"{len(rows)}","{name}","{vote}","60","{vote}","60","{vote}","60"')
    write_text(root / "CREMA-D/processedResults/summaryTable.csv", "\n".join(rows) + "\n")


def write_urbansound8k(root: Path) -> None:
    rows = ["slice_file_name,fsID,start,end,salience,fold,classID,class"]
    for recording in range(120):
        fold, label = 1 + recording % 10, recording // 10 % 6
        name = f"{recording}-{label}-0-0.wav"
        write_sound(root / f"UrbanSound8K/audio/fold{fold}/{name}")
        rows.append(f"{name},{recording},0.0,0.2,1,{fold},{label},class_{label}")
    write_text(root / "UrbanSound8K/metadata/UrbanSound8K.csv", "\n".join(rows) + "\n")


def write_noisy_film(path: Path) -> None:
    """Write three frames of noise, with sound."""
    rng = np.random.default_rng(sum(path.name.encode()))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_film(path, rng.integers(0, 256, (3, 16, 16)).astype(np.uint8), rng.integers(-999, 999, (2400, 1)))


def write_ucf101(root: Path) -> None:
    names = [
        f"{label}/v_{label}_g{number:02d}_c01.avi"
        for label in ("Archery", "BabyCrawling", "Bowling", "Haircut", "Rafting", "Typing")
        for number in range(8)
    ]
    for name in names:
        write_noisy_film(root / "UCF101/UCF-101" / name)
    for fold in (1, 2, 3):
        for split, first in (("test", True), ("train", False)):
            lines = [name for name in names if ("_g00_" in name) == first]
            write_text(root / f"UCF101/ucfTrainTestlist/{split}list0{fold}.txt", "\n".join(lines) + "\n")


def write_activitynet(root: Path) -> None:
    database = {}
    for number in range(48):
        write_noisy_film(root / f"ActivityNet/v_{number}.mkv")
        mark = {"label": f"activity {number % 6}", "segment": [0.0, 0.3]}
        database[str(number)] = {"subset": "validation" if number < 6 else "training", "annotations": [mark]}
    write_text(root / "ActivityNet/activity_net.v1-3.min.json", json.dumps({"database": database}))
