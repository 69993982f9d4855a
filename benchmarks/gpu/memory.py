"""Part 2: the cap of an actor with a share of the GPU holds, is reported clearly, and the measured share is sufficient.

On a GPU each check runs in a separate process, like an actor, because a cap holds for a process.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from gpu.equality import difference
from gpu.federations import Case, configuration, open_federation, tensors_of, train
from gpu.greedy import Greedy
from gpu.lines import Line, Watch, run_checked
from raydfl.cluster.client import choose_device
from raydfl.cluster.gpu import CudaDevice, compute_memory_fraction, measure_memory
from raydfl.cluster.resources import format_gib
from raydfl.core.errors import ClientError
from raydfl.engine.storage.store import RunStore
from raydfl.runs import run
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress

PART = "memory"
SHARE = 0.25
MADE_UP = 16 << 30
"""Bytes of the GPU in a dry run."""
FEDAVG = Case("method", "fedavg", {"models": {"model": {"name": "crnn_tiny", "hidden": 4, "filters": [4]}}})
GREEDY = Case("method", "fedavg", {"models": {"model": {"name": "gpu.greedy:Greedy"}}})


def the_cap_holds(device: str) -> str:
    """Allocate the memory of a share, and then more; return the observation."""
    if device == "cpu":
        return f"dry run: {compute_memory_fraction(SHARE, MADE_UP):.4f} of {format_gib(MADE_UP)} by arithmetic alone"
    found = choose_device(SHARE)
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    allowed, known = compute_memory_fraction(SHARE, total), torch.cuda.get_per_process_memory_fraction()
    if found != "cuda" or abs(known - allowed) > 1e-6:
        raise AssertionError(f"an actor computes on {found} with a cap of {known}, not {allowed}")
    below = torch.empty(int(0.9 * allowed * total), dtype=torch.uint8, device="cuda")
    try:
        torch.empty(int(0.2 * allowed * total), dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return f"{format_gib(below.nbytes)} could be had, 1.1 of the cap of {format_gib(allowed * total)} could not"
    raise AssertionError(f"more than the cap of {format_gib(allowed * total)} could be had")


def a_client_that_needs_more_is_named(device: str, clips: str, folder: str) -> str:
    """Train a client that exceeds the cap; return the run's message. Afterwards the process continues."""
    if device != "cpu":
        choose_device(SHARE)
    config = configuration(GREEDY, Path(clips), Path(folder), "greedy")
    with open_federation(config, device) as (federation, _):
        Greedy.armed = True
        try:
            federation.round()
        except ClientError as error:
            text = str(error)
        else:
            raise AssertionError("a client had more memory than the cap allows")
        finally:
            Greedy.armed = False
        missing = [word for word in ("client", "round 1", "out of memory", "batch_size") if word not in text]
        if missing:
            raise AssertionError(f"the message does not say {missing}: {text}")
    with open_federation(config, device) as (federation, _):
        federation.round()
    return text.partition("\n")[0]


class _Processor:
    """The processor in place of a GPU, in a dry run."""

    def name(self) -> str:
        """Return the processor's name."""
        return "processor"

    def total(self) -> int:
        """Return its assumed memory."""
        return MADE_UP

    def peak(self, work: Callable[[], None]) -> int:
        """Return the peak memory of this process."""
        work()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def the_measured_share(device: str, clips: str, folder: str) -> tuple[float, str]:
    """Measure an actor's need; return its share of a GPU with ``ray.gpus: auto``, and a description."""
    config = configuration(FEDAVG, Path(clips), Path(folder), "measured")
    run_dir = create(config, Progress("quiet"))
    memory = measure_memory(run_dir, config, CudaDevice() if device != "cpu" else _Processor(), device)
    share = int(10_000 / memory.slots) / 10_000
    return share, f"{format_gib(memory.peak)} of {format_gib(memory.total)}: {memory.slots} actors fit"


def fits_into(device: str, clips: str, folder: str, share: float) -> None:
    """Train under the cap of a share."""
    if device != "cpu":
        choose_device(share)
    train(configuration(FEDAVG, Path(clips), Path(folder), "in its share"), device)


def through_ray(device: str, clips: str, folder: str) -> str:
    """Train with two actors that share the GPU; return their difference from this process on the CPU."""
    config = configuration(FEDAVG, Path(clips), Path(folder), "actors")
    expected, _ = train(configuration(FEDAVG, Path(clips), Path(folder), "no-actors"), "cpu")
    shares = {"actors": 2, "cpus": 0.25, "gpus": 0.4 if device != "cpu" else 0.0}
    finished = run(config.model_copy(update={"ray": config.ray.model_copy(update=shares)}), Progress("quiet"))
    share, where = difference(expected, tensors_of(RunStore(finished.run_dir)))
    if share > 1:
        raise AssertionError(f"{where} differs by {share:.1f} times what is allowed")
    return f"{share:.0e} of what is allowed"


def run_isolated(function: Callable[..., Any], device: str, *arguments: Any) -> Any:
    """Call a function in a new process; in a dry run in this process, without a cap.

    Args:
        function: called with the device and the arguments.
        device: its first argument.
        arguments: its further arguments.
    """
    if device == "cpu":
        return function(device, *arguments)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, device, *arguments).result()


def check(clips: Path, folder: Path, device: str, watch: Watch, ray: bool = True) -> list[Line]:
    """Return the lines of this part.

    Args:
        clips: list of the clips.
        folder: for the runs.
        device: ``"cuda"``, or ``"cpu"`` in a dry run.
        watch: started for this part.
        ray: include the check that needs Ray.
    """
    given = (device, str(clips), str(folder))

    def check_auto() -> Line:
        share, text = run_isolated(the_measured_share, *given)
        run_isolated(fits_into, *given, share)
        return Line(PART, "ray.gpus: auto", "ok", f"{text}; a run fits into one's share")

    checks: dict[str, Callable[[], Line]] = {
        "the cap of a share": lambda: Line(PART, "the cap of a share", "ok", run_isolated(the_cap_holds, device)),
        "a client that needs more": lambda: Line(
            PART, "a client that needs more", "ok", run_isolated(a_client_that_needs_more_is_named, *given)
        ),
        "ray.gpus: auto": check_auto,
    }
    if ray:
        checks["two actors share it"] = lambda: Line(
            PART, "two actors share it", "ok", run_isolated(through_ray, *given)
        )
    lines = []
    for what, work in checks.items():
        if watch.left <= 0:
            lines.append(Line(PART, what, "cut short", "no time was left"))
            continue
        lines.append(run_checked(PART, what, work))
        print(f"{lines[-1].result:9} {what} ({lines[-1].details['seconds']} s) {lines[-1].figure}", flush=True)
    return lines
