"""The cluster files of raydfl are valid, and each rule rejects a copy that breaks it."""

from __future__ import annotations

import copy
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from cluster_rules import check, find_object_store, fit, read_cluster

from raydfl.cluster.resources import actor_kinds
from raydfl.core.errors import ConfigError
from raydfl.engine.config import Config, load_config

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "jobs" / "clusters" / "Dockerfile"
LAUNCHER = ["cluster.yaml", "jobs/clusters/gcp.yaml"]
KUBERAY = "jobs/clusters/kuberay.yaml"
RAYCLUSTER = "jobs/clusters/raycluster.yaml"
GIBIBYTES = {"m6i.xlarge": 16, "g5.xlarge": 16, "n2-standard-4": 16, "g2-standard-4": 16}
"""Memory by type of machine, from the clouds' tables."""
JOBS = [
    path
    for path in sorted((ROOT / "jobs").glob("*.yaml"))
    if not re.search("\naxes:|name: pretrained", path.read_text())  # sweeps, and jobs that need the user's encoder
]
Tiny = Callable[..., Config]


@pytest.mark.parametrize(
    "name", ["cluster.yaml", *(f"jobs/clusters/{path.name}" for path in DOCKERFILE.parent.glob("*.yaml"))]
)
def test_cluster_files_are_valid_and_fit_the_jobs(name: str) -> None:
    assert len(JOBS) >= 4
    lines = check(ROOT / name, JOBS)
    assert len(lines) == 1 + len(JOBS) + 1
    for job, line in zip(JOBS, lines[1:], strict=False):
        config = load_config(job)
        if config.data.sites:
            assert "bound to the nodes of its sites" in line
            continue
        kinds = len(actor_kinds(config.ray, 1))
        assert f"room for {kinds} of {kinds}" in line or "no client actors" in line
    assert "REPLACE" in lines[-1]  # it contains no user's account


def test_versions_match_the_installed_packages() -> None:
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert pinned[1] == ray.__version__
    for name in LAUNCHER:
        assert "--constraint constraints.txt" in (ROOT / name).read_text()
    assert f"\nARG RAY={ray.__version__}\nFROM rayproject/ray:${{RAY}}-py311\n" in DOCKERFILE.read_text()
    for name in (KUBERAY, RAYCLUSTER):
        assert (ROOT / name).read_text().count(f"ray{ray.__version__}") == 2


def test_the_kuberay_job_and_cluster_describe_the_same_nodes() -> None:
    job, cluster = (yaml.safe_load((ROOT / name).read_text()) for name in (KUBERAY, RAYCLUSTER))
    assert (job["kind"], cluster["kind"]) == ("RayJob", "RayCluster")
    assert job["spec"]["rayClusterSpec"] == cluster["spec"]


def test_the_image_contains_all_copied_files() -> None:
    """Oracle: the last matching rule of .dockerignore, and pip's name of the wheel."""
    steps = DOCKERFILE.read_text().replace("\\\n", " ").splitlines()
    (copied,) = (shlex.split(line)[1:] for line in steps if line.startswith("COPY"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wheel = f"build/wheel/{project['name']}-{project['version']}-cp311-cp311-linux_x86_64.whl"
    sources = [name for name in copied if not name.startswith("--")][:-1]
    present = ["constraints.txt", wheel]
    assert (ROOT / "constraints.txt").is_file()
    assert [[name for name in present if fnmatch(name, source)] for source in sources] == [[name] for name in present]
    rules = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().split()
    for name in [*present, "docs/index.md", ".git/config", "build/wheel/venv/bin/python"]:
        fits = [rule for rule in rules if fnmatch(name, rule.removeprefix("!"))]
        assert fits[-1].startswith("!") == (name in present), name
    assert f"raydfl:{project['version']}-ray{ray.__version__}" in DOCKERFILE.read_text()


def test_a_cluster_file_may_use_an_image_instead_of_setup_commands(tmp_path: Path) -> None:
    """Change a copy as the comment in cluster.yaml describes. Ray's validation and our rules accept it."""
    (line,) = re.findall(r"^#   (docker: .*)$", (ROOT / "cluster.yaml").read_text(), re.MULTILINE)

    def change(values: Any) -> None:
        values.update(yaml.safe_load(line), setup_commands=[], head_setup_commands=[])
        for what in ("head", "worker"):
            replace_text(f"{what}_start_ray_commands", "~/venv/bin/ray", "ray")(values)
        values["file_mounts"] = {"/home/ray/.ray/auth_token": "~/.ray/auth_token"}

    assert "REPLACE/raydfl:0.1.0-ray" in check(break_copy("cluster.yaml", tmp_path, change), [])[-1]


def test_the_image_prefers_given_wheels_of_pytorch(tmp_path: Path) -> None:
    """Plan the Dockerfile's installation with pip. Both folders have a version that the constraint accepts."""
    for name in ("torch-2.14.1+cu126", "index/torch-2.14.1", "index/torch-2.14.2", "raydfl-0.1.0"):
        write_wheel(tmp_path / name)
    (tmp_path / "constraints.txt").write_text("ray==2.60.0\ntorch==2.14.1\n")
    install = next(line for line in read_run_steps() if "pip install" in line)
    install = install.replace("/tmp/raydfl", str(tmp_path)).replace(
        "pip install", f"{shlex.quote(sys.executable)} -m pip install --dry-run --ignore-installed"
    )
    environment = os.environ | {"RAY": "2.60.0", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index")}
    done = subprocess.run(["bash", "-euc", install], check=True, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "Would install raydfl-0.1.0 torch-2.14.1+cu126"


@pytest.mark.slow
def test_the_images_commands_work_in_a_virtual_environment(tmp_path: Path) -> None:
    """Execute the RUN steps with this environment's packages, to avoid downloads, then train with the result."""
    image, wheels = tmp_path / "image", tmp_path / "build" / "wheel"
    subprocess.run([sys.executable, "-m", "venv", image], check=True)
    (site,) = image.glob("lib/python3.*/site-packages")
    (site / "behind.pth").write_text(sysconfig.get_path("purelib"))
    # The environment's setuptools would hide the version that PyTorch needs.
    subprocess.run([image / "bin" / "pip", "uninstall", "-q", "-y", "setuptools"], check=True)
    source = tmp_path / "source"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, "."]
    subprocess.run(pip, cwd=source, check=True, env=os.environ | {"CXX": "no-compiler"})
    copied = tmp_path / "copied"
    copied.mkdir()
    for file in (ROOT / "constraints.txt", *wheels.glob("raydfl-*.whl")):
        shutil.copy(file, copied)
    home = tmp_path / "home"
    home.mkdir()
    environment = os.environ | {"PATH": f"{image / 'bin'}:{os.environ['PATH']}", "RAY": ray.__version__}
    environment |= {"RAYDFL_CACHE": str(tmp_path / "cache"), "PIP_NO_INDEX": "1"}
    environment.pop("PYTHONPATH", None)  # uses the installed raydfl
    for step in read_run_steps():
        command = step.replace("/tmp/raydfl", str(copied)).replace("/home/ray", str(home))
        subprocess.run(["bash", "-euc", command], check=True, cwd=home, env=environment)
    run = ["raydfl", "run", "jobs/tiny.yaml", "run.name=hello", "train.rounds=1"]
    done = subprocess.run(run, check=True, cwd=home / "raydfl", env=environment, capture_output=True, text=True)
    assert "finished after 1 of 1 rounds" in done.stdout
    assert "operators are not compiled here" in done.stdout


def read_run_steps() -> list[str]:
    """Return the commands of the Dockerfile's RUN steps."""
    lines = DOCKERFILE.read_text().replace("\\\n", " ").splitlines()
    return [line.removeprefix("RUN ") for line in lines if line.startswith("RUN ")]


def write_wheel(path: Path) -> None:
    """Write an empty wheel. The file's name gives the package and the version; raydfl's wheel needs PyTorch."""
    name, version = path.name.split("-")
    path.parent.mkdir(exist_ok=True)
    needs = "Provides-Extra: speech\nRequires-Dist: torch\n" if name == "raydfl" else ""
    with zipfile.ZipFile(path.with_name(f"{path.name}-py3-none-any.whl"), "w") as wheel:
        information = f"{path.name}.dist-info"
        wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")


def break_copy(name: str, tmp_path: Path, change: Callable[[Any], Any]) -> Path:
    values = yaml.safe_load((ROOT / name).read_text())
    change(values)
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def remove_key(path: str) -> Callable[[Any], Any]:
    def change(values: Any) -> None:
        *groups, last = path.split(".")
        for key in groups:
            values = values[int(key)] if isinstance(values, list) else values[key]
        del values[last]

    return change


def set_key(path: str, value: Any) -> Callable[[Any], Any]:
    def change(values: Any) -> None:
        *groups, last = path.split(".")
        for key in groups:
            values = values[int(key)] if isinstance(values, list) else values[key]
        values[int(last) if isinstance(values, list) else last] = value

    return change


def replace_text(path: str, old: str, new: str) -> Callable[[Any], Any]:
    def change(values: Any) -> None:
        assert any(old in text for text in values[path])
        values[path] = [text.replace(old, new) for text in values[path]]

    return change


LAUNCHER_RULES = [
    (
        replace_text("head_start_ray_commands", "RAY_AUTH_MODE=token ", ""),
        "head_start_ray_commands starts Ray without a token",
    ),
    (
        replace_text("worker_start_ray_commands", "RAY_AUTH_MODE=token ", ""),
        "worker_start_ray_commands starts Ray without a t",
    ),
    (set_key("head_start_ray_commands", ["ray stop"]), "head_start_ray_commands has no `ray start`"),
    (
        replace_text("head_start_ray_commands", "127.0.0.1", "0.0.0.0"),
        "on the head itself only, not on 0.0.0.0; write --dash",
    ),
    (
        replace_text("head_start_ray_commands", "--dashboard-host=127.0.0.1", ""),
        "only, not on Ray's default; write --dashboard-h",
    ),
    (remove_key("head_start_ray_commands"), "only, not on 0.0.0.0"),  # Ray's defaults
    (remove_key("worker_start_ray_commands"), "worker_start_ray_commands starts Ray without a token"),
    (set_key("file_mounts", {}), "file_mounts brings no token to the nodes"),
    (set_key("available_node_types.head.resources", {"CPU": 4}), r"the head \(head\) would get clients"),
    (set_key("available_node_types.head.resources", {}), r"the head \(head\) would get clients"),
    (remove_key("idle_timeout_minutes"), "idle_timeout_minutes is missing"),
    (set_key("available_node_types.gpu.resources", {}), "node type gpu says no resources"),
    (set_key("available_node_types.gpu.min_workers", 1), "node type gpu keeps 1 nodes"),
    # Rejected by Ray itself.
    (set_key("max_wokers", 4), r"Ray refuses the cluster file: ValidationError: .*max_wokers"),
    (set_key("head_node_type", "haed"), "Ray refuses the cluster file: ValueError: `head_node_type` must be one of"),
    (set_key("provider.type", "azzure"), "Ray refuses the cluster file: "),
]


@pytest.mark.parametrize("name", LAUNCHER)
@pytest.mark.parametrize("rule", range(len(LAUNCHER_RULES)))
def test_every_rule_rejects_a_broken_copy(name: str, rule: int, tmp_path: Path) -> None:
    change, message = LAUNCHER_RULES[rule]
    with pytest.raises(ConfigError, match=message):
        check(break_copy(name, tmp_path, change), [])


HEAD, WORKER = "spec.rayClusterSpec.headGroupSpec", "spec.rayClusterSpec.workerGroupSpecs.0"
KUBERAY_RULES = [
    (remove_key("spec.rayClusterSpec.authOptions"), r"no token: .*authOptions: \{mode: token\}"),
    (set_key("spec.rayClusterSpec.authOptions.mode", "disabled"), "no token"),
    (set_key("spec.rayClusterSpec.rayVersion", "2.9.0"), f"rayVersion is '2.9.0', installed is '{ray.__version__}'"),
    (set_key(f"{HEAD}.serviceType", "LoadBalancer"), "serviceType is 'LoadBalancer'"),
    (remove_key(f"{HEAD}.serviceType"), "serviceType is None"),
    (set_key("spec.rayClusterSpec.enableInTreeAutoscaling", False), "the cluster does not grow"),
    (remove_key("spec.rayClusterSpec.autoscalerOptions"), "idleTimeoutSeconds is missing"),
    (set_key(f"{HEAD}.rayStartParams", {}), "the head would get clients"),
    (set_key("spec.rayClusterSpec.workerGroupSpecs", []), "there are no workerGroupSpecs"),
    (set_key(f"{WORKER}.minReplicas", 1), "gpu: pods cost also when nothing runs"),
    (set_key(f"{WORKER}.replicas", 2), "gpu: pods cost also when nothing runs"),
    (remove_key(f"{WORKER}.template.spec.securityContext"), "gpu: runs as root"),
    (set_key(f"{HEAD}.template.spec.securityContext.runAsNonRoot", False), "head: runs as root"),
    (
        set_key(f"{WORKER}.template.spec.containers.0.resources.requests.cpu", "1"),
        "gpu: resources.requests and limits must",
    ),
    (
        set_key(f"{WORKER}.template.spec.containers.0.image", "raydfl:latest"),
        "gpu: the image 'raydfl:latest' does not name Ray",
    ),
    (
        set_key(f"{WORKER}.template.spec.volumes.0", {"name": "shm", "emptyDir": {}}),
        "gpu: /dev/shm must be an emptyDir",
    ),
    (
        remove_key(f"{HEAD}.rayStartParams.object-store-memory"),
        r"head: Ray's object store has 2576980377 bytes, /dev/shm 2147483648: objects would be on disk; lower object-store-m",
    ),
    (
        remove_key(f"{WORKER}.rayStartParams.object-store-memory"),
        r"gpu: Ray's object store has 5153960755 bytes, /dev/shm 4294967296",
    ),
    (remove_key("spec.backoffLimit"), "a job whose head is lost does not start again; write backoffLimit: 3"),
    (
        set_key("spec.entrypoint", "raydfl run jobs/fsdd.yaml run.name=fsdd run.dir=/shared/runs"),
        "gpu: no volume that all pods share",
    ),
]


@pytest.mark.parametrize("rule", range(len(KUBERAY_RULES)))
def test_every_rule_rejects_a_broken_kuberay_manifest(rule: int, tmp_path: Path) -> None:
    change, message = KUBERAY_RULES[rule]
    with pytest.raises(ConfigError, match=message):
        check(break_copy(KUBERAY, tmp_path, change), [])


@pytest.mark.parametrize("name", LAUNCHER)
def test_ray_stores_objects_in_memory_on_cloud_machines(name: str) -> None:
    """Linux gives /dev/shm half of the memory. Containers get the size from the file's comment."""
    text = (ROOT / name).read_text()
    assert "object-store-memory" not in text
    machines = re.findall(r"(?:InstanceType|machineType): (\S+)", text)
    assert {GIBIBYTES[machine] for machine in machines} == {16}
    containers = [int(size) << 30 for size in re.findall(r"--shm-size=(\d+)g", text)]
    for shared in (8 << 30, *containers):
        assert find_object_store(16 << 30, shared, None)[0] == "/dev/shm"


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    def change(values: Any) -> None:
        remove_key("idle_timeout_minutes")(values)
        set_key("file_mounts", {})(values)

    with pytest.raises(
        ConfigError, match=r"(?s)2 found:.*file_mounts brings no token.*idle_timeout_minutes is missing"
    ):
        check(break_copy("cluster.yaml", tmp_path, change), [])


@pytest.mark.parametrize("name", ["cluster.yaml", KUBERAY])
def test_too_large_and_too_many_actors_are_rejected(name: str, tiny: Tiny) -> None:
    cluster = read_cluster(ROOT / name)
    output, wrong = fit(cluster, tiny("ray.actors=16", "ray.gpus=0.25", "ray.cpus=1"))
    assert (output, wrong) == ("16 with 1 CPU and 0.25 GPU each: room for 16 of 16 in the largest cluster", [])
    _, wrong = fit(cluster, tiny("ray.actors=17", "ray.gpus=0.25"))
    assert wrong == [
        "17 client actors have to be there, but the largest cluster has room for 16; raise max_workers (maxReplicas), or lower "
        "ray.actors or ray.min_actors"
    ]
    assert fit(cluster, tiny("ray.actors=17", "ray.gpus=0.25", "ray.min_actors=4"))[1] == []
    _, wrong = fit(cluster, tiny("ray.actors=2", "ray.cpus=8"))
    assert wrong == [
        "a client actor with 8 CPU fits no node type (gpu has 4 CPU and 1 GPU); lower ray.cpus or ray.gpus, or add a type"
    ]
    _, wrong = fit(cluster, tiny("ray.actors=2", "ray.gpus=2"))
    assert "2 GPU fits no node type" in wrong[0]
    assert fit(cluster, tiny("ray.actors=0")) == ("no client actors (ray.actors=0)", [])


def test_several_node_types_share_a_limit(tmp_path: Path, tiny: Tiny) -> None:
    def change(values: Any) -> None:
        kinds = values["available_node_types"]
        kinds["cpu"] = copy.deepcopy(kinds["gpu"]) | {"resources": {"CPU": 8}, "max_workers": 2}
        values["max_workers"] = 3

    cluster = read_cluster(break_copy("cluster.yaml", tmp_path, change))
    # Three nodes: at most two with 8 CPUs, plus one with 4.
    assert fit(cluster, tiny("ray.actors=20"))[1] == []
    assert "room for 20" in fit(cluster, tiny("ray.actors=21"))[1][0]
