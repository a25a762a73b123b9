"""Run other people's code so that whatever it does stays a value.

A guarded call runs in a thread of its own with a time limit. It comes back with what the code
returned, what it raised, or that it did not answer; what it printed is kept apart from the
process's own output. A thread that hangs cannot be ended from outside: it is left behind as a
daemon, and nobody waits for it.
"""

from __future__ import annotations

import contextvars
import io
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

_OUTPUT_LIMIT = 4_000  # characters of captured output that are kept

_local = threading.local()
_router_lock = threading.Lock()
_captured: dict[int, io.StringIO] = {}


@dataclass(frozen=True)
class Outcome:
    """What became of a guarded call.

    Attributes:
        value: what was returned; None unless the call came to its end.
        error: what was raised, or None.
        timed_out: whether the time limit passed first.
        output: what the code printed to stdout and stderr.
    """

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False
    output: str = ""

    @property
    def ok(self) -> bool:
        """Whether the call came to its end and returned."""
        return self.error is None and not self.timed_out


def in_guarded_call() -> bool:
    """Whether the calling thread is inside :func:`call_guarded`."""
    return getattr(_local, "guarded", False)


def call_guarded(function: Callable[[], Any], seconds: float) -> Outcome:
    """Call ``function`` in a thread of its own and wait at most ``seconds`` for it.

    Context variables are those of the caller. A ``KeyboardInterrupt`` is passed on; every other
    exception, ``SystemExit`` too, is an outcome. A call from inside a guarded call runs in the
    same thread: the time limit of the outer call holds for both.
    """
    if in_guarded_call():
        return _run(function)
    outcome: list[Outcome] = []
    buffer = io.StringIO()
    context = contextvars.copy_context()

    def body() -> None:
        _local.guarded = True
        with _Capture(buffer):
            outcome.append(context.run(_run, function))

    thread = threading.Thread(target=body, name="attnmux-plugin", daemon=True)
    thread.start()
    thread.join(seconds)
    output = _shorten(buffer.getvalue())
    if not outcome:
        return Outcome(timed_out=True, output=output)
    done = outcome[0]
    if isinstance(done.error, KeyboardInterrupt):
        raise done.error
    return Outcome(done.value, done.error, False, output)


def _run(function: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(value=function())
    except BaseException as error:
        # Catching everything is this module's purpose: the caller decides what it means.
        return Outcome(error=error)


def _shorten(text: str) -> str:
    return text if len(text) <= _OUTPUT_LIMIT else text[:_OUTPUT_LIMIT] + "..."


class _Router:
    """Stands in for ``sys.stdout`` or ``sys.stderr``: output of captured threads goes aside."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        buffer = _captured.get(threading.get_ident())
        return self._stream.write(text) if buffer is None else buffer.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Capture:
    """While open, what the current thread prints goes to ``buffer``; other threads are untouched.

    The routers stay in place until the last captured thread is done, so that a thread left behind
    by a time limit does not print into the process's output later.
    """

    def __init__(self, buffer: io.StringIO) -> None:
        self._buffer = buffer

    def __enter__(self) -> None:
        with _router_lock:
            _captured[threading.get_ident()] = self._buffer
            for name in ("stdout", "stderr"):
                stream = getattr(sys, name)
                if stream is not None and not isinstance(stream, _Router):
                    setattr(sys, name, _Router(stream))

    def __exit__(self, *_: object) -> None:
        with _router_lock:
            _captured.pop(threading.get_ident(), None)
            if _captured:
                return
            for name in ("stdout", "stderr"):
                stream = getattr(sys, name)
                if isinstance(stream, _Router):
                    setattr(sys, name, stream._stream)


def _forget_threads_of_the_parent() -> None:
    global _router_lock
    _router_lock = threading.Lock()
    _captured.clear()


if hasattr(os, "register_at_fork"):
    # A forked child has none of the parent's threads and must not wait for a lock of theirs.
    os.register_at_fork(after_in_child=_forget_threads_of_the_parent)
