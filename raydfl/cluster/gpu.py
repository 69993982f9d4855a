"""Memory of client actors: measure the need of an actor on a GPU and on its node, and derive each actor's share of a GPU."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from raydfl.cluster.faults import unwrap_error
from raydfl.cluster.queue import find_lasting_shortage
from raydfl.cluster.resources import ActorKind, format_gib
from raydfl.cluster.run_files import RunFiles, share_files
from raydfl.cluster.sites import open_serial_pool
from raydfl.core.errors import ConfigError, ResourcesError
from raydfl.core.files import default_cache
from raydfl.core.memory import read_memory_limit
from raydfl.data import Population
from raydfl.engine import Clients, Config, Federation, RaySettings, compute_kept_bytes, keys_of, measure_once
from raydfl.engine.storage import RunStore

CONTEXT = 512 << 20
"""Bytes of a CUDA context: GPU memory that each process needs in addition to PyTorch's allocations."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Measured memory of a client actor on a GPU or a node."""

    device: str
    """Name of the device."""
    total: int
    """Memory of the device in bytes."""
    peak: int
    """Peak memory of an actor in bytes, including its CUDA context."""

    @property
    def slots(self) -> int:
        """Maximum number of actors on the device."""
        return self.total // self.peak


class Device(Protocol):
    """A device with memory for client actors."""

    def name(self) -> str:
        """Return the name of the device."""
        ...

    def total(self) -> int:
        """Return the memory of the device in bytes."""
        ...

    def peak(self, work: Callable[[], None]) -> int:
        """Measure the peak memory of some work in bytes."""
        ...


class NodeMemory:
    """The memory of this node, for work of this process on a device."""

    def __init__(self, where: str) -> None:
        """Choose the device of the work.

        Args:
            where: PyTorch's name of the device. CUDA's libraries take memory of the node too.
        """
        self._where = where

    def name(self) -> str:
        """Return the name of the node's memory."""
        return f"memory of a node, work on {self._where}"

    def total(self) -> int:
        """Return the memory of the machine or its container in bytes."""
        return read_memory_limit()

    def peak(self, work: Callable[[], None]) -> int:
        """Measure the peak resident memory of this process in bytes, since its start."""
        work()
        # Not getrusage, because its maximum includes the process that started this process.
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10


class CudaDevice:
    """The current CUDA device and its memory."""

    def name(self) -> str:
        """Return PyTorch's name of the device."""
        return torch.cuda.get_device_name()

    def total(self) -> int:
        """Return the memory of the device in bytes."""
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory

    def peak(self, work: Callable[[], None]) -> int:
        """Measure the peak memory of some work in bytes, on a GPU without other processes.

        The result includes memory outside PyTorch's allocator, but at least :data:`CONTEXT`.
        """
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        return torch.cuda.max_memory_reserved() + max(total - free - reserved, CONTEXT)


def compute_memory_fraction(gpus: float, total: int) -> float:
    """Compute the fraction of a GPU's memory for PyTorch's allocator: the actor's share minus the CUDA context.

    Args:
        gpus: The actor's share, above 0. From 1, the fraction is 1.
        total: Memory of the GPU in bytes.

    Raises:
        ResourcesError: The share is not larger than the CUDA context.
    """
    if gpus >= 1:
        return 1.0
    left = gpus - CONTEXT / total
    if left <= 0:
        raise ResourcesError(
            f"ray.gpus={gpus:g} of a GPU with {format_gib(total)} is {format_gib(gpus * total)}, but the CUDA context alone needs "
            f"{format_gib(CONTEXT)}. Raise ray.gpus, or set it to auto."
        )
    return left


_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Minimum version of the NVIDIA driver for each major version of CUDA."""


def read_driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Read the version of this node's NVIDIA driver; empty without a driver."""
    try:
        match = re.search(r"\b\d{3,}(\.\d+)+\b", file.read_text(errors="replace"))
    except OSError:
        return ""
    return match[0] if match else ""


def explain_missing_gpu(driver: str | None = None, cuda: str | None = torch.version.cuda) -> str:
    """Explain why PyTorch finds no GPU on this node, and name the software to install.

    Args:
        driver: Version of the NVIDIA driver; empty: no driver; ``None``: the driver of this node.
        cuda: CUDA version of the PyTorch build; ``None``: a build without CUDA.
    """
    driver = read_driver_version() if driver is None else driver
    build = f"PyTorch {torch.__version__} is built {f'for CUDA {cuda}' if cuda else 'without CUDA'}"
    state = f"{socket.gethostname()} has {f'NVIDIA driver {driver}' if driver else 'no NVIDIA driver'}, and {build}"
    if cuda is None:
        return f"{state}. Install PyTorch with CUDA on this node"
    needed = _DRIVERS.get(int(cuda.partition(".")[0]), max(_DRIVERS.values()))
    has = int(driver.partition(".")[0] or 0)
    if has >= needed:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        return f"{state}, so the driver fits. Check the node with nvidia-smi, and CUDA_VISIBLE_DEVICES ({visible})"
    older = [version for version, least in _DRIVERS.items() if has >= least]
    alternative = f", or PyTorch for CUDA {max(older)}" if older else ""
    return f"{state}. Install NVIDIA driver {needed} or newer on this node{alternative}"


def hide_gpus() -> None:
    """Hide all GPUs from this process. Call it before the process uses CUDA."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def compute_share(memory: Memory, settings: RaySettings, gpus: int | None) -> float:
    """Compute the share of a GPU for each actor: 1 / slots, rounded down to Ray's resolution of 0.0001.

    Args:
        memory: Measured need of an actor.
        settings: The number of actors.
        gpus: GPUs of the cluster; ``None``: unknown, because the cluster grows.

    Raises:
        ResourcesError: The actors do not fit on the GPUs.
    """
    need = f"{format_gib(memory.peak)} of a GPU ({memory.device}, {format_gib(memory.total)})"
    measurement = f"a client actor needs {need}, measured on the largest client"
    slots = memory.slots
    if slots == 0:
        raise ResourcesError(
            f"{measurement}: no actor fits. Lower train.batch_size, evaluate.batch_size or train.together."
        )
    actors = settings.actors
    if gpus is not None and isinstance(actors, int) and actors > slots * gpus:
        raise ResourcesError(
            f"{measurement}: {slots} fit on a GPU and {slots * gpus} on the cluster's {gpus}, but ray.actors={actors}. Lower "
            f"ray.actors, train.batch_size or train.together."
        )
    return math.floor(10_000 / slots) / 10_000


def measure_memory(run_dir: Path, config: Config, device: Device, where: str, files: RunFiles | None = None) -> Memory:
    """Measure the memory of a client actor on the orders of the next round with the largest memory footprint.

    The cache folder stores the result for equal settings and devices.

    Args:
        run_dir: Folder of the run. It is not changed.
        config: Configuration of the run.
        device: The device to measure.
        where: PyTorch's name of the device of the work.
        files: Location of the run's files; ``None``: this node has them.

    Raises:
        ResourcesError: The work of a single client does not fit.
    """
    train, evaluate = config.train, config.evaluate
    # The data settings are part of the key because features may be stored on the GPU.
    work = (config.components.method, config.components.models, config.data.model_dump_json(exclude={"cache"}))
    batches = (train.batch_size, train.together, train.optimiser, train.precision, evaluate.batch_size)
    kind = (work, batches, device.name(), device.total(), torch.__version__)
    path = (config.data.cache or default_cache()) / "actor_memory.json"

    def measure_peak() -> int:
        try:
            return device.peak(lambda: _run_heaviest(run_dir, config, where, files))
        except torch.OutOfMemoryError as error:
            raise ResourcesError(
                f"the work of one client does not fit on a whole GPU ({device.name()}, {format_gib(device.total())}): {error}. "
                f"Lower train.batch_size, evaluate.batch_size or train.together."
            ) from error

    return Memory(device.name(), device.total(), measure_once(path, kind, measure_peak))


def _run_heaviest(run_dir: Path, config: Config, where: str, files: RunFiles | None) -> None:
    """Carry out the next round's orders with the largest memory footprint, in a temporary copy of the run."""
    with tempfile.TemporaryDirectory(prefix="raydfl-slots-") as name:
        scratch, store = RunStore(Path(name)), RunStore(run_dir)
        latest = store.latest()
        if latest is not None:
            commit = store.load(latest)
            scratch.together, scratch.block = commit.together, commit.block
            scratch.commit(commit.state, commit.private)
        load = functools.partial(Population.load, run_dir / "population")
        population = load() if files is None else files.load_population(run_dir, config)
        pool = open_serial_pool(run_dir, config, population, Path(name) / "private", where, files)
        with contextlib.closing(pool), contextlib.closing(Federation(config, population, scratch, pool)) as federation:
            for orders in federation.find_heaviest():
                list(pool.run(orders, federation.broadcast(keys_of(orders))))


def _count_kept_bytes(run_dir: Path, config: Config) -> int:
    """Count the bytes of updates that a client actor keeps between the passes of a rule."""
    store, clients = RunStore(run_dir), Clients(Population.load(run_dir / "population"), config)
    latest = store.latest()
    return compute_kept_bytes(config, clients, None if latest is None else store.load(latest).block)


class _Probe:
    """An actor that measures the memory of a client actor. It is alone on its GPU for the measurement of GPU memory."""

    def memory(self, run_dir: str, config: Config, files: RunFiles) -> Memory:
        """Measure the memory of a client actor on this actor's GPU."""
        if not torch.cuda.is_available():
            raise ResourcesError(
                f"ray.gpus: auto needs a GPU for PyTorch: {explain_missing_gpu()}, or set ray.gpus=0 for the CPU."
            )
        return measure_memory(Path(run_dir), config, CudaDevice(), "cuda", files)

    def resident_memory(self, run_dir: str, config: Config, files: RunFiles) -> Memory:
        """Measure the memory of a client actor on its node."""
        where = "cuda" if config.ray.gpus and torch.cuda.is_available() else "cpu"
        return measure_memory(Path(run_dir), config, NodeMemory(where), where, files)


def resolve_auto(run_dir: Path, config: Config, tell: Callable[[str], None]) -> Config:
    """Replace ``auto`` in ``ray.gpus`` and ``ray.memory`` by measured amounts. Connect to Ray first.

    Args:
        run_dir: Folder of the run.
        config: Configuration of the run.
        tell: Shows a message with each measurement.

    Raises:
        ConfigError: The data are at sites, so that the memory cannot be measured here.
        ResourcesError: The cluster has no GPU, or the actors do not fit.
    """
    settings = config.ray
    measured = [name for name in ("gpus", "memory") if getattr(settings, name) == "auto"]
    setting = f"ray.{measured[0]}: auto"
    example = "a share such as 0.25" if "gpus" in measured else "a size such as 2 GiB"
    if config.data.sites:
        raise ConfigError(
            f"{setting} cannot be measured with data.sites, because the data stay at the sites. Set {example}."
        )
    gpus: float = ray.cluster_resources().get("GPU", 0.0)  # type: ignore[no-untyped-call]
    if "gpus" in measured and gpus < 1 and not settings.autoscale:
        raise ResourcesError(
            f"ray.gpus: auto needs a whole GPU for the measurement, but the cluster has {gpus:g}. Set ray.gpus=0 for the CPU, or "
            f"a share such as 0.25."
        )
    if shortage := find_lasting_shortage([ActorKind(settings.cpus, settings.gpu_share)]):
        tell(f"Waiting for {shortage} used by other actors.")
    probe: Any = ray.remote(_Probe).options(num_cpus=settings.cpus, num_gpus=settings.gpu_share).remote()
    files = share_files(run_dir, config, tell)
    found: dict[str, Memory] = {}
    try:
        for name in measured:
            method = probe.memory if name == "gpus" else probe.resident_memory
            limit = None if settings.autoscale else 600 + settings.ready_timeout
            found[name] = ray.get(method.remote(str(run_dir), config, files), timeout=limit)
    except RayTaskError as error:
        raise unwrap_error(error) from error
    except GetTimeoutError:
        raise ResourcesError(
            f"{setting}: no {'GPU' if settings.gpus else 'CPU'} became free within {settings.ready_timeout:g} s. Wait for other "
            f"runs, or set {example}."
        ) from None
    except RayError as error:
        raise ResourcesError(
            f"{setting}: the measuring actor was lost: {type(error).__name__}. Set {example}."
        ) from error
    finally:
        ray.kill(probe)
    amounts: dict[str, float] = {}
    for name, memory in found.items():
        if name == "memory":
            kept = _count_kept_bytes(run_dir, config)
            amounts[name] = memory.peak + kept
            part = f", {format_gib(kept)} of it for the updates between the passes of the rule" if kept else ""
            tell(f"A client actor needs {format_gib(memory.peak + kept)} of its node's memory{part}, and reserves it.")
            continue
        share = amounts[name] = compute_share(memory, settings, None if settings.autoscale else int(gpus))
        tell(
            f"A client actor needs {format_gib(memory.peak)} of {format_gib(memory.total)} ({memory.device}). {memory.slots} fit "
            f"on a GPU, and each reserves {share:g} of it."
        )
    return config.model_copy(update={"ray": settings.model_copy(update=amounts)})
