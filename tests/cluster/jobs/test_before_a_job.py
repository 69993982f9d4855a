"""Checks before training: tokens of clusters, and folders lost with a job."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from commands import Raydfl, write_config

from raydfl.cluster.certificates import make_certificates
from raydfl.cluster.job import check_persistent
from raydfl.cluster.session import check_access
from raydfl.core.errors import ConfigError, ResourcesError
from raydfl.engine.config import Config
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress

Tiny = Callable[..., Config]
TOKEN = "the-token-of-the-cluster"


class Cluster:
    """The part of a cluster's head that checks the token."""

    def __init__(self, code: grpc.StatusCode | None, node: Path | None = None) -> None:
        """Args: code: error code for requests without the token; ``None``: accept all. node: folder of certificates, for TLS."""
        self.seen: list[str] = []
        self._server = grpc.server(ThreadPoolExecutor(1))

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            sent = dict(context.invocation_metadata()).get("authorization", "")
            self.seen.append(sent)
            if code is not None and sent != f"Bearer {TOKEN}":
                context.abort(code, "missing or incorrect")
            return b""

        handlers = {"GetClusterId": grpc.unary_unary_rpc_method_handler(answer)}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", handlers),)
        )
        if node is None:
            port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            pair = (node / "node.key").read_bytes(), (node / "node.crt").read_bytes()
            credentials = grpc.ssl_server_credentials([pair], (node / "ca.crt").read_bytes(), require_client_auth=True)
            port = self._server.add_secure_port("127.0.0.1:0", credentials)
        self.address = f"127.0.0.1:{port}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(None)


@pytest.fixture
def cluster() -> Iterator[Callable[..., Cluster]]:
    started: list[Cluster] = []

    def start(code: grpc.StatusCode | None, node: Path | None = None) -> Cluster:
        started.append(Cluster(code, node))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.fixture(autouse=True)
def _remove_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED])
def test_a_cluster_requires_its_token(
    cluster: Callable[..., Cluster],
    code: grpc.StatusCode,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    head = cluster(code)
    with pytest.raises(
        ResourcesError,
        match=rf"{head.address} refused access: it requires a token, but {tmp_path}/.ray/auth_token contains none",
    ):
        check_access(head.address)
    (tmp_path / ".ray").mkdir()
    preserved = tmp_path / ".ray" / "auth_token"
    preserved.write_text("of another cluster\n")
    preserved.chmod(0o640)
    with pytest.raises(
        ResourcesError, match=rf"{preserved} has mode 0640, so other users .* Run: chmod 600 {preserved}"
    ):
        check_access(head.address)
    preserved.chmod(0o600)
    with pytest.raises(
        ResourcesError,
        match=rf"the token in {tmp_path}/.ray/auth_token is not the cluster's. Set RAY_AUTH_TOKEN to its",
    ):
        check_access(head.address)
    (tmp_path / "file").write_text(f"{TOKEN}\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "file"))
    check_access(head.address)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")  # takes precedence over the file
    with pytest.raises(ResourcesError, match="the token in RAY_AUTH_TOKEN is not"):
        check_access(head.address)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    check_access(head.address)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ResourcesError, match="it requires a token, but RAY_AUTH_MODE=disabled sends none"):
        check_access(head.address)
    assert head.seen == ["", "Bearer of another cluster", f"Bearer {TOKEN}", "Bearer wrong", f"Bearer {TOKEN}", ""]
    monkeypatch.delenv("RAY_AUTH_MODE")  # older versions of Ray ignored tokens by default
    monkeypatch.delattr(
        "ray._private.authentication.authentication_token_setup.maybe_enable_token_auth_if_token_available"
    )
    with pytest.raises(
        ResourcesError, match=r"Ray [\d.]+ sends none as long as RAY_AUTH_MODE is not set\. .* RAY_AUTH_MODE=token"
    ):
        check_access(head.address)


def test_the_address_of_a_dashboard_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:8265 is the address of a dashboard"):
        check_access("http://127.0.0.1:8265")


def test_a_token_is_sent_to_a_cluster_with_tls_only_by_a_process_with_certificates(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (node,) = make_certificates(tmp_path / "ours", ["node"])
    (stranger,) = make_certificates(tmp_path / "theirs", ["node"])
    head = cluster(grpc.StatusCode.UNAUTHENTICATED, node)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    for variable in ("RAY_USE_TLS", "RAY_TLS_CA_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_SERVER_CERT"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ResourcesError, match=r"not the messages of this process: .*Use TLS \(RAY_USE_TLS=1"):
        check_access(head.address)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with pytest.raises(
        ResourcesError, match=r"but RAY_TLS_CA_CERT= cannot be read: the variable is not set. Run `source tls.env`"
    ):
        check_access(head.address)

    def use(folder: Path) -> None:
        monkeypatch.setenv("RAY_TLS_CA_CERT", str(folder / "ca.crt"))
        monkeypatch.setenv("RAY_TLS_SERVER_KEY", str(folder / "node.key"))
        monkeypatch.setenv("RAY_TLS_SERVER_CERT", str(folder / "node.crt"))

    use(stranger)
    with pytest.raises(ResourcesError, match="certificates of one authority"):
        check_access(head.address)
    assert head.seen == []
    use(node)
    check_access(head.address)
    assert head.seen == [f"Bearer {TOKEN}"]
    with pytest.raises(ResourcesError, match="for this command and on all nodes, or nowhere"):
        check_access(cluster(None).address)


def test_ray_handles_other_clusters_and_addresses(cluster: Callable[..., Cluster]) -> None:
    check_access(cluster(None).address)
    check_access(cluster(grpc.StatusCode.UNIMPLEMENTED).address)
    check_access("auto")
    with pytest.raises(OSError, match="refused"):
        check_access("127.0.0.1:1")


def test_a_run_reports_a_missing_token_at_once(
    cluster: Callable[..., Cluster],
    tiny: Tiny,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # the process's current cluster takes precedence
    address = cluster(grpc.StatusCode.UNAUTHENTICATED).address
    raydfl = Raydfl(capsys)
    file = write_config(tiny("ray.actors=1", f"ray.address={address}"), tmp_path)
    for command in (["run"], ["data", "prepare"]):
        raydfl(*command, file).refuses(rf"error: the Ray cluster at {address} refused access: it requires a token")


# -- folders ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def job_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter the working directory of a submitted job."""
    folder = tmp_path / "session" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1234"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    return folder


@pytest.mark.parametrize("command", ["run", "prepare", "sweep"])
@pytest.mark.parametrize("setting", ["run.dir", "data.cache"])
def test_folders_inside_the_job_are_rejected(
    job_folder: Path, tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, setting: str
) -> None:
    file = write_config(tiny(), tmp_path)
    words = {"run": ["run", file], "prepare": ["data", "prepare", file], "sweep": ["sweep", tmp_path / "sweep.yaml"]}
    (tmp_path / "sweep.yaml").write_text(
        f"title: t\nbase: {file}\naxes: {{train.rounds: [1, 2]}}\ndir: {tmp_path}/sweep\n"
    )
    output = Raydfl(capsys)(*words[command], f"{setting}=here")
    if (command, setting) == ("prepare", "run.dir"):
        assert output.code == 0, "nothing is written there"
        return
    name = setting.partition(".")[2]
    output.refuses(
        rf"{setting}: {job_folder}/here is in the temporary folder of this Ray job", f"{setting}=/shared/{name}"
    )
    assert not list(job_folder.iterdir())


@pytest.mark.parametrize("command", ["run", "prepare", "sweep", "search"])
@pytest.mark.parametrize(
    ("name", "content"), [("raydfl.token", "x"), ("keys/auth_token", "x"), ("deep/er/notes", TOKEN)]
)
def test_a_job_with_an_uploaded_token_is_rejected(
    capsys: pytest.CaptureFixture[str],
    job_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    name: str,
    content: str,
) -> None:
    raydfl = Raydfl(capsys)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    words = ["data", "prepare"] if command == "prepare" else [command]
    (job_folder / "harmless.yaml").write_text("method: {}")
    assert "was uploaded" not in raydfl(*words, "harmless.yaml").err
    (job_folder / name).parent.mkdir(parents=True, exist_ok=True)
    (job_folder / name).write_text(content + "\n")
    before = sorted(job_folder.rglob("*"))
    raydfl(*words, "harmless.yaml").refuses(
        rf"{name} was uploaded with the job's working directory.*create a new token"
    )
    assert sorted(job_folder.rglob("*")) == before
    (job_folder / name).unlink()
    (job_folder / "runs").mkdir()
    (job_folder / "runs" / "private.key").write_bytes(bytes(32))
    raydfl(*words, "harmless.yaml").refuses(r"runs/private.key was uploaded .* reveals the noise of a private run")
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")  # a plain shell is not restricted
    assert "was uploaded" not in raydfl(*words, "harmless.yaml").err


def test_git_and_the_upload_ignore_tokens() -> None:
    assert "*.token" in (Path(__file__).parents[3] / ".gitignore").read_text().split()


def test_absolute_paths_and_uris_are_accepted(tmp_path: Path) -> None:
    check_persistent(
        {"run.dir": "s3://bucket/runs", "data.cache": tmp_path, "other": "/runtime_resources/x/working_dir_files"}
    )
    with pytest.raises(ConfigError, match=r"or a URI such as s3://bucket/runs"):
        check_persistent({"run.dir": "/r/runtime_resources/working_dir_files/_ray_pkg_1/runs"})


def test_a_job_without_a_name_warns_that_it_cannot_resume(job_folder: Path, tiny: Tiny) -> None:
    messages: list[str] = []
    progress = Progress("quiet")
    progress.message = messages.append  # type: ignore[method-assign]
    create(tiny("run.name=null"), progress)
    assert [
        text
        for text in messages
        if re.match("run.name is not set, so submitting this job again starts a new run", text)
    ]
    messages.clear()
    create(tiny("run.name=named"), progress)
    assert not [text for text in messages if "run.name" in text]


def test_a_run_resumes_without_the_folder_of_its_first_job(tmp_path: Path, tiny: Tiny) -> None:
    """Ray unpacks each changed working directory, with the user's methods, to a new folder."""
    text = "from raydfl.methods.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n    pass\n"
    for job in ("first", "second"):
        (tmp_path / job).mkdir()
        (tmp_path / job / "mine.py").write_text(text)
    run_dir = create(tiny(method=f"{tmp_path}/first/mine.py:Mine"), Progress("quiet"))
    (tmp_path / "first" / "mine.py").unlink()
    assert create(tiny(method=f"{tmp_path}/second/mine.py:Mine"), Progress("quiet")) == run_dir
    assert json.loads((run_dir / "run.json").read_text())["digest"]
    assert "second/mine.py" in (run_dir / "config.yaml").read_text()


@pytest.mark.slow
def test_a_termination_before_the_first_round_is_an_interruption() -> None:
    """Ray's handler of SIGTERM prints the stack of its C++ code, which looks like a crash."""
    code = (
        "import time\nfrom raydfl.cluster.session import connect_ray\n"
        "with connect_ray(None, local_cpus=1):\n    print('connected', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        process.terminate()
        errors = process.communicate(timeout=60)[1]
    assert "KeyboardInterrupt" in errors
    assert "SIGTERM" not in errors
