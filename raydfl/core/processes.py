"""Local helping processes for calculations that are cut into independent chunks.

Not ``multiprocessing``: a fresh interpreter that talks over pipes never imports the caller's ``__main__``, so a script without
a ``if __name__ == "__main__"`` guard, a notebook and a Ray worker can all start one. Workers end by themselves when their
caller does.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from raydfl.core.errors import RaydflError

T = TypeVar("T")
R = TypeVar("R")

_PROGRAM = "from raydfl.core.processes import serve; serve()"


def available_cpus() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_with_processes(function: Callable[[T], R], items: Sequence[T], helpers: int) -> Iterator[R]:
    """``function`` of each item, computed here and in helping processes at the same time; results in order of completion.

    Whoever is free takes the next item, so this process works while the others still start.

    Args:
        function: defined at the top level of an importable module.
        items: what can be pickled; so must the results be.
        helpers: other processes; at most one for each item but the first is started.

    Raises:
        RaydflError: a process was killed, by the system for lack of memory perhaps.
        Exception: whatever ``function`` raised; items that had not started are dropped.
    """
    waiting = deque(items)
    answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def help_out() -> None:
        try:
            with contextlib.closing(Worker()) as worker:
                while (item := _next(waiting)) is not _NONE:
                    answers.put((True, worker.call(function, item)))
        except Exception as error:  # noqa: BLE001  (raised again where the results are read)
            answers.put((False, error))

    threads = [threading.Thread(target=help_out) for _ in range(min(helpers, len(items) - 1))]
    for thread in threads:
        thread.start()
    try:
        for _ in items:
            item = _next(waiting) if answers.empty() else _NONE
            if item is not _NONE:
                yield function(item)
                continue
            good, value = answers.get()
            if not good:
                raise value
            yield value
    finally:
        waiting.clear()
        for thread in threads:
            thread.join()


_NONE: Any = object()


def _next(waiting: deque[Any]) -> Any:
    try:
        return waiting.popleft()
    except IndexError:
        return _NONE


class Worker:
    """One interpreter that calls what it is sent."""

    def __init__(self) -> None:
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path or str(Path.cwd()) for path in sys.path))
        # A session of its own: Ctrl-C reaches the caller only, which lets running chunks end and then closes the pipes.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._input = cast(BinaryIO, self._process.stdin)
        self._output = cast(BinaryIO, self._process.stdout)

    def call(self, function: Callable[[T], R], item: T) -> Any:
        """``function(item)``, computed there.

        Raises:
            RaydflError: the process was lost.
            Exception: whatever ``function`` raised.
        """
        try:
            pickle.dump((function, item), self._input)
            self._input.flush()
            good, value = pickle.load(self._output)  # noqa: S301  (from our own child)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            raise RaydflError(
                f"a worker process ended with code {self._process.wait()} in the middle of its work (-9: killed, often for lack "
                "of memory); what the others finished is kept, so run the same command again"
            ) from error
        if not good:
            raise value
        return value

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self._process.kill()

    def close(self) -> None:
        """Let it end once it has done what it was called for."""
        with contextlib.suppress(BrokenPipeError):  # it has gone already
            self._input.close()
        self._output.close()
        self._process.wait()


def serve() -> None:
    """Serve calls in a worker process: read them from standard input, write results to standard output, until the input ends."""
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not land between the answers
    while True:
        try:
            function, item = pickle.load(sys.stdin.buffer)  # noqa: S301  (from our own parent)
        except (EOFError, pickle.UnpicklingError):  # the caller has ended
            return
        try:
            answer = pickle.dumps((True, function(item)))
        except Exception as error:  # noqa: BLE001  (handed to the caller)
            answer = _pickled_error(error)
        answers.write(answer)
        answers.flush()


def _pickled_error(error: Exception) -> bytes:
    try:
        answer = pickle.dumps((False, error))
        pickle.loads(answer)  # noqa: S301  (some exceptions pickle but do not come back)
    except Exception:  # noqa: BLE001
        answer = pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
    return answer
