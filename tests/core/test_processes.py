from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raydfl.core.errors import RaydflError, ResourcesError
from raydfl.core.processes import share_with_processes


def process_after(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def test_results_come_from_this_process_and_from_as_many_others_as_asked_for() -> None:
    assert sorted(share_with_processes(math.factorial, range(20), 2)) == sorted(map(math.factorial, range(20)))
    processes = list(share_with_processes(process_after, [0.25] * 12, 2))
    assert len(processes) == 12
    assert len(set(processes)) == 3
    assert os.getpid() in processes
    assert set(share_with_processes(process_after, [0.0], 2)) == {os.getpid()}
    assert list(share_with_processes(math.factorial, [], 2)) == []
    assert list(share_with_processes(math.factorial, [3, 4], 0)) == [6, 24]


def fail_elsewhere(message: str) -> str:
    time.sleep(0.2)
    if os.environ.get("RAYDFL_TEST_PARENT") != str(os.getpid()):
        raise ResourcesError(message)
    return message


def print_something(text: str) -> str:
    time.sleep(0.1)
    os.write(1, text.encode())
    return text


def die_elsewhere(code: int) -> None:
    time.sleep(0.2)
    if os.environ.get("RAYDFL_TEST_PARENT") != str(os.getpid()):
        os._exit(code)


def not_picklable(number: int) -> object:
    time.sleep(0.1)
    return lambda: number


@pytest.fixture(autouse=True)
def parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDFL_TEST_PARENT", str(os.getpid()))


def test_what_the_function_prints_does_not_disturb(capfd: pytest.CaptureFixture[str]) -> None:
    assert list(share_with_processes(print_something, ["hello"] * 8, 1)) == ["hello"] * 8
    assert "hello" in capfd.readouterr().err


def test_errors_come_back_as_they_are() -> None:
    with pytest.raises(ResourcesError, match="too full"):
        list(share_with_processes(fail_elsewhere, ["too full"] * 20, 1))
    with pytest.raises(IndexError):  # not mistaken for the end of the work
        list(share_with_processes([].pop, [0, 0, 0], 1))
    with pytest.raises((RuntimeError, AttributeError), match="lambda|local object"):
        list(share_with_processes(not_picklable, range(20), 1))


def test_a_killed_process_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(RaydflError, match=r"ended with code 9 in the middle.*run the same command again"):
        list(share_with_processes(die_elsewhere, [9] * 20, 1))


def test_stopping_early_leaves_no_process() -> None:
    results = share_with_processes(process_after, [0.1] * 100, 1)
    other = next(process for process in results if process != os.getpid())
    results.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(other, 0)


def test_a_script_without_a_main_guard_can_have_helpers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import math\nfrom raydfl.core.processes import share_with_processes\n"
        "print(sorted(share_with_processes(math.factorial, [3, 4], 1)))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == "[6, 24]\n"
