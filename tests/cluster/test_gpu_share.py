"""The number of actors per GPU: arithmetic, messages and cached measurements, with a fake device."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import torch

from raydfl.cluster.client import choose_device
from raydfl.cluster.gpu import (
    CONTEXT,
    Memory,
    NodeMemory,
    _Probe,
    compute_memory_fraction,
    compute_share,
    explain_missing_gpu,
    measure_memory,
    read_driver_version,
    resolve_auto,
)
from raydfl.cluster.resources import format_gib
from raydfl.core.errors import ConfigError, ResourcesError
from raydfl.engine.config import Config
from raydfl.engine.settings import RaySettings
from raydfl.engine.storage.store import RunStore
from raydfl.runs._run import run
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress

Tiny = Callable[..., Config]
GB = 1 << 30


class FakeDevice:
    """A fake GPU with given memory requirements."""

    def __init__(self, total: int = 16 * GB, peak: int = 3 * GB, fails: bool = False) -> None:
        self._total, self._peak, self._fails = total, peak, fails
        self.measured = 0

    def name(self) -> str:
        return "Made-up 16"

    def total(self) -> int:
        return self._total

    def peak(self, work: Callable[[], None]) -> int:
        self.measured += 1
        if self._fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        work()
        return self._peak


@pytest.mark.parametrize(
    ("total", "peak", "slots"), [(16 * GB, 3 * GB, 5), (16 * GB, 16 * GB, 1), (16 * GB, 17 * GB, 0), (9, 3, 3)]
)
def test_the_memory_limits_the_number_of_actors(total: int, peak: int, slots: int) -> None:
    assert Memory("x", total, peak).slots == slots


def test_the_share_is_at_most_one_over_the_slots() -> None:
    for slots in range(1, 200):
        share = compute_share(Memory("x", slots * GB, GB), RaySettings(actors=1), 1)
        assert share * slots <= 1 < (share + 0.0001) * slots + 1e-9
        assert round(share * 10_000) == pytest.approx(share * 10_000)  # the finest resolution of Ray


def test_too_many_actors_are_rejected_with_numbers() -> None:
    memory = Memory("Made-up 16", 16 * GB, 3 * GB)
    assert compute_share(memory, RaySettings(actors=10, gpus="auto"), 2) == 0.2
    with pytest.raises(
        ResourcesError,
        match=r"a client actor needs 3.00 GiB of a GPU \(Made-up 16, 16.00 GiB\), measured on the "
        r"largest client: 5 fit on a GPU and 10 on the cluster's 2, but ray.actors=11. Lower ray.actors",
    ):
        compute_share(memory, RaySettings(actors=11, gpus="auto"), 2)
    compute_share(memory, RaySettings(actors=11, gpus="auto", autoscale=True), None)  # GPUs may be added
    with pytest.raises(ResourcesError, match=r"needs 17.00 GiB .* no actor fits. Lower train.batch_size"):
        compute_share(Memory("Made-up 16", 16 * GB, 17 * GB), RaySettings(actors=1), 1)


def test_the_cap_leaves_room_for_the_context_of_each_process() -> None:
    assert compute_memory_fraction(1.0, 16 * GB) == compute_memory_fraction(2.0, 16 * GB) == 1.0
    for actors in (2, 4, 7):
        assert actors * (compute_memory_fraction(1 / actors, 16 * GB) * 16 * GB + CONTEXT) == pytest.approx(16 * GB)
    with pytest.raises(
        ResourcesError, match=r"ray.gpus=0.03 of a GPU with 16.00 GiB is 0.48 GiB, .* needs 0.50 GiB\. Raise ray.gpus"
    ):
        compute_memory_fraction(0.03, 16 * GB)


def test_the_measured_peak_fits_into_the_cap() -> None:
    """PyTorch's cap for a share covers the measured peak without the context."""
    for peak in (CONTEXT + 1, GB, 3 * GB, 7 * GB):
        share = 1 / Memory("x", 16 * GB, peak).slots
        assert compute_memory_fraction(share, 16 * GB) * 16 * GB >= peak - CONTEXT


def test_client_memory_is_measured_once_per_model_and_device(tiny: Tiny, tmp_path: Path) -> None:
    cache = f"data.cache={tmp_path / 'cache'}"
    config = tiny(cache)
    folder = create(config, Progress("quiet"))
    before = sorted(path for path in folder.rglob("*"))
    device = FakeDevice()
    memory = measure_memory(folder, config, device, "cpu")
    assert memory == Memory("Made-up 16", 16 * GB, 3 * GB)
    assert sorted(path for path in folder.rglob("*")) == before
    assert measure_memory(folder, config, device, "cpu") == memory
    assert device.measured == 1
    for changed in (
        "train.batch_size=4",
        "train.precision=bfloat16",
        "evaluate.batch_size=32",
        "models.model.hidden=9",
    ):
        other = tiny(cache, changed, "run.name=other")
        if changed == "models.model.hidden=9":  # a separate run: its first commit contains the networks
            measure_memory(create(other, Progress("quiet")), other, device, "cpu")
        else:
            measure_memory(folder, other, device, "cpu")
    assert device.measured == 5
    assert measure_memory(folder, config, FakeDevice(total=8 * GB, peak=GB), "cpu").slots == 8


def test_the_largest_orders_are_training_and_evaluation_of_the_largest_client(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raydfl.engine.worker import Worker

    config = tiny(f"data.cache={tmp_path / 'cache'}", "train.together=2", "train.cohort=4", method="fedmlac")
    folder = create(config, Progress("quiet"))
    done = []
    carry_out = Worker.carry_out
    monkeypatch.setattr(
        Worker,
        "carry_out",
        lambda self, orders, broadcast, *_: (done.append(orders), carry_out(self, orders, broadcast))[1],
    )
    measure_memory(folder, config, FakeDevice(), "cpu")
    trained = [order for orders in done for order in orders if order.measure is None]
    evaluated = [orders for orders in done if orders[0].measure is not None]
    assert done[0] == trained
    assert 1 <= len(trained) <= 2
    largest = max(trained, key=lambda order: order.cost)
    assert [orders[0].task.client_id for orders in evaluated] == ["", largest.task.client_id]
    assert RunStore(folder).latest() is None


def test_node_memory_is_the_peak_of_the_process() -> None:
    """The peak counts touched memory even if it is freed again."""
    memory, size = NodeMemory("cpu"), 256 << 20
    before = memory.peak(lambda: None)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def touch() -> None:
        torch.ones(before - resident + size, dtype=torch.uint8)

    after = memory.peak(touch)
    assert after == pytest.approx(before + size, abs=64 << 20)
    assert memory.peak(lambda: None) >= after
    assert memory.total() > after


def test_the_memory_of_a_node_is_measured_on_the_largest_client(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(f"data.cache={tmp_path / 'cache'}")
    folder = create(config, Progress("quiet"))
    memory = measure_memory(folder, config, NodeMemory("cpu"), "cpu")
    assert 50 << 20 < memory.peak < memory.total
    assert measure_memory(folder, config, NodeMemory("cpu"), "cpu") == memory  # from the cache


def test_work_larger_than_the_gpu_is_rejected(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(f"data.cache={tmp_path / 'cache'}")
    folder = create(config, Progress("quiet"))
    with pytest.raises(
        ResourcesError,
        match=r"the work of one client does not fit on a whole GPU \(Made-up 16, 16.00 GiB\): CUDA out of",
    ):
        measure_memory(folder, config, FakeDevice(fails=True), "cpu")


def test_gpu_settings_are_validated(tiny: Tiny) -> None:
    assert tiny("ray.gpus=auto", "ray.actors=2").ray.gpu_share == 1.0
    assert tiny("ray.gpus=0.25", "ray.actors=2").ray.gpu_share == 0.25
    assert tiny("ray.gpus=auto", "ray.actors=2").digest() == tiny().digest()
    for wrong in ("-1", "much"):
        with pytest.raises(ConfigError, match=r"ray.gpus"):
            tiny(f"ray.gpus={wrong}")


@pytest.mark.parametrize(
    ("driver", "cuda", "share", "remedy"),
    [
        ("", "13.0", "no NVIDIA driver, and", "Install NVIDIA driver 580 or newer on this node"),
        (
            "550.54.15",
            "13.0",
            "driver 550.54.15, and",
            "Install NVIDIA driver 580 or newer on this node, or PyTorch for CUDA 12",
        ),
        (
            "470.1",
            "12.8",
            "driver 470.1, and",
            "Install NVIDIA driver 525 or newer on this node, or PyTorch for CUDA 11",
        ),
        ("580.65", "14.1", "driver 580.65, and", "so the driver fits. Check the node with nvidia-smi"),
        ("550.54.15", None, "driver 550.54.15, and", "Install PyTorch with CUDA on this node"),
    ],
)
def test_a_missing_gpu_is_explained_by_driver_and_cuda(driver: str, cuda: str | None, share: str, remedy: str) -> None:
    reason = explain_missing_gpu(driver, cuda)
    assert share in reason
    assert f"built for CUDA {cuda}" in reason or cuda is None
    assert remedy in reason


def test_the_drivers_version_is_read_from_the_system(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert read_driver_version(file) == ""
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\nGCC version:  gcc version 12.3.0"
    )
    assert read_driver_version(file) == "550.54.15"


@pytest.mark.parametrize(
    "settings", [["ray.gpus=0.5"], ["ray.gpus=auto"], ["ray.memory=auto"], ["ray.address='10.0.0.1:6379'"]]
)
def test_actor_settings_are_rejected_without_actors(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # another test may have started Ray
    config = tiny("ray.actors=0", *settings)
    with pytest.raises(
        ConfigError, match=r"ray\..*: with ray.actors=0 clients train in this process, .*ray.actors to at least 1"
    ):
        run(config)
    assert not any(Path(config.run.dir).glob("*"))


def test_a_process_without_a_share_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(0.5, cpu_fallback=True) == "cpu"
    with pytest.raises(
        ResourcesError, match=r"ray.gpus=0.5, but PyTorch finds no GPU: .*, or set ray.cpu_fallback=true"
    ):
        choose_device(0.5)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert choose_device(0.0) == "cpu"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.slow
def test_the_server_sees_no_gpu_and_a_client_sees_only_its_gpu(
    ray_session: None, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "looking.py"
    source.write_text(
        "import os\nfrom raydfl import Method\n\n\nclass Looking(Method):\n"
        "    def local(self, step):\n        assert os.environ['CUDA_VISIBLE_DEVICES'] == '0', os.environ['CUDA_VISIBLE_DEVICES']\n"
        "        return super().local(step)\n\n"
        "    def aggregate(self, state, updates, rng):\n        assert os.environ['CUDA_VISIBLE_DEVICES'] == ''\n"
        "        return super().aggregate(state, updates, rng)\n"
    )
    outcome = run(
        tiny(
            f"method.name={source}:Looking",
            "ray.actors=1",
            "ray.cpus=0.5",
            "ray.gpus=0.5",
            "ray.cpu_fallback=true",
            "train.rounds=1",
        )
    )
    assert outcome.finished


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_auto_is_rejected_without_cuda(ray_session: None, tiny: Tiny) -> None:
    """Ray has one logical GPU, PyTorch has no GPU."""
    config = tiny("ray.gpus=auto", "ray.actors=2", "ray.cpus=0.5")
    with pytest.raises(ResourcesError, match=r"ray.gpus: auto needs a GPU for PyTorch: .* set ray.gpus=0 for the CPU"):
        run(config)
    deadline = time.monotonic() + 60
    while ray.available_resources().get("GPU") != 1.0:  # the measuring actor ends
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
def test_the_run_uses_the_measured_share(ray_session: None, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    class Probe(_Probe):
        def memory(self, run_dir: str, config: Config, files: object) -> Memory:
            return Memory("Made-up 16", 16 * GB, 3 * GB)

    monkeypatch.setattr("raydfl.cluster.gpu._Probe", Probe)
    messages_seen: list[str] = []
    config = tiny(
        "ray.gpus=auto", "ray.actors=2", "ray.cpus=0.5", "ray.cpu_fallback=true", "train.rounds=1", "run.name=measured"
    )
    share = resolve_auto(create(config, Progress("quiet")), config, messages_seen.append)
    assert share.ray.gpus == 0.2
    assert messages_seen == [
        "A client actor needs 3.00 GiB of 16.00 GiB (Made-up 16). 5 fit on a GPU, and each reserves 0.2 of it."
    ]
    assert run(config).finished
    with pytest.raises(ResourcesError, match=r"5 fit on a GPU and 5 on the cluster's 1, but ray.actors=6"):
        run(tiny("ray.gpus=auto", "ray.actors=6", "ray.cpus=0.1", "run.name=many"))


@pytest.mark.slow
def test_actors_reserve_the_measured_memory(ray_session: None, tiny: Tiny) -> None:
    messages_seen: list[str] = []
    config = tiny("ray.memory=auto", "ray.actors=2", "ray.cpus=0.5", "train.rounds=1", "run.name=weighed")
    holder = ray.util.placement_group([{"CPU": 4}])
    ray.get(holder.ready(), timeout=60)
    timer = threading.Timer(10.0, ray.util.remove_placement_group, [holder])
    timer.start()
    measured = resolve_auto(create(config, Progress("quiet")), config, messages_seen.append)
    timer.join()
    size = measured.ray.memory
    assert isinstance(size, int)
    assert size > 50 << 20
    assert messages_seen.pop(0) == "Waiting for 0.5 CPU: 4 of 4 CPU are used by other actors."
    assert messages_seen == [f"A client actor needs {format_gib(size)} of its node's memory, and reserves it."]
    total = ray.cluster_resources()["memory"]
    free = []
    outcome = run(
        config, Progress("quiet"), lambda report: free.append(ray.available_resources().get("memory", 0.0)) or False
    )
    assert outcome.finished
    assert free == [pytest.approx(total - 2 * size)]
    with pytest.raises(
        ResourcesError, match=r"99 client actors with .* GiB memory each need .* Lower ray.actors or ray.memory"
    ):
        run(tiny(f"ray.memory={int(total / 98)}", "ray.actors=99", "ray.cpus=0", "run.name=heavy"))
