"""GPUs: who may use one, how much of its memory, and how much a piece of work needs."""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from raydfl.cluster.faults import task_cause
from raydfl.cluster.sites import open_serial_pool
from raydfl.core.errors import ConfigError, ResourcesError
from raydfl.core.files import default_cache
from raydfl.data import Population
from raydfl.engine import Config, Federation, RaySettings, keys_of, measure_once
from raydfl.engine.storage import RunStore

CONTEXT = 512 << 20
"""Bytes of a GPU's memory that a process takes before it has computed anything, and that PyTorch's cap does not count."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that one actor needs of a GPU."""

    device: str
    """The GPU's name."""
    total: int
    """Bytes that the GPU has."""
    peak: int
    """Bytes that an actor needs at most, its CUDA context included."""

    @property
    def slots(self) -> int:
        """Return how many actors fit on the GPU."""
        return self.total // self.peak


class CudaDevice:
    """The current CUDA device, whose memory can be measured."""

    def name(self) -> str:
        """Return its name, as PyTorch calls it."""
        return torch.cuda.get_device_name()

    def total(self) -> int:
        """Return its memory in bytes."""
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory

    def peak(self, work: Callable[[], None]) -> int:
        """Return what PyTorch's allocator held at most, and what else is in use on a GPU that this process has for itself."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        held = torch.cuda.memory_reserved()
        return torch.cuda.max_memory_reserved() + max(total - free - held, CONTEXT)


def cap(gpus: float, total: int) -> float:
    """Return the share of a GPU's memory that PyTorch may allocate in an actor: its share without the CUDA context.

    Args:
        gpus: the actor's share, above 0; whole GPUs have no cap.
        total: bytes that the GPU has.

    Raises:
        ResourcesError: the context alone fills the share.
    """
    if gpus >= 1:
        return 1.0
    left = gpus - CONTEXT / total
    if left <= 0:
        raise ResourcesError(
            f"ray.gpus={gpus:g} of a GPU with {gigabytes(total)} is {gigabytes(gpus * total)}, which a process needs before it "
            f"computes anything ({gigabytes(CONTEXT)}); raise ray.gpus, or set it to auto"
        )
    return left


_DRIVERS = {11: 450, 12: 525, 13: 580}
"""The oldest NVIDIA driver for each major version of CUDA."""


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the version of this node's NVIDIA driver; empty if there is no driver."""
    try:
        found = re.search(r"\b\d{3,}(\.\d+)+\b", file.read_text(errors="replace"))
    except OSError:
        return ""
    return found[0] if found else ""


def why_no_gpu(driver: str | None = None, cuda: str | None = torch.version.cuda) -> str:
    """Return why PyTorch finds no GPU on this node, and the software to install.

    Args:
        driver: version of the NVIDIA driver; empty: there is none; ``None``: this node's.
        cuda: version of CUDA that PyTorch is built for; ``None``: it is built without CUDA.
    """
    driver = driver_version() if driver is None else driver
    built = f"PyTorch {torch.__version__} is built {f'for CUDA {cuda}' if cuda else 'without CUDA'}"
    found = f"{socket.gethostname()} has {f'NVIDIA driver {driver}' if driver else 'no NVIDIA driver'}, and {built}"
    if cuda is None:
        return f"{found}; install PyTorch with CUDA there"
    needed = _DRIVERS.get(int(cuda.partition(".")[0]), max(_DRIVERS.values()))
    has = int(driver.partition(".")[0] or 0)
    if has >= needed:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        return f"{found}, so the driver fits; check the GPU there with nvidia-smi, and CUDA_VISIBLE_DEVICES ({visible})"
    older = [version for version, least in _DRIVERS.items() if has >= least]
    other = f", or PyTorch for CUDA {max(older)}" if older else ""
    return f"{found}; install NVIDIA driver {needed} or newer there{other}"


def hide_gpus() -> None:
    """Let this process see no GPU, as long as it has not used one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def gigabytes(number_of_bytes: float) -> str:
    """Return bytes in words, as memory is counted.

    >>> gigabytes(3 << 29)
    '1.50 GiB'
    """
    return f"{number_of_bytes / 2**30:.2f} GiB"


def share(memory: Memory, settings: RaySettings, gpus: int | None) -> float:
    """Return the share of a GPU for each actor, such that as many as fit may be there: 1 / slots, in Ray's steps of 0.0001.

    Args:
        memory: measured.
        settings: with the number of actors wanted.
        gpus: that the cluster has; ``None``: not known, because it grows.

    Raises:
        ResourcesError: more actors are wanted than fit.
    """
    of = f"{gigabytes(memory.peak)} of a GPU ({memory.device}, {gigabytes(memory.total)})"
    measured = f"a client actor needs {of}, as measured on the largest client"
    slots = memory.slots
    if slots == 0:
        raise ResourcesError(
            f"{measured}: not even one fits; lower train.batch_size, evaluate.batch_size or train.together"
        )
    wanted = settings.actors
    if gpus is not None and isinstance(wanted, int) and wanted > slots * gpus:
        raise ResourcesError(
            f"{measured}: {slots} fit on a GPU and {slots * gpus} on the cluster's {gpus}, but ray.actors={wanted}; lower "
            f"ray.actors, train.batch_size or train.together"
        )
    return math.floor(10_000 / slots) / 10_000


def measure(run_dir: Path, config: Config, device: CudaDevice, where: str) -> Memory:
    """Return what one client actor needs for the heaviest work of the next round; remembered for a kind of work and a device.

    Args:
        run_dir: of the run; nothing in it is changed.
        config: of the run.
        device: whose memory is measured.
        where: the same device for PyTorch, ``"cuda"``.

    Raises:
        ResourcesError: not even one client's work fits.
    """
    train, evaluate = config.train, config.evaluate
    # On a GPU the features may lie there too, so the data count.
    work = (config.parts.method, config.parts.models, config.data.model_dump_json(exclude={"cache"}))
    batches = (train.batch_size, train.together, train.optimiser, train.precision, evaluate.batch_size)
    kind = (work, batches, device.name(), device.total(), torch.__version__)
    path = (config.data.cache or default_cache()) / "gpu_memory.json"

    def of_heaviest() -> int:
        try:
            return device.peak(lambda: _heaviest(run_dir, config, where))
        except torch.OutOfMemoryError as error:
            raise ResourcesError(
                f"one client's work does not fit into a whole GPU ({device.name()}, {gigabytes(device.total())}): {error}; lower "
                f"train.batch_size, evaluate.batch_size or train.together"
            ) from error

    return Memory(device.name(), device.total(), measure_once(path, kind, of_heaviest))


def _heaviest(run_dir: Path, config: Config, where: str) -> None:
    """Do the heaviest work of the next round, and keep nothing."""
    with tempfile.TemporaryDirectory(prefix="raydfl-slots-") as name:
        scratch, store = RunStore(Path(name)), RunStore(run_dir)
        latest = store.latest()
        if latest is not None:
            commit = store.load(latest)
            scratch.together = commit.together
            scratch.commit(commit.state, commit.private)
        population = Population.load(run_dir / "population")
        pool = open_serial_pool(run_dir, config, population, Path(name) / "private", where)
        with contextlib.closing(pool), contextlib.closing(Federation(config, population, scratch, pool)) as federation:
            for orders in federation.find_heaviest():
                list(pool.run(orders, federation.broadcast(keys_of(orders))))


class _Probe:
    """An actor with a GPU of its own."""

    def memory(self, run_dir: str, config: Config) -> Memory:
        """Do :func:`measure`."""
        if not torch.cuda.is_available():
            raise ResourcesError(
                f"ray.gpus: auto needs a GPU that PyTorch can use: {why_no_gpu()}, or set ray.gpus=0 for the CPU"
            )
        return measure(Path(run_dir), config, CudaDevice(), "cuda")


def with_share(run_dir: Path, config: Config, tell: Callable[[str], None]) -> Config:
    """Return a configuration with the measured share instead of ``ray.gpus: auto``. Ray has to be connected.

    Args:
        run_dir: of the run.
        config: of the run.
        tell: shows what was found.

    Raises:
        ConfigError: it cannot be measured here.
        ResourcesError: there is no GPU, or more actors are wanted than fit.
    """
    settings = config.ray
    if config.data.sites:
        raise ConfigError(
            "ray.gpus: auto is measured where the run is, but the data are at data.sites; give a share such as 0.25"
        )
    there: float = ray.cluster_resources().get("GPU", 0.0)  # type: ignore[no-untyped-call]
    if there < 1 and not settings.autoscale:
        raise ResourcesError(
            f"ray.gpus: auto needs a whole GPU for a moment, the cluster has {there:g}; set ray.gpus=0 for the "
            f"CPU, or a share by hand"
        )
    probe: Any = ray.remote(_Probe).options(num_cpus=settings.cpus, num_gpus=1).remote()
    try:
        answer = probe.memory.remote(str(run_dir), config)
        memory: Memory = ray.get(answer, timeout=None if settings.autoscale else 600 + settings.ready_timeout)
    except RayTaskError as error:
        raise task_cause(error) from error
    except GetTimeoutError:
        raise ResourcesError(
            f"ray.gpus: auto: no GPU became free within {settings.ready_timeout:g} s; wait for other runs, or give a share by hand"
        ) from None
    except RayError as error:
        raise ResourcesError(
            f"ray.gpus: auto: the actor that measured was lost: {type(error).__name__}; give a share by hand"
        ) from error
    finally:
        ray.kill(probe)
    found = share(memory, settings, None if settings.autoscale else int(there))
    tell(
        f"a client actor needs {gigabytes(memory.peak)} of {gigabytes(memory.total)} ({memory.device}): {memory.slots} fit on a "
        f"GPU, each gets {found:g} of it"
    )
    return config.model_copy(update={"ray": settings.model_copy(update={"gpus": found})})
