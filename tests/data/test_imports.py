"""``raydfl data import`` lists recordings of other formats for the data set ``manifest``."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from commands import Raydfl

from raydfl.core.registry import build
from raydfl.data.build import build_population
from raydfl.data.dataset import find_dataset
from raydfl.data.sets.manifest import Manifest
from raydfl.data.settings import DataSettings

PACKED = Path(__file__).parent / "packed"
sys.path.insert(0, str(PACKED))
from write import CLIPS, RATE, encode, make_tone

SETS: dict[str, tuple[str, dict[str, Any]]] = {
    "webdataset": ("webdataset", {"names": ["hum", "whistle"], "group_column": "speaker"}),
    "huggingface": ("hub", {"group_column": "speaker"}),
    "lhotse": ("lhotse", {}),
}


def write_audiofolder(root: Path, text: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for label, take in CLIPS:
        (root / f"{label}_{take}.wav").write_bytes(encode(make_tone(label, take), "WAV"))
    (root / "metadata.csv").write_text(text)
    return root


@pytest.mark.parametrize("out", ["list.csv", "list.parquet"])
@pytest.mark.parametrize("kind", SETS)
def test_an_imported_list_has_the_same_clips_as_the_data_set(
    raydfl: Raydfl, tmp_path: Path, kind: str, out: str
) -> None:
    """Oracle: the data set of the same format, compared sample by sample."""
    folder, options = SETS[kind]
    dataset = build(find_dataset(kind), {"root": PACKED / folder, **options}, "data")
    names = [f"names={json.dumps(options['names'])}"] if "names" in options else []
    result = raydfl("data", "import", kind, PACKED / folder, "--out", tmp_path / out, *names)
    assert result.code == 0, result.err
    assert "clients are taken from speaker. Choose a different column with --client COLUMN" in result.out
    imported = Manifest(file=tmp_path / out)
    rows = imported.manifest().to_pylist()
    for row, expected in zip(rows, dataset.manifest().to_pylist(), strict=True):
        assert {name: row[name] for name in ("path", "label", "group", "split")} == {
            name: expected[name] for name in ("path", "label", "group", "split")
        }
        assert row["label"] is not None
        assert row["group"] is not None
        assert np.array_equal(imported.read(row)[0], dataset.read(expected)[0])
    assert len({(row["path"], imported.part(row)) for row in rows}) == len(rows), "the cache keys must be unique"


def test_an_imported_list_has_the_same_features_as_the_data_set(raydfl: Raydfl, tmp_path: Path) -> None:
    """Oracle: the data set ``huggingface`` on the same recordings."""
    assert raydfl("data", "import", "huggingface", PACKED / "hub", "--out", tmp_path / "list.parquet").code == 0
    common: dict[str, Any] = {
        "cache": tmp_path / "cache",
        "features": {"sample_rate": RATE, "bands": 8, "seconds": 0.05},
        "partition": {"by": "iid", "clients": 2},
    }
    stores = [
        build_population(DataSettings(**common, **options), seed=0).stores[0]
        for options in (
            {"name": "huggingface", "root": PACKED / "hub"},
            {"name": "manifest", "file": tmp_path / "list.parquet"},
        )
    ]
    for number in range(len(CLIPS)):
        assert np.array_equal(stores[0].clip(number), stores[1].clip(number))


def test_an_imported_list_moves_with_its_recordings(raydfl: Raydfl, tmp_path: Path) -> None:
    """The archive has unusual member names, and a second recording of the sample for ``data.views``."""
    (tmp_path / "old").mkdir()
    with tarfile.open(tmp_path / "old" / "a.tar", "w") as archive:
        for name, content in {
            "./x/../take#1.left.wav": encode(make_tone(0, 0), "WAV"),
            "./x/../take#1.right.wav": encode(make_tone(1, 0), "WAV"),
            "./x/../take#1.cls": b"hum",
        }.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    out = tmp_path / "old" / "list.parquet"
    assert raydfl("data", "import", "webdataset", tmp_path / "old", "--out", out, "audio_field=left.wav").code == 0
    (tmp_path / "old").rename(tmp_path / "new")
    imported = Manifest(file=tmp_path / "new" / "list.parquet")
    (row,) = imported.manifest().to_pylist()
    other = row | {"path": imported.file_of(row, "right.wav")}
    for label, entry in enumerate((row, other)):
        assert np.abs(imported.read(entry)[0][:, 0] - make_tone(label, 0)).max() < 2 / 32768


def test_an_audiofolder_is_labelled_by_a_list_or_by_folders(raydfl: Raydfl, tmp_path: Path) -> None:
    lines = [f"{label}_{take}.wav,{'ab'[label]},{take}" for label, take in CLIPS]
    root = write_audiofolder(tmp_path / "listed", "\n".join(["file_name,label,speaker_id", *lines]))
    result = raydfl("data", "import", "audiofolder", root, "--out", tmp_path / "listed.csv")
    assert "8 clips of 2 classes and 4 clients" in result.out
    assert "clients are taken from speaker_id" in result.out
    with (tmp_path / "listed.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["path"], row["label"], row["group"]) for row in rows} == {
        (f"listed/{label}_{take}.wav", "ab"[label], str(take)) for label, take in CLIPS
    }
    for label, take in CLIPS:
        path = tmp_path / "classes" / "ab"[label] / f"s{take}-0.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(make_tone(label, take), "WAV"))
    pattern = "group_pattern=(?P<group>s[0-9])-"
    result = raydfl("data", "import", "audiofolder", tmp_path / "classes", "--out", tmp_path / "c.csv", pattern)
    assert "8 clips of 2 classes and 4 clients" in result.out


def test_several_candidate_client_columns_require_a_choice(raydfl: Raydfl, tmp_path: Path) -> None:
    lines = [f"{label}_{take}.wav,{'ab'[label]},{take},c{label},r0" for label, take in CLIPS]
    root = write_audiofolder(tmp_path / "set", "\n".join(["file_name,label,speaker_id,client_id,room", *lines]))
    command = ("data", "import", "audiofolder", root, "--out")
    raydfl(*command, tmp_path / "0.csv").refuses(
        r"the columns client_id, speaker_id .*Choose a column with --client COLUMN"
    )
    for client, count in (("client_id", 2), ("speaker_id", 4), ("room", 1), ("none", 0)):
        out = tmp_path / f"{client}.csv"
        result = raydfl(*command, out, "--client", client)
        assert f"8 clips of 2 classes and {count} clients" in result.out
        groups = Manifest(file=out).manifest().column("group")
        assert len(set(groups.to_pylist()) - {None}) == count
    raydfl(*command, tmp_path / "1.csv", "--client", "sex").refuses(
        r"no clip has a field 'sex' \(--client\). Choose one of "
    )


def test_impossible_imports_are_rejected(raydfl: Raydfl, tmp_path: Path) -> None:
    pq.write_table(pa.table({"audio": [encode(make_tone(0, 0))], "word": ["yes"]}), tmp_path / "rows.parquet")
    (tmp_path / "there.csv").touch()

    def run(kind: str = "huggingface", source: str = "rows.parquet", out: str = "list.csv", *options: str) -> Any:
        return raydfl("data", "import", kind, tmp_path / source, "--out", tmp_path / out, *options)

    run("webdatset").refuses(r"unknown format 'webdatset'. Did you mean 'webdataset'\?")
    run(out="list.txt").refuses(r"list\.txt: the name must end in \.csv or \.parquet")
    run(out="there.csv").refuses(r"there\.csv: the file exists already")
    run(source="none").refuses(r"the root .*none does not exist")
    run().refuses(r"no clip has a field 'label' \(label_column\). Choose one of word")
    run("huggingface", "rows.parquet", "list.csv", "labels=word").refuses(r"unknown key 'labels' for HuggingFace")
    assert run("huggingface", "rows.parquet", "list.csv", "label_column=word").code == 0
    assert (tmp_path / "list.csv").is_file()


def test_a_channel_of_a_file_is_a_clip(tmp_path: Path) -> None:
    waves = np.stack([make_tone(0, 0), make_tone(1, 0)], axis=1)
    soundfile.write(tmp_path / "a.wav", waves, RATE, subtype="FLOAT")
    (tmp_path / "list.csv").write_text(
        "path,label,file_channel\n" + "".join(f"a.wav,x,{c}\n" for c in ("0", "1", "", "2"))
    )
    dataset = Manifest(file=tmp_path / "list.csv")
    rows = dataset.manifest().to_pylist()
    assert [row["clip"] for row in rows] == ["a.wav#0", "a.wav#1", "a.wav", "a.wav#2"]
    for row, expected in zip(rows[:3], (waves[:, :1], waves[:, 1:], waves), strict=True):
        assert np.array_equal(dataset.read(row)[0], expected)
    with pytest.raises(
        Exception, match=r"a\.wav: the clip needs channel 2, counted from 0, but the file has 2 channels"
    ):
        dataset.read(rows[3])


_MEASURED = """
import atexit, pathlib, runpy, sys
peak = lambda: pathlib.Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
atexit.register(lambda: print(peak(), file=sys.stderr))
runpy.run_module("raydfl", run_name="__main__")
"""
"""Runs raydfl and prints its peak memory in kB. ``ru_maxrss`` would include the memory of the process that starts it."""


@pytest.mark.slow
def test_importing_50_gigabytes_needs_less_than_one_gigabyte_of_memory(tmp_path: Path) -> None:
    """Sparse shards have the size of long recordings but occupy no disk space."""
    size, shards = 100 << 20, tmp_path / "shards"
    shards.mkdir()
    head = encode(make_tone(*CLIPS[0]), "WAV")
    for shard in range(5):
        with (shards / f"sounds-{shard}.tar").open("wb") as file:
            for clip in range(100):
                label = json.dumps({"label": "hum", "speaker": f"{clip % 7}"}).encode()
                for ending, content, length in (("json", label, len(label)), ("wav", head, size)):
                    member = tarfile.TarInfo(f"{shard}-{clip}.{ending}")
                    member.size = length
                    file.write(member.tobuf(tarfile.GNU_FORMAT) + content)
                    file.seek(length - len(content) + -length % tarfile.BLOCKSIZE, os.SEEK_CUR)
            file.write(bytes(2 * tarfile.BLOCKSIZE))
    assert sum(file.stat().st_size for file in shards.iterdir()) > 50e9
    out = tmp_path / "list.csv"
    words = ["data", "import", "webdataset", str(shards), "--client", "speaker", "--out", str(out)]
    process = subprocess.run([sys.executable, "-c", _MEASURED, *words], capture_output=True, text=True, check=True)
    assert int(process.stderr.split()[-1]) < 1e6, "kB"
    with out.open() as file:
        assert sum(1 for _ in csv.DictReader(file)) == 500
