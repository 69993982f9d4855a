"""Measure a federation of millions of clients from a table: start, opening, a round, and memory.

    python benchmarks/population.py                            # 100 and 10,000,000 clients, 1,000,000 with private state
    python benchmarks/population.py --clients 100 1000000 --private 0 --actors 0

The clients share clips of noise. They are written as an Arrow file with an id, a range of clips and a column for the
profile, and a run starts from it like ``raydfl run``. ``--private`` is the number of clients that took part before,
``--cohort`` a round; each has a record of FedPer's last layer. README.md beside this file has the details.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from raydfl import make_config
from raydfl.cluster.server import RemoteServer, Server
from raydfl.core.seeds import generator
from raydfl.core.types import State
from raydfl.data.population import Population
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.networks import build_models
from raydfl.engine.storage.private import PrivateIndex, PrivateStore
from raydfl.engine.storage.store import RunStore
from raydfl.runs.folder import prepare_run
from raydfl.runs.progress import Progress

CLIPS = 1000


def write_table(path: Path, clients: int) -> None:
    """Write the table of clients."""
    number, large = np.arange(clients, dtype=np.int64), pa.large_string()
    padded = pc.utf8_lpad(pa.array(number).cast(large), len(str(clients - 1)), "0")
    ids = pc.binary_join_element_wise(pa.scalar("device", large), padded, pa.scalar("-", large))
    columns = {
        "client": ids,
        "first": number * 7919 % (CLIPS - 32),
        "clips": 8 + number * 31 % 25,
        "room": pa.DictionaryArray.from_arrays((number % 3).astype(np.int8), ["hall", "kitchen", "street"]),
    }
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def configuration(clients: int, folder: Path, arguments: argparse.Namespace) -> Config:
    """Return the configuration of one size of the federation."""
    return make_config(
        {
            "method": {"name": arguments.method},
            "models": {
                "model": {
                    "by": "room",
                    "choices": {
                        room: {"name": "crnn_lite", "kernel": 5}
                        if arguments.network == "crnn_lite"
                        else {"name": "mlp", "hidden": 16}
                        for room in ("hall", "kitchen", "street")
                    },
                }
            },
            "data": {
                "name": f"{Path(__file__).resolve().parent / 'scaling.py'}:Noise",
                "clips": CLIPS,
                "cache": str(folder / "cache"),
                "split": {"test": None},
                "partition": {"by": "table", "file": str(folder / f"clients-{clients}.arrow")},
                "profile": {"room": {"column": "room"}},
                "features": {"sample_rate": 8000, "bands": 64, "window_ms": 25, "hop_ms": 10, "seconds": 1.0},
            },
            "train": {
                "rounds": 10**6,
                "cohort": min(arguments.cohort, clients),
                "batch_size": 16,
                "optimiser": {"lr": 0.01},
                "fleet": {"concurrency": arguments.in_flight, "seconds": {"spread": 1.0}}
                if arguments.in_flight
                else None,
            },
            "evaluate": {"every": 10**6, "server": False, "clients": "none"},
            "ray": {"actors": arguments.actors, "cpus": 1},
            "run": {"dir": str(folder), "name": f"{clients}"},
            "track": {"mlflow": False},
        }
    )


def age(run_dir: Path, config: Config, private: int, cohort: int) -> None:
    """Create a run in which the first ``private`` clients have taken part: a record each, a segment for each round.

    The amount of the index outside the base equals the average over many rounds.
    """
    population = Population.load(run_dir / "population", verify=True)
    method, clients = config.components.method, Clients(population, config)
    models = build_models(method, clients[0].models, config.run.seed)
    state = method.init(clients, [models], generator(config.run.seed, 0, "", "init"))
    kept = {
        f"model:{name}/{key}": value
        for name, model in models.items()
        for key, value in model.state_dict().items()
        if not method.shared(f"{name}/{key}")
    }
    index = PrivateIndex()
    rounds = -(-private // cohort)
    if kept and private:
        store = PrivateStore(run_dir / "private")
        ref = store.append(1, kept)
        store.close()
        first = store.folder / ref.segment
        record = first.read_bytes()
        first.unlink()
        names = tuple(f"{number + 1:06d}-benchmark.seg" for number in range(rounds))
        for name in names:
            (store.folder / name).write_bytes(record * cohort)
        number = np.arange(private, dtype=np.int64)
        table = np.stack(
            [
                number,
                number // cohort,
                number % cohort * len(record),
                0 * number + len(record),
                0 * number + ref.checksum,
            ]
        )
        older = private - private // 32
        for part in (table[:, :older], table[:, older:]):
            used = np.unique(part[1])
            own = part.copy()
            own[1] = np.searchsorted(used, own[1])
            base = index if len(index) else None
            index = PrivateIndex(tuple(names[place] for place in used.tolist()), np.ascontiguousarray(own), base)
    RunStore(run_dir).commit(State(rounds, state.tensors, state.extra), index)
    os.sync()


def open_and_close(run_dir: Path, config: Config) -> None:
    """Open a run in this process, with server and worker."""
    here = config.model_copy(update={"ray": config.ray.model_copy(update={"actors": 0})})
    Server(run_dir, here).close()


def memory() -> tuple[float, float]:
    """Return the peak memory of this process, and its present anonymous memory, in MB."""
    text = Path("/proc/self/status").read_text()
    peak, own = (int(text.split(f"{name}:")[1].split()[0]) / 1024 for name in ("VmHWM", "RssAnon"))
    return peak, own


def run_forked(work: Any) -> tuple[float, float]:
    """Call a function in a separate process; return its processor seconds, and its peak memory in MB."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        started = time.process_time()
        try:
            work()
            os.write(writing, f"{time.process_time() - started} {memory()[0]}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    seconds, peak = map(float, os.read(reading, 200).split())
    os.close(reading)
    return seconds, peak


def processes(run: int) -> Mapping[str, tuple[float, float]]:
    """Return peak memory and own memory in MB of the server and of the largest worker below a process."""
    children: dict[int, list[int]] = {}
    titles: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                titles[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found: dict[str, tuple[float, float]] = {}
    pending = [run]
    while pending:
        process = pending.pop()
        pending += children.get(process, [])
        title = titles.get(process, "")
        name = next((own for own in ("ServerActor", "ClientActor") if own in title), None)
        if name is not None:
            text = Path(f"/proc/{process}/status").read_text()
            peak, own = (int(text.split(f"{kind}:")[1].split()[0]) / 1024 for kind in ("VmHWM", "RssAnon"))
            found[name] = max(found.get(name, (0.0, 0.0)), (peak, own))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 10_000_000])
    parser.add_argument("--private", type=int, default=1_000_000, help="clients that have taken part before")
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument(
        "--in-flight", type=int, default=0, help="clients in flight (train.fleet); 0: synchronous rounds"
    )
    parser.add_argument("--method", default="fedper")
    parser.add_argument("--network", choices=["crnn_lite", "mlp"], default="crnn_lite")
    parser.add_argument("--turns", type=int, default=5, help="timed turns of each size")
    parser.add_argument("--rounds", type=int, default=2, help="rounds in a turn")
    parser.add_argument(
        "--actors", type=int, default=1, help="Ray client actors; 0: everything in this process, without Ray"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = memory()[0]
    print(f"{'this program at its start':44}{'':10}{before:8.0f} MB")
    with tempfile.TemporaryDirectory(prefix="raydfl-benchmark-") as name:
        folder = Path(name)
        servers: dict[int, Server | RemoteServer] = {}
        for clients in arguments.clients:
            config = configuration(clients, folder, arguments)
            run_forked(functools.partial(write_table, folder / f"clients-{clients}.arrow", clients))
            run_dir = folder / str(config.run.name)
            seconds, peak = run_forked(functools.partial(prepare_run, run_dir, config, Progress("quiet")))
            size = sum(file.stat().st_size for file in (run_dir / "population").iterdir())
            print(f"{clients:12,} {'clients: begin':31}{seconds:8.2f} s{peak:9.0f} MB; on the disk {size / 1e6:.0f} MB")
            run_forked(functools.partial(age, run_dir, config, min(arguments.private, clients), arguments.cohort))
            seconds, peak = run_forked(functools.partial(open_and_close, run_dir, config))
            print(f"{clients:12,} {'clients: open':31}{seconds:8.2f} s{peak:9.0f} MB", flush=True)
        if arguments.actors:
            import ray

            ray.init(
                "local",
                num_cpus=arguments.actors * len(arguments.clients),
                include_dashboard=False,
                logging_level="ERROR",
                log_to_driver=False,
            )
        rounds: dict[int, int] = {}
        for clients in arguments.clients:
            config = configuration(clients, folder, arguments)
            run_dir = folder / str(config.run.name)
            server = Server(run_dir, config) if not arguments.actors else RemoteServer(run_dir, config, clients, print)
            started = time.perf_counter()
            rounds[clients] = server.open()[0]
            print(f"{clients:12,} {'clients: open, with actors':31}{time.perf_counter() - started:8.2f} s (wall)")
            servers[clients] = server
        seconds_of: dict[int, list[float]] = {clients: [] for clients in servers}
        for turn in range(-1, arguments.turns):  # the first is for warm-up
            for clients in list(servers) if turn % 2 else list(reversed(servers)):
                clock = time.perf_counter if arguments.actors else time.process_time
                started = clock()
                for _ in range(arguments.rounds):
                    reports = servers[clients].rounds(rounds[clients], rounds[clients] + 1)
                    rounds[clients] = reports[-1].round
                gc.collect()
                if turn >= 0:
                    seconds_of[clients].append((clock() - started) / arguments.rounds)
        first = seconds_of[arguments.clients[0]]
        for clients, own in seconds_of.items():
            ratios = [mine / base for mine, base in zip(own, first, strict=True)]
            spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
            print(
                f"{clients:12,} {'clients: a round':31}{1000 * statistics.median(own):8.0f} ms, of the first {spread}"
            )
        for title, (peak, own_memory) in processes(os.getpid()).items():
            print(f"{title:44}{'':10}{peak:8.0f} MB at most, {own_memory:.0f} MB of its own")
        for server in servers.values():
            server.close()
        print(f"{'this program in all':44}{'':10}{memory()[0]:8.0f} MB")


if __name__ == "__main__":
    main()
