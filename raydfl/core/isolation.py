"""Isolation of untrusted files: functions that read them run in a helper process with limits.

A damaged or malicious file can crash a decoder, exhaust the memory, or keep it busy forever. :func:`map_isolated` calls a function
in a helper process, and turns each of these ends into a DataError. The helper is a fresh interpreter. It inherits the environment
variables of :data:`ENVIRONMENT`, and no sockets or open files except stderr. Its results are JSON values, arrays and Arrow
tables. They contain no code, unlike pickles.

A process keeps its idle helpers for the next call. A helper ends after 10 s without a call, and when its parent ends.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa

from raydfl.core.errors import DataError, RaydflError, explain_failure, translate_failures
from raydfl.core.memory import read_free_memory

ENVIRONMENT = (
    *("PATH", "HOME", "TMPDIR", "TZ", "LANG", "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH"),
    *("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "RAYDFL_CACHE"),
)
"""Environment variables that a helper inherits."""
_PREFIXES = ("LC_", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_")
"""Prefixes of further variables that a helper inherits."""
SECONDS = 600
"""Time limit for a clip, or for a file of a list."""
_IDLE_S = 10
_IDLE_CODE = 75
"""Exit code of a helper without a call for some time."""
_LEAST_MEMORY = 1 << 30
_BUFFER = 1 << 20
"""Bytes that a helper reads ahead of its parent. It is Linux's largest pipe of an unprivileged user."""
_HEADER_BYTES = 1 << 24
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from raydfl.core import isolation; isolation.serve()"
)


def call_isolated(function: Callable[..., Any], *args: Any, where: str, seconds: int = SECONDS) -> Any:
    """Call a function in a helper process, and return its result.

    Args:
        function: an importable function.
        args: its arguments. They are pickled.
        where: the file, for an error if the function has not named a file with :func:`reading`.
        seconds: time limit for a file.

    Returns:
        The function's result: an Arrow table, an array of numbers, a JSON value, or a tuple of these.

    Raises:
        DataError: the function raised an exception, crashed, or exceeded a limit.
        RaydflError: the function raised this error.
    """
    call = functools.partial(_call, function)
    (result,) = map_isolated(call, [args], [where], seconds)
    if isinstance(result, RaydflError):
        raise result
    return result


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


def map_isolated(
    function: Callable[[Any], Any], items: Sequence[Any], places: Sequence[str], seconds: int = SECONDS
) -> Generator[Any, None, None]:
    """Call a function for each item in a helper process, and yield its result or its error.

    The helper works ahead of the consumer by up to 1 MiB of results. After a crash, a new helper continues with the next item.

    Args:
        function: an importable function, or a ``functools.partial`` of it.
        items: arguments. They are pickled.
        places: file and row of each item, for its error.
        seconds: time limit for an item.

    Yields:
        Results as in :func:`call_isolated`. A RaydflError instead if the function raised it; a DataError for any other end.
    """
    if _service is not None:
        for item, place in zip(items, places, strict=True):
            yield _try(function, item, place)
        return
    done = 0
    while done < len(items):
        helper = _borrow()
        usable = False
        try:
            for result in helper.map(function, items[done:], places[done:], seconds):
                yield result
                done += 1
            usable = helper.used = True
        except _EndedError as end:
            if not (end.idle and helper.used):
                yield DataError(f"{end.place or places[done]}: {end.explain(seconds)}")
                done += 1
        finally:
            if usable:
                _idle.append(helper)
            else:  # Further results may wait in its pipe.
                helper.end()


@contextlib.contextmanager
def reading(place: str | os.PathLike[str], problem: str = "cannot be read", remedy: str = "") -> Iterator[None]:
    """Name a file in the errors of its reader. Every exception becomes a DataError ``place: problem: reason. remedy``.

    In a helper, it also names the file of a crash, and restarts the time limit. Inner calls only name the place of exceptions.

    Args:
        place: the file, optionally with a row or a member.
        problem: start of the message.
        remedy: end of the message.

    Raises:
        DataError: the body raised an exception.
    """
    note = contextlib.nullcontext() if _service is None else _service.note(os.fspath(place))
    with (
        translate_failures(lambda reason: DataError(f"{place}: {problem}: {reason}{'. ' * bool(remedy)}{remedy}")),
        note,
    ):
        yield


class _EndedError(Exception):
    """The end of a helper before its last result."""

    def __init__(self, place: str, code: int) -> None:
        self.place, self.idle, self._code = place, code == _IDLE_CODE, code

    def explain(self, seconds: int) -> str:
        """Return the reason of the end."""
        if self._code == -signal.SIGALRM:
            return f"reading it takes more than {seconds} s. It is damaged, or too large: remove it or divide it"
        if self._code < 0:
            name = signal.Signals(-self._code).name
            cause = "often for lack of memory" if name == "SIGKILL" else "so the file is probably damaged"
            return f"its reader was ended by {name}, {cause}. Copy the file again, or remove it"
        return f"its reader ended with exit code {self._code}. Copy the file again, or remove it"


class _Helper:
    """A helper process, seen from its parent."""

    used = False
    """Whether it has completed a call."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            close_fds=True,
        )
        self._requests = cast(Any, self._process.stdin)
        self._answers = cast(Any, self._process.stdout)
        if sys.platform == "linux":
            import fcntl

            with contextlib.suppress(OSError):  # The user's pipes may be too many for large ones.
                fcntl.fcntl(self._answers.fileno(), fcntl.F_SETPIPE_SZ, _BUFFER)

    @property
    def alive(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

    def map(
        self, function: Callable[[Any], Any], items: Sequence[Any], places: Sequence[str], seconds: int
    ) -> Iterator[Any]:
        """Yield the result or the error of each item.

        Raises:
            _EndedError: the process has ended.
        """
        work = pickle.dumps((function, list(items), list(places), seconds))
        place = ""
        try:
            _write_header({"folder": str(Path.cwd()), "path": sys.path, "size": len(work)}, self._requests)
            self._requests.write(work)
            self._requests.flush()
            for _ in items:
                place = ""
                while True:
                    header = _read_header(self._answers)
                    if "place" not in header:
                        break
                    place = header["place"]
                yield _build(header["result"], self._answers)
        except (BrokenPipeError, EOFError):
            raise _EndedError(place, self._process.wait()) from None

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self.abandon()

    def abandon(self) -> None:
        """Close the pipes, also of another process's helper after a fork."""
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(OSError):
                pipe.close()
        if self._process.returncode is None:
            self._process.returncode = 0


_idle: list[_Helper] = []
"""Helpers without a call."""


def start_helper(function: Callable[..., Any]) -> None:
    """Start a helper in the background for the next call, unless there is one. Call it before a slow import.

    Args:
        function: an importable function. The helper imports its module.
    """
    if _service is not None or any(helper.alive for helper in _idle):
        return
    helper = _Helper(_select_environment())
    helper.used = True  # It may end for lack of calls.
    with contextlib.suppress(_EndedError):
        list(helper.map(function, [], [], SECONDS))
        _idle.append(helper)


def _borrow() -> _Helper:
    """Return an idle helper with the current environment, or start one."""
    environment = _select_environment()
    while _idle:
        helper = _idle.pop()
        if helper.alive and helper.environment == environment:
            return helper
        helper.end()
    return _Helper(environment)


def _select_environment() -> dict[str, str]:
    """Return the environment variables of a new helper."""
    return {name: value for name, value in os.environ.items() if name in ENVIRONMENT or name.startswith(_PREFIXES)}


def _forget_helpers() -> None:
    """Leave the helpers to the parent of a fork."""
    while _idle:
        _idle.pop().abandon()


def _end_helpers() -> None:
    """End the idle helpers, at the end of this process."""
    while _idle:
        _idle.pop().end()


os.register_at_fork(after_in_child=_forget_helpers)
atexit.register(_end_helpers)


class _Service:
    """The helper's side."""

    def __init__(self) -> None:
        # Without a buffer, select sees a request that follows another one at once.
        self._requests, self._answers = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", _BUFFER)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # Decoders may print.
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles it, and closes the pipe.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # It also ends code that ignores Python's signals.
        self.memory = 0
        self._depth, self._seconds = 0, 0

    def run(self) -> None:
        """Answer requests until the parent closes the pipe, or sends none for some time."""
        while select.select([self._requests], [], [], _IDLE_S)[0]:
            try:
                header = _read_header(self._requests)
                work = _read(self._requests, header["size"])
            except EOFError:
                return
            sys.path[:] = header["path"]
            os.chdir(header["folder"])
            function, items, places, self._seconds = pickle.loads(work)  # noqa: S301  (The parent wrote it.)
            self._limit_memory()
            for item, place in zip(items, places, strict=True):
                self._depth = 0
                signal.alarm(self._seconds)
                result = _try(function, item, place)
                signal.alarm(0)  # The parent may be slow.
                try:
                    _write(result, self._answers)
                except TypeError as error:  # It is neither JSON nor numbers.
                    _write(DataError(f"{place}: {error}"), self._answers)
                self._answers.flush()  # A crash at the next item must not lose this result.

    @contextlib.contextmanager
    def note(self, place: str) -> Iterator[None]:
        """Send the parent the file of a crash, and restart the time limit, unless the parent knows a file already."""
        self._depth += 1
        try:
            if self._depth == 1:
                _write_header({"place": place}, self._answers)
                self._answers.flush()
                signal.alarm(self._seconds)
            yield
        finally:
            self._depth -= 1

    def _limit_memory(self) -> None:
        """Limit the memory to half of the free memory, once."""
        if self.memory or sys.platform != "linux":  # macOS has no such limit.
            return
        self.memory = max(_LEAST_MEMORY, read_free_memory() // 2)
        status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        used = next(1024 * int(line.split()[1]) for line in status if line.startswith("VmData:"))
        # RLIMIT_DATA excludes mapped files, which can be larger than the memory, unlike RLIMIT_AS.
        resource.setrlimit(resource.RLIMIT_DATA, (used + self.memory,) * 2)


class _PandasBlocker:
    """Import hook without pandas. Arrow imports it for each converted list if it can (0.2 s), and no reader needs it."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Reject the import of pandas."""
        if name == "pandas":
            raise ModuleNotFoundError("readers run without pandas")


def serve() -> None:
    """Run the helper: the main function of its process."""
    sys.meta_path.insert(0, cast(Any, _PandasBlocker))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    global _service  # noqa: PLW0603  (It exists once in a process.)
    _service = _Service()
    with contextlib.suppress(BrokenPipeError):
        _service.run()
    os._exit(_IDLE_CODE)


_service: _Service | None = None
"""The service of this process if it is a helper."""


def _try(function: Callable[[Any], Any], item: Any, place: str) -> Any:
    """Return the function's result, or its error as a RaydflError."""
    try:
        return function(item)
    except RaydflError as error:
        return error
    except Exception as error:  # noqa: BLE001  (A decoder may raise anything.)
        return DataError(f"{place}: {type(error).__name__}: {explain_failure(error)}")


def _write(result: Any, file: BinaryIO) -> None:
    """Write a result or an error."""
    buffers: list[Any] = []
    _write_header({"result": _describe(result, buffers)}, file)
    file.writelines(buffers)


def _describe(result: Any, buffers: list[Any]) -> Any:
    """Describe a result in JSON, and append its arrays' and tables' bytes to ``buffers``."""
    if isinstance(result, RaydflError):
        return {"error": [type(result).__module__, type(result).__name__, str(result)]}
    if isinstance(result, pa.Table):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, result.schema) as writer:
            writer.write_table(result)
        buffers.append(sink.getvalue())
        return {"table": buffers[-1].size}
    if isinstance(result, np.ndarray):
        if result.dtype.kind not in "biuf":
            raise TypeError(f"an array of {result.dtype} cannot leave the helper")
        order = "F" if result.flags.fnc else "C"
        buffers.append(np.ascontiguousarray(result.T if order == "F" else result).reshape(-1).view(np.uint8))
        return {"array": [result.dtype.str, result.shape, order]}
    if isinstance(result, tuple):
        return {"tuple": [_describe(part, buffers) for part in result]}
    return {"value": result}


def _write_header(header: Any, file: BinaryIO) -> None:
    content = json.dumps(header).encode()
    file.write(len(content).to_bytes(8, "little") + content)


def _build(about: Any, file: BinaryIO) -> Any:
    """Build a result from its description and its bytes."""
    ((kind, value),) = about.items()
    if kind == "error":
        module, name, message = value
        error = getattr(importlib.import_module(module), name) if module.startswith("raydfl.") else DataError
        return error(message)
    if kind == "table":
        table = pa.ipc.open_stream(pa.py_buffer(_read(file, value))).read_all()
        table.validate(full=True)
        return table
    if kind == "array":
        dtype, shape, order = value
        array = np.empty(shape, dtype, order)
        if array.size:
            _fill(memoryview(cast(Any, array.reshape(-1, order=order))).cast("B"), file)
        return array
    if kind == "tuple":
        return tuple(_build(part, file) for part in value)
    return value


def _read_header(file: Any) -> Any:
    size = int.from_bytes(_read(file, 8), "little")
    if size > _HEADER_BYTES:
        raise EOFError  # A crashing process may write anything.
    return json.loads(_read(file, size))


def _read(file: Any, size: int) -> bytearray:
    """Read exactly ``size`` bytes.

    Raises:
        EOFError: the pipe has ended.
    """
    content = bytearray(size)
    _fill(memoryview(content), file)
    return content


def _fill(view: memoryview, file: Any) -> None:
    """Fill a buffer from a pipe.

    Raises:
        EOFError: the pipe has ended.
    """
    while view:
        count = file.readinto(view)
        if not count:
            raise EOFError
        view = view[count:]
