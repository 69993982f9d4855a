"""Read and search every byte that crosses the network between the nodes of a federation over sites.

    python benchmarks/crossing.py jobs/silos.yaml

It starts a Ray of three nodes on this machine (a head, and one for each of two sites), and reads all TCP traffic of the
machine during the run. It searches the traffic for everything that must not leave a site: waves, features, labels,
names of clips, private tensors. As a control, it must find the shared tensors, which do cross. It needs permission to
read the network (root).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_WINDOW = 64
"""Bytes to search for from each private object: enough to exclude matches by chance."""


@dataclass
class Traffic:
    """Captured bytes, in order, by connection and direction."""

    streams: dict[tuple[bytes, bytes, int, int], bytearray] = field(default_factory=dict)
    following: dict[tuple[bytes, bytes, int, int], int] = field(default_factory=dict)
    lost: int = 0
    """Packets dropped by the kernel."""

    def take(self, packet: bytes) -> None:
        """Add one IPv4 packet."""
        if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            return
        start = 4 * (packet[0] & 15)
        source, target, sequence = struct.unpack_from("!HHI", packet, start)
        payload = packet[start + 4 * (packet[start + 12] >> 4) : struct.unpack_from("!H", packet, 2)[0] or len(packet)]
        if not payload:
            return
        key = (packet[12:16], packet[16:20], source, target)
        early = (self.following.get(key, sequence) - sequence) % 2**32
        if 0 < early < 2**31:  # a retransmission
            payload = payload[early:]
            sequence += early
        if payload:
            self.streams.setdefault(key, bytearray()).extend(payload)
            self.following[key] = (sequence + len(payload)) % 2**32

    def holds(self, value: bytes) -> bool:
        """Return whether these bytes crossed consecutively."""
        return any(value in stream for stream in self.streams.values())


@contextlib.contextmanager
def capture_traffic() -> Iterator[Traffic]:
    """Capture all TCP traffic of this machine with itself while the block runs.

    Raises:
        PermissionError: This process may not read the network.
    """
    traffic = Traffic()
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800)) as wire:
        with contextlib.suppress(PermissionError):
            wire.setsockopt(socket.SOL_SOCKET, 33, 256 << 20)  # SO_RCVBUFFORCE
        wire.settimeout(0.2)
        ended = threading.Event()

        def listen() -> None:
            while True:
                try:
                    packet, address = wire.recvfrom(1 << 17)
                except TimeoutError:
                    if ended.is_set():
                        return
                    continue
                if address[2] != socket.PACKET_OUTGOING:  # else each packet would be captured twice
                    traffic.take(packet)

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield traffic
        finally:
            ended.set()
            thread.join()
            _, traffic.lost = struct.unpack("II", wire.getsockopt(263, 6, 8))  # SOL_PACKET, PACKET_STATISTICS


def find_private_pieces(config: Any, run_dir: Path) -> dict[str, list[bytes]]:
    """Return pieces of everything that must not leave a site, by kind: training clips and private tensors."""
    from raydfl.cluster.sites import place_folder
    from raydfl.data import list_clips
    from raydfl.data.population import Population

    found: dict[str, list[bytes]] = {
        "waves": [],
        "features": [],
        "labels": [],
        "names of clips": [],
        "private tensors": [],
    }
    for site in config.data.sites:
        settings, folder = config.data.select_site(site), place_folder(config, run_dir, site)
        manifest, _ = list_clips(settings, 1)
        source = settings.source.open()
        own = Population.load(folder / "population")
        rows = manifest.to_pylist()
        for index in range(len(own)):
            examples = own.data(index).train
            found["labels"] += [np.asarray(examples.labels, kind).tobytes() for kind in (np.int64, np.int32)]
            for number in range(len(examples)):
                row = rows[int(examples.clips[number])]
                wave, _ = source.read(row)
                middle = len(wave) // 2
                found["waves"] += [
                    _middle(wave),
                    np.round(wave[middle : middle + 32, 0] * 32767).astype(np.int16).tobytes(),
                ]
                view = examples.first_view
                start = int(view.starts[number])
                found["features"].append(_middle(view.store.frames[start : start + int(view.counts[number])]))
                found["names of clips"].append(str(row["clip"]).encode())
        for path in sorted((folder / "private").glob("*.seg")):
            content = path.read_bytes()
            found["private tensors"] += [
                content[at : at + _WINDOW] for at in range(4096, len(content) - _WINDOW, 1 << 12)
            ]
    # Silence or a single label could match anything.
    least = {"labels": 2}
    return {
        kind: [value for value in values if len(set(value)) >= least.get(kind, 5)] for kind, values in found.items()
    }


def _middle(values: np.ndarray) -> bytes:
    content = np.ascontiguousarray(values).tobytes()
    return content[len(content) // 2 : len(content) // 2 + _WINDOW]


def find_shared_pieces(run_dir: Path) -> list[bytes]:
    """Return pieces of the last tensors sent by the server: its state before the last round."""
    from raydfl.engine.storage.store import RunStore

    store = RunStore(run_dir)
    tensors = store.load(store.commits()[-2]).state.tensors["global"]
    pieces = [tensor.numpy().tobytes()[:_WINDOW] for tensor in tensors.values()]
    return [piece for piece in pieces if len(set(piece)) > 16]


def measure(file: Path, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run the job on three nodes and without Ray, and search the traffic."""
    token = folder / "token"
    token.write_text("for-this-benchmark-only-0123456789")
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    os.environ.pop("RAY_ADDRESS", None)
    from ray.cluster_utils import Cluster

    from raydfl.engine.config import load_config
    from raydfl.runs._run import run

    def configure(name: str, *more: str) -> Any:
        folders = [f"data.sites.{site}.folder={folder / name / site}" for site in sites]
        return load_config(file, [*overrides, f"run.dir={folder / 'runs'}", f"run.name={name}", *folders, *more])

    sites = list(load_config(file, overrides).data.sites)
    run(configure("alone", "ray.actors=0"))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        for site in sites:
            cluster.add_node(num_cpus=2, resources={f"site:{site}": 1}, object_store_memory=100 << 20)
        config = configure("nodes", f"ray.address={cluster.address}")
        with capture_traffic() as traffic:
            run(config)
    finally:
        cluster.shutdown()
    run_dir = folder / "runs" / "nodes"
    private, shared = find_private_pieces(config, run_dir), find_shared_pieces(run_dir)
    return {
        "bytes": sum(map(len, traffic.streams.values())),
        "lost": traffic.lost,
        "private": {kind: [len(v), sum(traffic.holds(value) for value in v)] for kind, v in private.items()},
        "shared": [len(shared), sum(traffic.holds(value) for value in shared)],
        "equal": _latest(folder / "runs" / "alone") == _latest(run_dir),
    }


def _latest(run_dir: Path) -> Mapping[str, bytes]:
    from raydfl.engine.storage.folder import final_state

    groups = final_state(run_dir).tensors
    return {f"{key} {name}": t.numpy().tobytes() for key, tensors in groups.items() for name, t in tensors.items()}


def main() -> None:
    """Print the table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0).close()
    except PermissionError:
        print("reading the network needs the right to (root, or CAP_NET_RAW)", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory(prefix="rdx") as name:
        found = measure(arguments.file, arguments.overrides, Path(name))
    if arguments.json:
        print(json.dumps(found))
        return
    print(
        f"{found['bytes'] / 1e6:.1f} MB passed between processes and nodes; {found['lost']} packets were lost to the search"
    )
    print("| | pieces looked for | found |\n|---|---|---|")
    for kind, (count, seen) in found["private"].items():
        print(f"| {kind} | {count} | {seen} |")
    print(f"| shared tensors, which do cross | {found['shared'][0]} | {found['shared'][1]} |")
    print("global model equal to the run without Ray:", "yes" if found["equal"] else "NO")


if __name__ == "__main__":
    main()
