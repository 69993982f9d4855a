"""Network traffic between nodes of a federation with sites contains no client data."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from crossing import Traffic

from raydfl.engine.config import Config

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def make_packet(port: int, sequence: int, payload: bytes) -> bytes:
    tcp = struct.pack("!HHIIBBHHH", port, 80, sequence, 0, 5 << 4, 0, 0, 0, 0)
    size = 20 + len(tcp) + len(payload)
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, size, 0, 0, 64, socket.IPPROTO_TCP, 0, b"\x7f\0\0\1", b"\x7f\0\0\1")
    return ip + tcp + payload + b"\0\0"  # padding of short packets by network cards


def test_payloads_are_found_across_packets_and_retransmissions() -> None:
    traffic = Traffic()
    for port, sequence, payload in [(5, 2**32 - 3, b"abc"), (6, 0, b"xyz"), (5, 0, b"def"), (5, 2**32 - 1, b"cdefgh")]:
        traffic.take(make_packet(port, sequence, payload))
    assert sorted(bytes(stream) for stream in traffic.streams.values()) == [b"abcdefgh", b"xyz"]
    assert traffic.holds(b"cdefg")
    assert not traffic.holds(b"hxyz")  # from different connections


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_only_shared_data_cross_the_network(silos: Callable[..., Config], tmp_path: Path) -> None:
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0).close()
    except PermissionError:
        pytest.skip("reading the network needs the right to")
    # Six takes: shorter sequences of labels occur by chance.
    config = silos("data.takes=6", "ray.actors=1", "train.rounds=3", "train.cohort=9")
    file = tmp_path / "silos.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    process = subprocess.run(
        [sys.executable, str(BENCHMARKS / "crossing.py"), str(file), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    matches = json.loads(process.stdout.splitlines()[-1])
    assert matches["lost"] == 0
    assert matches["equal"]
    count, seen = matches["shared"]
    assert seen == count > 0
    for kind, (count, seen) in matches["private"].items():
        assert count > 5, kind
        assert seen == 0, kind
