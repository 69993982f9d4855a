"""Measure the cost of a pretrained encoder in a federation: bytes and processor time of a round.

The work is the Free Spoken Digit Dataset, 60 clients (each speaker's clips dealt to ten), FedAvg, one epoch, batch 16,
clips of half a second at 16 kHz. The encoder is a small HuBERT with random weights, so the table shows costs but not
accuracy, which needs pretrained weights. Training from scratch is a contestant, too. All contestants are trained in
this process on one thread and alternate every round; reported is the process's own time.

    python benchmarks/pretrained.py --root PATH/TO/fsdd
    python benchmarks/pretrained.py --root PATH/TO/fsdd --folder PATH/TO/wav2vec2-base
    python benchmarks/pretrained.py --root PATH/TO/fsdd --ranks      # accuracy with adapters of unequal ranks, instead of costs
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from raydfl import make_config, read_rows, run
from raydfl.cluster.server import Server
from raydfl.data.build import build_population
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress

LAYERS = 4


def write_encoder(folder: Path) -> None:
    """Write a small HuBERT with random weights, in the format of transformers."""
    import transformers

    torch.manual_seed(0)
    settings = transformers.HubertConfig(
        hidden_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=768,
        conv_dim=(64,) * 7,
        num_conv_pos_embeddings=32,
    )
    transformers.HubertModel(settings).save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)


def contestants(folder: Path, layers: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return features and model of each contestant."""
    front = {"kind": "pretrained", "folder": str(folder), "seconds": 0.5}
    network = {"name": "pretrained", "folder": str(folder)}
    log_mel = {"sample_rate": 8000, "bands": 64, "window_ms": 25, "hop_ms": 10, "seconds": 0.5}
    last = layers - 1
    return {
        "`crnn_base` on log-mel, from scratch": (log_mel, {"name": "crnn_base"}),
        "the encoder, `train: all`": (front, {**network, "train": "all"}),
        "`train: 1`": (front, {**network, "train": 1}),
        f"`train: 1`, `after: {last}`": ({**front, "after": last}, {**network, "train": 1, "after": last}),
        "`lora: {rank: 4}`": (front, {**network, "lora": {"rank": 4}}),
        "`lora: {rank: 16}`": (front, {**network, "lora": {"rank": 16}}),
        "`lora: {rank: 16, fixed_a: true}`": (front, {**network, "lora": {"rank": 16, "fixed_a": True}}),
        f"`lora: {{rank: 16}}`, `after: {last}`": (
            {**front, "after": last},
            {**network, "lora": {"rank": 16}, "after": last},
        ),
        "`train: head`": (front, {**network, "train": "head"}),
        f"`train: head`, `after: {layers}`": ({**front, "after": layers}, {**network, "after": layers}),
        f"`train: head`, `after: {layers}`, pooled": (
            {**front, "after": layers, "pooling": "mean"},
            {**network, "after": layers},
        ),
    }


def list_settings(root: Path, base: Path, name: str, features: Any, model: Any, clients: int) -> dict[str, Any]:
    """Return the settings of the run of one contestant."""
    return {
        "method": "fedavg",
        "models": {"model": model},
        "data": {
            "name": "fsdd",
            "root": str(root),
            "features": features,
            "partition": {"by": "group", "shards": 10},
            "cache": str(base / f"cache-{name}"),
        },
        "train": {"rounds": 100, "cohort": clients / 60, "batch_size": 16, "optimiser": {"lr": 0.01}},
        "evaluate": {"every": 100_000, "server": False, "clients": "none"},
        "ray": {"actors": 0, "threads": 1},
        "run": {"dir": str(base), "name": name},
        "track": {"mlflow": False},
    }


RANKS: dict[str, tuple[int, Any]] = {
    "rank 8 for all": (8, "fedavg"),
    "ranks 2, 4, 8, weighted mean": (8, {"name": "heterofl", "share": "share"}),
    "ranks 2, 4, 8, `product_mean`": (8, {"name": "heterofl", "share": "share", "rule": "product_mean"}),
    "rank 2 for all": (2, "fedavg"),
}
"""Rank of the server's adapters, and method."""


def compare_ranks(given: argparse.Namespace, base: Path, folder: Path) -> Iterator[str]:
    """Train adapters of the last layer with each choice of ranks, and yield the lines of a table: accuracy and lost share."""
    features = {"kind": "pretrained", "folder": str(folder.resolve()), "after": LAYERS - 1, "seconds": 0.5}
    yield f"{given.clients} of 60 clients a round, {given.rounds} rounds; mean and range of {given.seeds} seeds\n"
    yield "| | accuracy of the last evaluation: % | lost share of the norm, last round: % | up a client: kB |"
    yield "|---|---|---|---|"
    for number, (label, (rank, method)) in enumerate(RANKS.items()):
        found: dict[str, list[float]] = {"accuracy": [], "product_mean/lost": [], "bytes_up": []}
        for seed in range(1, given.seeds + 1):
            model = {"name": "pretrained", "folder": str(folder.resolve()), "after": LAYERS - 1, "lora": {"rank": rank}}
            settings = list_settings(given.root, base, "ranks", features, model, given.clients)
            settings["method"] = method
            settings["data"]["profile"] = {"share": {"values": [0.25, 0.5, 1.0]}}
            settings["train"] |= {
                "rounds": given.rounds,
                "together": given.clients,
                "optimiser": {"name": "adam", "lr": 0.01},
            }
            settings["evaluate"] = {"every": given.rounds, "clients": "none"}
            settings["run"] = {"dir": str(base), "name": f"{number}-{seed}", "seed": seed}
            config = make_config(settings)
            rows = [row for row in read_rows(run(config).run_dir).to_pylist() if not row["client"]]
            for metric in found:
                found[metric] += [row["value"] for row in rows if row["metric"].endswith(metric)][-1:]
        accuracy = [100 * value for value in found["accuracy"]]
        lost = [100 * value for value in found["product_mean/lost"]]
        shown = f"{statistics.mean(lost):.1f} ({min(lost):.1f} to {max(lost):.1f})" if lost else "-"
        score = f"{statistics.mean(accuracy):.1f} ({min(accuracy):.1f} to {max(accuracy):.1f})"
        yield f"| {label} | {score} | {shown} | {statistics.mean(found['bytes_up']) / given.clients / 1000:.1f} |"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, required=True, help="the Free Spoken Digit Dataset")
    parser.add_argument(
        "--folder", type=Path, help="of an encoder; by default a small one with random weights is written"
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of each, after one for warm-up")
    parser.add_argument("--clients", type=int, default=3, help="a round")
    parser.add_argument("--only", default="", help="measure only contestants with this text in their names")
    parser.add_argument("--ranks", action="store_true", help="accuracy with unequal ranks, in --rounds rounds")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of --ranks")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="raydfl-pretrained-") as temporary:
        base = Path(temporary)
        folder = given.folder or base / "encoder"
        if given.folder is None:
            write_encoder(folder)
        if given.ranks:
            print("\n".join(compare_ranks(given, base, folder)))
            return
        from raydfl.core.pretrained import read_encoder_folder

        every = contestants(folder.resolve(), read_encoder_folder(folder).layers)
        named = {label: contestant for label, contestant in every.items() if given.only in label}
        servers, prepared, kept = [], [], []
        for number, (features, model) in enumerate(named.values()):
            config = make_config(list_settings(given.root, base, str(number), features, model, given.clients))
            began = time.process_time()
            build_population(config.data, config.run.seed, run_chunks=map)  # in this process, whose time is measured
            prepared.append(time.process_time() - began)
            run = create(config, Progress("quiet"))
            kept.append(sum(file.stat().st_size for file in (base / f"cache-{number}").rglob("*.npy")))
            servers.append((run, Server(run, config)))
        times: list[list[float]] = [[] for _ in servers]
        for round_number in range(1 + given.rounds):
            for spent, (_, server) in zip(times, servers, strict=True):
                began = time.process_time()
                server.round()
                if round_number:
                    spent.append(time.process_time() - began)
        print(f"{given.clients} clients a round, {given.rounds} rounds each in turns, medians\n")
        print("| | features, once: s | features: MB | a round: s | down a client: kB | up a client: kB |")
        print("|---|---|---|---|---|---|")
        for label, once, size, spent, (run, server) in zip(named, prepared, kept, times, servers, strict=True):
            server.close()
            rows = [row for row in read_rows(run).to_pylist() if row["phase"] == "train" and not row["client"]]
            down, up = (
                statistics.median(row["value"] for row in rows if row["metric"] == name) / given.clients / 1000
                for name in ("bytes_down", "bytes_up")
            )
            print(
                f"| {label} | {once:.1f} | {size / 1e6:.0f} | {statistics.median(spent):.2f} | {down:,.1f} | {up:,.1f} |"
            )


if __name__ == "__main__":
    main()
