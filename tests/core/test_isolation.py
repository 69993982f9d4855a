"""Isolation of readers: each end of a helper process is an error with a place, and its secrets and sockets stay in the parent."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raydfl.core import isolation
from raydfl.core.errors import ConfigError, DataError
from raydfl.core.isolation import call_isolated, map_isolated, reading


def fail(kind: str) -> Any:
    """Return the process id, or end abnormally."""
    with reading(f"{kind}.bin"):
        match kind:
            case "exception":
                raise ZeroDivisionError("by zero")
            case "system":
                raise PermissionError(13, "Permission denied")
            case "memory":
                return len(b"1" * (1 << 44))
            case "signal":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "idle exit":
                os._exit(isolation._IDLE_CODE)
            case "time":
                while True:
                    pass
            case "object":
                return object()
            case "text array":
                return np.array(["text"])
            case "configuration":
                raise ConfigError("data.x: wrong")
    return os.getpid()


ENDS = {
    "exception": "exception.bin: cannot be read: by zero",
    "system": "system.bin: cannot be read: Permission denied",
    "memory": "memory.bin: cannot be read: it needs more memory than is available",
    "signal": "signal.bin: its reader was ended by SIGSEGV, so the file is probably damaged",
    "killed": "killed.bin: its reader was ended by SIGKILL, often for lack of memory",
    "exit": "exit.bin: its reader ended with exit code 3",
    "time": "time.bin: reading it takes more than 1 s",
    "object": "row 1: .*not JSON serializable",
    "text array": "row 1: an array of <U4 cannot leave the helper",
    "configuration": "data.x: wrong",
}


@pytest.mark.parametrize("kind", ENDS)
def test_each_end_of_a_reader_is_an_error_with_its_file(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    first, error, last = map_isolated(fail, ["no", kind, "no"], ["row 0", "row 1", "row 2"], 1)
    with pytest.raises(ConfigError if kind == "configuration" else DataError, match=f"^{ENDS[kind]}"):
        raise error
    assert isinstance(first, int)
    assert isinstance(last, int)
    assert (first == last) == (kind not in {"signal", "killed", "exit", "time"})
    assert "Traceback" not in capfd.readouterr().err


def test_an_error_is_raised_by_a_single_call() -> None:
    with pytest.raises(DataError, match=r"^exit\.bin: its reader ended with exit code 3"):
        call_isolated(fail, "exit", where="data set")


def test_a_fresh_helper_that_ends_like_an_idle_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_NEW", "1")  # A new helper.
    with pytest.raises(DataError, match="ended with exit code 75"):
        call_isolated(fail, "idle exit", where="data set")


def make_values(number: int) -> Any:
    table = pa.table({"a": [number, None], "b": ["x", "y"]}).replace_schema_metadata({"remarks": "one"})
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    empty = np.zeros((0, 4), np.uint8)
    return table, (matrix, matrix.T, matrix[:, ::2], empty, np.array(2.0)), {"text": ["ü", None, 1.5, True]}


def test_values_equal_those_of_the_same_process() -> None:
    table, arrays, value = call_isolated(make_values, 7, where="values")
    expected_table, expected_arrays, expected_value = make_values(7)
    assert table.equals(expected_table, check_metadata=True)
    for array, expected in zip(arrays, expected_arrays, strict=True):
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(array, expected)
    assert arrays[1].flags.f_contiguous
    assert value == expected_value


def list_state() -> Any:
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # The folder's own descriptor.
            links.append(str(path.readlink()))
    return dict(os.environ), links, str(Path.cwd()), sys.path


def test_a_helper_has_no_secrets_and_no_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "RAY_AUTH_TOKEN", "MLFLOW_TRACKING_PASSWORD", "LC_TEST"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "more")
    with socket.socket() as inherited, (tmp_path / "file").open("w") as file:
        os.set_inheritable(inherited.fileno(), True)
        os.set_inheritable(file.fileno(), True)
        environment, links, folder, path = call_isolated(list_state, where="state")
    assert [name for name, value in environment.items() if value == "secret"] == ["LC_TEST"]
    assert not [link for link in links if link.startswith("socket:") or link == str(tmp_path / "file")]
    assert folder == str(tmp_path)
    assert path[0] == str(tmp_path / "more")


def ends_within(process: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        status = Path(f"/proc/{process}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_an_idle_helper_ends_and_is_replaced() -> None:
    first = call_isolated(os.getpid, where="id")
    assert not ends_within(first, 2)
    assert ends_within(first, isolation._IDLE_S + 5)
    assert call_isolated(os.getpid, where="id") != first


def test_helpers_are_reused_with_the_same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    first = call_isolated(os.getpid, where="id")
    assert call_isolated(os.getpid, where="id") == first
    monkeypatch.setenv("LC_NEW", "2")
    assert call_isolated(os.getpid, where="id") != first


def test_a_consumer_may_stop_early() -> None:
    stream = map_isolated(np.ones, [(400_000,)] * 20, ["array"] * 20)
    assert next(stream).shape == (400_000,)
    stream.close()
    assert call_isolated(abs, -1, where="id") == 1


def test_a_helper_ends_with_its_parent() -> None:
    program = "import os; from raydfl.core import isolation; print(isolation.call_isolated(os.getpid, where=''))"
    program += "; os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert ends_within(int(done.stdout), 5)


def test_a_fork_starts_its_own_helper() -> None:
    parent = call_isolated(os.getpid, where="id")
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, str(call_isolated(os.getpid, where="id")).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(reader, 100)) != parent
    assert call_isolated(os.getpid, where="id") == parent


def test_reading_names_the_file_in_this_process_too() -> None:
    with (
        pytest.raises(DataError, match=r"^a\.gz: cannot be read: boom\. Copy it again$"),
        reading("a.gz", remedy="Copy it again"),
    ):
        raise EOFError("boom")
    with pytest.raises(DataError, match="^kept$"), reading("a.gz"):
        raise DataError("kept")


def test_partial_functions_and_empty_lists_are_mapped() -> None:
    assert list(map_isolated(functools.partial(max, 3), [1, 5], ["a", "b"])) == [3, 5]
    assert list(map_isolated(abs, [], [])) == []


def test_a_helper_is_started_once_in_the_background_for_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_NEW", "3")
    call_isolated(abs, -1, where="id")  # Ends a helper with another environment.
    (helper,) = isolation._idle
    isolation.start_helper(make_values)
    assert isolation._idle == [helper]
    isolation._end_helpers()
    isolation.start_helper(make_values)
    (helper,) = isolation._idle
    assert call_isolated(list_modules, where="modules")[__name__]
    assert isolation._idle == [helper]


def test_a_started_helper_may_have_ended_before_the_first_call() -> None:
    isolation._end_helpers()
    isolation.start_helper(make_values)
    helper = isolation._idle[0]._process.pid
    os.kill(helper, signal.SIGKILL)
    assert ends_within(helper, 5)
    assert call_isolated(abs, -1, where="id") == 1


def list_modules() -> Any:
    pa.array(["text"])
    return {name: name in sys.modules for name in (__name__, "pandas", "torch")}


def test_a_helper_for_data_sets_has_neither_pandas_nor_pytorch() -> None:
    """Their imports would take most of its start."""
    from raydfl.data import start_reader

    isolation._end_helpers()
    start_reader()
    loaded = call_isolated(list_modules, where="modules")
    assert not loaded["pandas"]
    assert not loaded["torch"]
